"""What an adapter knows about the training that it found, and how it is kept: not alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...calib.workload.collectives import GroupRole
from ...calib.workload.config import RunConfig

Reference = Callable[[], Any]
"""Gives an object for as long as others keep it alive, then None."""


def reference(thing: Any) -> Reference:
    """A weak reference; to what allows none, one that is dead from the start."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: None


def references(things: Iterable[Any]) -> tuple[Reference, ...]:
    """A weak reference to each."""
    return tuple(map(reference, things))


def living(known: Iterable[Reference]) -> tuple[Any, ...]:
    """The objects that are alive."""
    return tuple(thing for thing in (each() for each in known) if thing is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Model, optimizer and place of this rank, as far as the framework tells."""

    models: tuple[Any, ...] = ()
    optimizers: tuple[Any, ...] = ()
    timer_holders: tuple[tuple[Any, str], ...] = ()
    """Objects and the attribute under which each keeps the framework's timers."""
    passes: tuple[Any, ...] = ()
    """A model and its wrappers: the outermost call of any is a forward phase; empty: timers say."""
    unseen: tuple[str, ...] = ()
    """What hooks cannot see here, one name each; part of the coverage."""
    roles: Mapping[str, GroupRole] = field(default_factory=dict)
    """What process groups are for, by name, where their descriptions do not tell."""
    run_config: Callable[[], RunConfig | None] | None = None
    """Must hold none of the host's objects: it is kept."""
    stage: int = 0
    tp_rank: int = 0
    dp_rank: int = 0
    num_steps: int = 0
    """Steps of the whole run where the host says so without a run config; 0: unknown."""
    is_home: bool | None = None
    """True on the rank where the host prints and logs; None: that is the last one."""
    stop: Callable[[], bool] | None = None
    """Asks the framework to save and end after the step that runs; to be called on all ranks."""
    stop_is_lossy: str = ""
    """Why it must not be asked: what a stop would lose, and the remedy."""
    is_wandb_stepped: bool = True
    """The host gives W&B its own step; else ours joins the host's next row, whatever its step."""


_OBJECTS = ("models", "optimizers", "passes")


class KnownHost:
    """A host whose objects die as if nobody here knew them; ``told`` is all but these objects."""

    def __init__(self, host: Host) -> None:
        self.told = replace(host, timer_holders=(), **dict.fromkeys(_OBJECTS, ()))
        self._kept = {name: references(getattr(host, name)) for name in _OBJECTS}
        self._holders = tuple((reference(owner), name) for owner, name in host.timer_holders)
        self._num_parameters = num_parameters(host.optimizers)

    def alive(self) -> Host | None:
        """The host with its objects; None where a model is gone.  Not to be kept."""
        found = {name: living(kept) for name, kept in self._kept.items()}
        if len(found["models"]) < len(self._kept["models"]):
            return None
        holders = ((find(), name) for find, name in self._holders)
        alive = tuple(holder for holder in holders if holder[0] is not None)
        return replace(self.told, timer_holders=alive, **found)

    @property
    def num_parameters(self) -> int:
        """Parameters that this rank updates, as last seen where an optimizer is gone."""
        optimizers = living(self._kept["optimizers"])
        if len(optimizers) == len(self._kept["optimizers"]):
            self._num_parameters = num_parameters(optimizers)
        return self._num_parameters


def num_parameters(optimizers: Iterable[Any]) -> int:
    """Parameters that this rank updates: its shards where they are distributed."""
    groups = [group for o in optimizers for group in getattr(o, "param_groups", ())]
    weights = [weight for group in groups for weight in group["params"]]
    return sum(getattr(weight, "_local_tensor", weight).numel() for weight in weights)
