"""Guard of the outermost hook frame: faults in a hook never reach training."""

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

from ...calib.arguments.passed_on import masked_text
from .stand_ins import pass_over

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")

MAX_FAULTS = 3
# An error's text may include a whole tensor; a log line must stay a line.
_MAX_TEXT = 200
THREAD_NAME_PREFIX = "forerun-"
"""Prefix of our threads' names: faults on them do not invalidate a training step."""


class Guard:
    """Counter of one session's faults; after ``MAX_FAULTS`` it requests removal of all hooks.

    Exceptions that end a process or a loop (``KeyboardInterrupt``, ``SystemExit``) pass: a signal
    may have arrived while a hook ran.
    """

    def __init__(self, on_trip: Callable[[], None] | None = None) -> None:
        self._on_trip = on_trip
        self._thread, self._process = threading.get_ident(), os.getpid()
        self.num_faults = 0
        self.num_training_faults = 0
        self.is_tripped = False

    def protect(self, function: Callable[_P, _T]) -> Callable[_P, _T | None]:
        """Return ``function`` wrapped so that a fault is counted and the call returns None.

        It runs without the user's active torch function modes, and invisible to the compiler.
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
        """Count ``err``; log the place of the first one, and the removal of hooks.  Never raises.

        Other threads than the training thread leave the removal to ``enter``, which avoids removing
        hooks while training installs or calls them.
        """
        self.num_faults += 1
        self.num_training_faults += not threading.current_thread().name.startswith(
            THREAD_NAME_PREFIX
        )
        # The user's log handler may fail, or the stack may be too deep for logging.
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
        """Register the calling thread as the training thread, and perform a pending removal."""
        self._thread = threading.get_ident()
        if self.is_tripped:
            self._remove()

    @property
    def is_training(self) -> bool:
        """True on the training thread; False everywhere in a forked process."""
        return threading.get_ident() == self._thread and self.is_home

    @property
    def is_home(self) -> bool:
        """False in a process that was forked from the guard's."""
        return os.getpid() == self._process

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
    """Return a context manager class that disables torch function modes; a no-op without torch."""
    torch = sys.modules.get("torch")
    return nullcontext if torch is None else torch._C.DisableTorchFunction


def is_failing() -> bool:
    """Return True at the end of a process that an error ends, which should not be delayed long."""
    return hasattr(sys, "last_value")


def place(err: BaseException) -> str:
    """Return ``file:line ErrorType`` of the innermost frame."""
    frames = traceback.extract_tb(err.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown place"
    return f"{where} {type(err).__name__}"


def _log_fault(what: str, err: Exception) -> None:
    # Text, not the error: a handler that stores its records would retain its frames' tensors.
    text = masked_text(str(err)[:_MAX_TEXT])
    _log.warning("[forerun] %s at %s: %s; training goes on", what, place(err), text)
