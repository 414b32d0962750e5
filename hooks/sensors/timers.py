"""Stands in front of Megatron's timers during hooked steps and notes when phases begin and end.

Megatron's own timers synchronise the device on each start and stop, so they are passed through as
the user configured them and never used to measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..process.guard import Guard
from ..process.host import Reference, reference
from .recorder import Recorder


class NullTimer:
    """A timer that does nothing, where the host has none."""

    def start(self, barrier: bool = False) -> None:
        """Nothing; never a barrier."""

    def stop(self, barrier: bool = False) -> None:
        """Nothing; never a barrier."""


_NULL_TIMER = NullTimer()


def null_timers(name: str, log_level: int | None = None) -> NullTimer:
    """Megatron's ``Timers.__call__`` where the host runs without timers."""
    return _NULL_TIMER


class PhaseTimer:
    """One named timer: marks the phase, calls the real timer, delegates everything else."""

    def __init__(
        self, name: str, real: Any, begin: Callable[[str], Any], end: Callable[[str], Any]
    ) -> None:
        self._name = name
        self._real = real
        self._begin = begin
        self._end = end

    def start(self, *args: Any, **kwargs: Any) -> Any:
        """Start the real timer, then mark: its barrier and synchronisation are not the phase's."""
        result = self._real.start(*args, **kwargs)
        self._begin(self._name)
        return result

    def stop(self, *args: Any, **kwargs: Any) -> Any:
        """Mark, then stop the real timer."""
        self._end(self._name)
        return self._real.stop(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class TimersProxy:
    """The ``Timers`` object that Megatron's code gets while a step is hooked."""

    def __init__(self, real: Any, recorder: Recorder, guard: Guard) -> None:
        self._real = real
        self._begin = guard.protect(recorder.begin_phase)
        self._end = guard.protect(recorder.end_phase)

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> PhaseTimer:
        """The named timer; ``log_level`` is checked by the real timers as ever."""
        return PhaseTimer(name, self._real(name, *args, **kwargs), self._begin, self._end)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class TimerHooks:
    """Puts a proxy wherever the host keeps its timers, and takes it out again."""

    def __init__(self, recorder: Recorder, guard: Guard) -> None:
        self._recorder = recorder
        self._guard = guard
        self._saved: list[tuple[Reference, str, Any, TimersProxy]] = []

    @property
    def num_installed(self) -> int:
        """Places that hold a proxy now."""
        return len(self._saved)

    def install(self, holders: Iterable[tuple[Any, str]]) -> None:
        """Replace the attribute of each (object, attribute); None becomes a proxy of no timers."""
        proxies: dict[int, TimersProxy] = {}
        for owner, name in holders:
            real, find = getattr(owner, name, None), reference(owner)
            if isinstance(real, TimersProxy) or find() is None:
                continue
            proxy = proxies.get(id(real))
            if proxy is None:
                target = null_timers if real is None else real
                proxy = TimersProxy(target, self._recorder, self._guard)
                proxies[id(real)] = proxy
            setattr(owner, name, proxy)
            self._saved.append((find, name, real, proxy))

    def remove(self) -> None:
        """Put the host's timers back wherever the proxy still is."""
        while self._saved:
            find, name, real, proxy = self._saved.pop()
            owner = find()
            if owner is not None and getattr(owner, name, None) is proxy:
                setattr(owner, name, real)
