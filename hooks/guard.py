"""Catch at the outermost hook frame: a fault in a hook never reaches training."""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")

MAX_FAULTS = 3


class Guard:
    """Counts faults of one session; after ``MAX_FAULTS`` it asks for all hooks to be removed."""

    def __init__(self, on_trip: Callable[[], None] | None = None) -> None:
        self._on_trip = on_trip
        self.num_faults = 0
        self.is_tripped = False

    def protect(self, function: Callable[_P, _T]) -> Callable[_P, _T | None]:
        """``function``, but a fault is counted and the call returns None."""

        @functools.wraps(function)
        def protected(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
            try:
                return function(*args, **kwargs)
            except Exception as err:
                self.fault(err)
                return None

        return protected

    def fault(self, err: Exception) -> None:
        """Count ``err``; say where the first one happened, and when hooks go."""
        self.num_faults += 1
        if self.num_faults == 1:
            _log.warning("[forerun] hook fault at %s: %s; training goes on", place(err), err)
        if self.num_faults < MAX_FAULTS or self.is_tripped:
            return
        self.is_tripped = True
        _log.warning(
            "[forerun] hooks removed after %d faults, the last at %s: %s; training goes on",
            self.num_faults,
            place(err),
            err,
        )
        if self._on_trip is not None:
            try:
                self._on_trip()
            except Exception as trip_err:
                _log.warning("[forerun] removal fault at %s: %s", place(trip_err), trip_err)


def place(err: BaseException) -> str:
    """``file:line ErrorType`` of the innermost frame."""
    frames = traceback.extract_tb(err.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown place"
    return f"{where} {type(err).__name__}"
