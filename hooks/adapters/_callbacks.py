"""Shared base of the adapters that work through a framework's callbacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..process.guard import Guard
from ..process.host import Host, Reference, reference, references
from ..process.inspection import contents, forked_rng, is_a
from ..session.attaching import new_session
from ..session.chain import chain_of, roles_in, unseen_in
from ..session.data_watch import DataWatch, LoopObserver
from ..session.first_step import FrameworkSettings
from ..session.session import Session, running
from ._patches import Patches


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """Facts that a framework passes to a callback when training begins."""

    optimizer: Any
    known: FrameworkSettings = field(default_factory=FrameworkSettings)
    brackets: tuple[tuple[Any, str, str], ...] = ()
    """Owner, name and label of each method that evaluates or saves."""
    models: tuple[Any, ...] = ()
    """Models that are trained; if empty, the modules around the optimizer's parameters."""
    reports_passes: bool = False
    """True if callbacks mark the begin and end of passes; else module hooks do."""
    host: Host | None = None
    """Complete description from the framework; None if the first step must reveal the rest."""


class WatchedTraining:
    """One training run of a framework: its session, and its description after a first step.

    The session is the one that ``--calibrate`` started, else one that ``make_session`` creates when
    training begins and the process group exists.  Without a session (another loop has claimed it)
    every method does nothing.
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
        """Begin training; if ``find`` fails, the run is not observed."""
        Guard().protect(self._begin)(find)

    def _begin(self, find: Callable[[], TrainingSetup]) -> None:
        session = self._get_session()
        if not session.claim(self):
            return
        with forked_rng():
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
        """Return the host as known before the first step, and observe that step for the rest."""
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
        """Begin step ``number`` at its first micro-batch; later micro-batches have no effect."""
        if self._session is not None and not self._session.is_in_step:
            self._number = number
            self._session.begin_step(number)

    def end_step(self) -> None:
        """End the step, after the optimizer's update."""
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
        """Guard that keeps our faults out of training."""
        return Guard() if self._session is None else self._session.guard

    def begin_phase(self, name: str) -> None:
        """Begin a phase of the step."""
        if self._session is not None:
            self._session.begin_phase(name)

    def end_phase(self, name: str) -> None:
        """End a phase of the step."""
        if self._session is not None:
            self._session.end_phase(name)

    def begin_bracket(self, name: str) -> None:
        """Begin an evaluation or save."""
        if self._session is not None:
            self._session.begin_bracket(name)

    def end_bracket(self, name: str) -> None:
        """End an evaluation or save."""
        if self._session is not None:
            self._session.end_bracket(name)

    def end(self) -> None:
        """End training: remove all patches and finish the session."""
        if self._loop_observer is not None:
            self.guard.protect(self._loop_observer.close)()
        if self._patches is not None:
            self._patches.remove()
        if self._session is not None:
            self._session.finish()
        self._session = self._loop_observer = self._patches = None


class UserCallback(WatchedTraining):
    """A callback that users add themselves; a copied or unpickled one has not begun.

    If no flag started a session, it makes one.  ``make`` returns such a callback for ``options``,
    which are those of ``attach``, and must be importable by name.
    """

    def __init__(self, make: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(functools.partial(new_session, **options))
        self._make = functools.partial(make, **options)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return self._make, ()


@functools.cache
def callback_class(events: type, base: type) -> type:
    """Return a class of ``events`` derived from ``base``, the framework's callback class."""
    return type("ForerunCallback", (UserCallback, events, base), {})


class Watched:
    """Map from a framework's objects to their observers, without writing to or retaining the
    objects."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Reference, Any]] = {}

    def of(self, owner: Any) -> Any:
        """Return the observer of ``owner``; None if it has none."""
        alive, watcher = self._known.get(id(owner), (None, None))
        return watcher if alive is not None and alive() is owner else None

    def put(self, owner: Any, watcher: Any) -> None:
        """Register an observer for ``owner``, and drop those of dead objects."""
        entries = self._known.items()
        self._known = {key: one for key, one in entries if one[0]() is not None}
        self._known[id(owner)] = reference(owner), watcher

    def drop(self, owner: Any) -> None:
        """Stop observing ``owner``."""
        self._known.pop(id(owner), None)


class Listeners(Watched):
    """Observers of objects that call callbacks; ``events`` acts as if it were in their list."""

    def __init__(self, events: type, starts: str) -> None:
        super().__init__()
        self._events, self._starts = events, starts
        self.names = frozenset(name for name in vars(events) if name.startswith("on_"))
        self._protect = Guard().protect

    def notify(self, owner: Any, event: str, *args: Any, **kwargs: Any) -> None:
        """Pass an event to the owner's observer; the event that begins training creates one.

        A callback of the same kind that the user has added to the owner's list takes precedence.
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
