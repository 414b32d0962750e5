"""Catch at the outermost hook frame: a fault in a hook never reaches training."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import ParamSpec, TypeVar

from ...calib.arguments import masked_text
from .stand_ins import pass_over

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")

MAX_FAULTS = 3
# An error may hold a whole tensor as text; a log line must stay a line.
_MAX_TEXT = 200
THREAD_NAME_PREFIX = "forerun-"
"""How the names of our own threads begin: what fails there does not spoil a step of training."""


class Guard:
    """Counts faults of one session; after ``MAX_FAULTS`` it asks for all hooks to be removed.

    What ends a process or a loop (``KeyboardInterrupt``, ``SystemExit``) passes: a signal may have
    come while a hook ran.
    """

    def __init__(self, on_trip: Callable[[], None] | None = None) -> None:
        self._on_trip = on_trip
        self._thread, self._process = threading.get_ident(), os.getpid()
        self.num_faults = 0
        self.num_training_faults = 0
        self.is_tripped = False

    def protect(self, function: Callable[_P, _T]) -> Callable[_P, _T | None]:
        """``function``, but a fault is counted and the call returns None.

        It runs under none of the function modes that the user has in force, and unseen by the
        compiler.
        """

        without_modes = _without_modes()

        @functools.wraps(function)
        def protected(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
            try:
                with without_modes():
                    return function(*args, **kwargs)
            except Exception as err:
                self.fault(err)
                return None

        return pass_over(protected)

    def fault(self, err: Exception) -> None:
        """Count ``err``; say where the first one happened, and when hooks go.  Never raises.

        Another thread than the one that trains leaves the removal to ``enter``: hooks that are
        being put on or called are not taken off under its hands.
        """
        self.num_faults += 1
        self.num_training_faults += not threading.current_thread().name.startswith(
            THREAD_NAME_PREFIX
        )
        # Also where the user's log handler fails, or the stack has no room left for a message.
        with suppress(Exception):
            if self.num_faults == 1:
                _log_fault("hook fault", err)
        if self.num_faults < MAX_FAULTS or self.is_tripped:
            return
        self.is_tripped = True
        with suppress(Exception):
            _log_fault(f"hooks removed after {self.num_faults} faults, the last", err)
        if threading.get_ident() == self._thread:
            self._remove()

    def enter(self) -> None:
        """This thread trains: do the removal that another has asked for, and those to come."""
        self._thread = threading.get_ident()
        if self.is_tripped:
            self._remove()

    @property
    def is_training(self) -> bool:
        """True on the thread that trains; in a process that was forked from it, nothing does."""
        return threading.get_ident() == self._thread and os.getpid() == self._process

    def _remove(self) -> None:
        on_trip, self._on_trip = self._on_trip, None
        if on_trip is None:
            return
        try:
            on_trip()
        except Exception as err:
            with suppress(Exception):
                _log_fault("removal fault", err)


def _without_modes() -> Callable[[], AbstractContextManager[object]]:
    """What switches function modes off for a while; nothing where there is no torch."""
    torch = sys.modules.get("torch")
    return nullcontext if torch is None else torch._C.DisableTorchFunction


def is_failing() -> bool:
    """True at the end of a process that an error ends: what waits for it is not held up long."""
    return hasattr(sys, "last_value")


def place(err: BaseException) -> str:
    """``file:line ErrorType`` of the innermost frame."""
    frames = traceback.extract_tb(err.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown place"
    return f"{where} {type(err).__name__}"


def _log_fault(what: str, err: Exception) -> None:
    # A text, not the error: a handler that keeps its records would keep the tensors of its frames.
    text = masked_text(str(err)[:_MAX_TEXT])
    _log.warning("[forerun] %s at %s: %s; training goes on", what, place(err), text)
