"""What the adapters that are callbacks of a framework have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..process import Guard, Host, Reference, contents, is_a, reference, references
from ..session import (
    DataWatch,
    FrameworkSettings,
    LoopObserver,
    Session,
    chain_of,
    new_session,
    roles_in,
    running,
    unseen_in,
)
from .patches import Patches


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """What a framework hands to a callback when training begins."""

    optimizer: Any
    known: FrameworkSettings = field(default_factory=FrameworkSettings)
    brackets: tuple[tuple[Any, str, str], ...] = ()
    """Owner and name of what evaluates and saves, and the label of it."""
    models: tuple[Any, ...] = ()
    """Empty: the modules around the optimizer's parameters."""
    reports_passes: bool = False
    """The callbacks say when passes begin and end; else the modules do."""
    host: Host | None = None
    """Where the framework tells all of it; else a first step shows the rest."""


class WatchedTraining:
    """One training run of a framework: its session, and its description after a first step.

    The session is the one that ``--calibrate`` started, else one that ``make_session`` makes when
    training begins and the ranks know each other.  Without a session (another loop has it) every
    method does nothing.
    """

    def __init__(self, make_session: Callable[[], Session]) -> None:
        self._make_session = make_session
        self._session: Session | None = None
        self._known = FrameworkSettings()
        self._reports_passes = False
        self._optimizer: Reference = reference(None)
        self._chain: tuple[Reference, ...] = ()
        self._patches: Patches | None = None
        self._loop_observer: LoopObserver | None = None
        self._data: DataWatch | None = None
        self._number = -1

    def begin(self, find: Callable[[], TrainingSetup]) -> None:
        """Training begins; where ``find`` fails, the run is not watched."""
        Guard().protect(self._begin)(find)

    def _begin(self, find: Callable[[], TrainingSetup]) -> None:
        session = self._get_session()
        if not session.claim(self):
            return
        setup = find()
        self._patches = Patches(session)
        for owner, name, label in setup.brackets:
            lost = f"the time of {label} counts as time between steps"
            self._patches.bracket(owner, name, label, lost=lost)
        session.describe(setup.host or self._watch(session, setup))
        self._session = session

    def _get_session(self) -> Session:
        return running() or self._make_session()

    def _watch(self, session: Session, setup: TrainingSetup) -> Host:
        """What is known before the first step, which is looked at for the rest."""
        chain = setup.models or chain_of(setup.optimizer)
        self._known, self._reports_passes = setup.known, setup.reports_passes
        self._optimizer, self._chain = reference(setup.optimizer), references(chain)
        make_host = functools.partial(self._host, session)
        self._loop_observer = LoopObserver(
            session, setup.optimizer, chain, setup.known, make_host, self._data
        )
        return self._host(session, setup.optimizer, chain)

    def _host(
        self,
        session: Session,
        optimizer: Any,
        chain: tuple[Any, ...],
        run_config: Callable[[], Any] | None = None,
    ) -> Host:
        rank = session.settings.rank.rank
        return Host(
            models=chain[:1],
            optimizers=(optimizer,),
            passes=() if self._reports_passes else chain,
            unseen=unseen_in(chain),
            roles=roles_in(chain),
            run_config=run_config,
            dp_rank=rank,
            is_home=rank == 0,
            is_wandb_stepped=False,
        )

    def begin_step(self, number: int) -> None:
        """A micro-batch of step ``number`` is next; inside a step, nothing happens."""
        if self._session is not None and not self._session.is_in_step:
            self._number = number
            self._session.begin_step(number)

    def end_step(self) -> None:
        """The optimizer has stepped."""
        if self._session is not None:
            self._session.end_step()
            if self._loop_observer is not None:
                self._session.guard.protect(self._loop_observer.end_step)()
                self._loop_observer = None if self._loop_observer.is_over else self._loop_observer

    @property
    def should_stop(self) -> bool:
        """True once all ranks have agreed to end after this step."""
        return self._session is not None and bool(self._session.should_stop())

    @property
    def guard(self) -> Guard:
        """Keeps faults from training."""
        return Guard() if self._session is None else self._session.guard

    def begin_phase(self, name: str) -> None:
        """A part of the step begins."""
        if self._session is not None:
            self._session.begin_phase(name)

    def end_phase(self, name: str) -> None:
        """It ends."""
        if self._session is not None:
            self._session.end_phase(name)

    def begin_bracket(self, name: str) -> None:
        """An evaluation begins."""
        if self._session is not None:
            self._session.begin_bracket(name)

    def end_bracket(self, name: str) -> None:
        """It ends."""
        if self._session is not None:
            self._session.end_bracket(name)

    def end(self) -> None:
        """Training is over: everything goes back to where it was."""
        if self._loop_observer is not None:
            self.guard.protect(self._loop_observer.close)()
        if self._patches is not None:
            self._patches.remove()
        if self._session is not None:
            self._session.finish()
        self._session = self._loop_observer = self._patches = None


class UserCallback(WatchedTraining):
    """A callback that a user adds himself; what is copied or unpickled from it has not begun.

    Where no flag started a session, it makes one.  ``make`` gives such a callback for ``options``,
    which are those of ``attach``, and has a name that can be imported.
    """

    def __init__(self, make: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(functools.partial(new_session, **options))
        self._make = functools.partial(make, **options)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return self._make, ()


@functools.cache
def callback_class(events: type, base: type) -> type:
    """``events`` as a callback of the class that a framework's callbacks must have."""
    return type("ForerunCallback", (UserCallback, events, base), {})


class Watched:
    """Who watches which object of a framework; nothing is written on it, and it is not kept."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Reference, Any]] = {}

    def of(self, owner: Any) -> Any:
        """Its watcher; None where it has none."""
        alive, watcher = self._known.get(id(owner), (None, None))
        return watcher if alive is not None and alive() is owner else None

    def put(self, owner: Any, watcher: Any) -> None:
        """It is watched from now on; watchers of what has died go."""
        entries = self._known.items()
        self._known = {key: one for key, one in entries if one[0]() is not None}
        self._known[id(owner)] = reference(owner), watcher

    def drop(self, owner: Any) -> None:
        """It is watched no more."""
        self._known.pop(id(owner), None)


class Listeners(Watched):
    """The same for what calls a list of callbacks, with ``events`` as if they were in the list."""

    def __init__(self, events: type, starts: str) -> None:
        super().__init__()
        self._events, self._starts = events, starts
        self.names = frozenset(name for name in vars(events) if name.startswith("on_"))
        self._protect = Guard().protect

    def notify(self, owner: Any, event: str, *args: Any, **kwargs: Any) -> None:
        """Hand an event to the owner's watcher; the event that begins training makes one.

        A callback of the same kind that the user has put in the owner's list watches in its place.
        """
        if event in self.names:
            self._protect(self._notify)(owner, event, *args, **kwargs)

    def _notify(self, owner: Any, event: str, *args: Any, **kwargs: Any) -> None:
        watcher = self.of(owner)
        if watcher is None and event == self._starts and not self._has_user_callback(owner):
            watcher = self._events(new_session)
            self.put(owner, watcher)
        if watcher is not None:
            getattr(watcher, event)(*args, **kwargs)

    def _has_user_callback(self, owner: Any) -> bool:
        callbacks = contents(owner).get("callbacks")
        return type(callbacks) is list and any(is_a(one, self._events) for one in callbacks)
