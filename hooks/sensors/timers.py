"""Begin and end of phases, at the calls of Megatron's timers during hooked steps.

Megatron's own timers synchronise the device on each start and stop, so they run as the user
configured them and are never used to measure.  Their classes have stand-ins; their objects are
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

from ..process.guard import Guard
from ..process.host import Reference, reference
from ..process.inspection import attribute
from ..process.stand_ins import StandIns
from .recorder import Recorder


class PlantedTimers:
    """Timers for a host that has none; copies and pickles of it are None."""

    def __init__(self, begin: Callable[[str], Any], end: Callable[[str], Any]) -> None:
        self._begin, self._end = begin, end

    def __call__(self, name: str, log_level: int | None = None) -> PlantedTimer:
        """Return the timer of that name, like Megatron's ``Timers``."""
        return PlantedTimer(name, self._begin, self._end)

    def __copy__(self) -> None:
        return None

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(None), ()


class PlantedTimer:
    """Marks a phase; never a barrier."""

    def __init__(self, name: str, begin: Callable[[str], Any], end: Callable[[str], Any]) -> None:
        self._name, self._begin, self._end = name, begin, end

    def start(self, barrier: bool = False) -> None:
        """Begin the phase."""
        self._begin(self._name)

    def stop(self, barrier: bool = False) -> None:
        """End the phase."""
        self._end(self._name)


class TimerHooks:
    """Stand-ins for the methods of the host's timers, between ``install`` and ``remove``."""

    def __init__(self, recorder: Recorder, guard: Guard) -> None:
        self._begin = guard.protect(recorder.begin_phase)
        self._end = guard.protect(recorder.end_phase)
        self._learn = guard.protect(self._cover_timer)
        self._kinds: set[type] = set()
        self._names: dict[int, str] = {}
        self._timers: dict[int, Reference] = {}
        self._stand_ins = StandIns()
        self._planted: list[tuple[Reference, str, PlantedTimers]] = []

    @property
    def num_installed(self) -> int:
        """Number of watched places."""
        return len(self._timers) + len(self._planted)

    def install(self, holders: Iterable[tuple[Any, str]]) -> None:
        """Watch the timers of each (object, attribute); None is replaced by planted ones."""
        for owner, name in holders:
            timers, find = attribute(owner, name), reference(owner)
            if timers is None and find() is not None:
                planted = PlantedTimers(self._begin, self._end)
                setattr(owner, name, planted)
                self._planted.append((find, name, planted))
            elif timers is not None and type(timers) is not PlantedTimers:
                self._timers[id(timers)] = reference(timers)
                self._cover(type(timers), "__call__", self._naming)

    def remove(self) -> None:
        """Restore the originals, except those that someone else has replaced meanwhile."""
        while self._planted:
            find, name, planted = self._planted.pop()
            owner = find()
            if owner is not None and attribute(owner, name) is planted:
                setattr(owner, name, None)
        self._stand_ins.remove()
        self._timers.clear()
        self._names.clear()
        self._kinds.clear()

    def _cover(self, kind: type, name: str, wrap: Callable[[Any], Any]) -> None:
        home = next((cls for cls in kind.__mro__ if name in vars(cls)), object)
        if home is not object and type(vars(home)[name]) is FunctionType:
            self._stand_ins.put(home, name, wrap)

    def _naming(self, original: Any) -> Any:
        """Wrap the call that returns a timer; all names above the log level share one."""

        def call(timers: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            timer = original(timers, name, *args, **kwargs)
            find = self._timers.get(id(timers))
            if find is not None and find() is timers:
                if type(timer) not in self._kinds:
                    self._learn(type(timer))
                self._names[id(timer)] = name
            return timer

        return call

    def _cover_timer(self, kind: type) -> None:
        self._kinds.add(kind)
        self._cover(kind, "start", self._starting)
        self._cover(kind, "stop", self._stopping)

    def _starting(self, original: Any) -> Any:
        """Start it, then mark: its barrier and synchronisation are not part of the phase."""

        def start(timer: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(timer, *args, **kwargs)
            name = self._names.get(id(timer))
            if name is not None:
                self._begin(name)
            return result

        return start

    def _stopping(self, original: Any) -> Any:
        """Mark, then stop it: its barrier and synchronisation are not part of the phase."""

        def stop(timer: Any, *args: Any, **kwargs: Any) -> Any:
            name = self._names.get(id(timer))
            if name is not None:
                self._end(name)
            return original(timer, *args, **kwargs)

        return stop
