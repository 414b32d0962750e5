"""What an adapter knows about the training that it found, and how it is kept: not alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...calib.workload import GroupRole, Operator, RunConfig, optimizer_operator
from .inspection import attribute, class_names

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


def live_objects(known: Iterable[Reference]) -> tuple[Any, ...]:
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
    is_home: bool | None = None
    """True on the rank where the host prints and logs; None: that is the last one."""
    stop: Callable[[], bool] | None = None
    """Asks the framework to save and end after the step that runs; to be called on all ranks."""
    stop_is_lossy: str = ""
    """Why it must not be asked: what a stop would lose, and the remedy."""
    is_wandb_stepped: bool = True
    """The host gives W&B its own step; else ours joins the host's next row, whatever its step."""


_OBJECTS = ("models", "optimizers", "passes")


class WeakHost:
    """A host whose objects die as if nobody here knew them; ``detached_host`` is all but these objects."""

    def __init__(self, host: Host) -> None:
        self.detached_host = replace(host, timer_holders=(), **dict.fromkeys(_OBJECTS, ()))
        self._references = {name: references(getattr(host, name)) for name in _OBJECTS}
        self._holders = tuple((reference(owner), name) for owner, name in host.timer_holders)
        self._num_parameters = num_parameters(host.optimizers)

    def alive(self) -> Host | None:
        """The host with its objects; None where a model is gone.  Not to be kept."""
        living_objects = {name: live_objects(refs) for name, refs in self._references.items()}
        if len(living_objects["models"]) < len(self._references["models"]):
            return None
        holders = ((find(), name) for find, name in self._holders)
        alive = tuple(holder for holder in holders if holder[0] is not None)
        return replace(self.detached_host, timer_holders=alive, **living_objects)

    def optimizer(self, config: RunConfig | None) -> Operator | None:
        """The optimizer as layouts have it; None where this rank updates nothing.

        ``config`` is the run's where it is known.
        """
        parameters = self.num_parameters
        if not parameters or config is None:
            return optimizer_operator(parameters) if parameters else None
        is_over_shards = has_sharded_tensors(live_objects(self._references["optimizers"]))
        return optimizer_operator(
            parameters,
            calls=config.sharded_update_calls if is_over_shards else 0,
            moved_nbytes=config.optimizer_moved_nbytes,
            host_parameters=round(config.optimizer_offload_frac * parameters),
            is_overlapped=config.overlaps_optimizer_offload,
        )

    @property
    def num_parameters(self) -> int:
        """Parameters that this rank updates, as last seen where an optimizer is gone."""
        optimizers = live_objects(self._references["optimizers"])
        if len(optimizers) == len(self._references["optimizers"]):
            self._num_parameters = num_parameters(optimizers)
        return self._num_parameters


def has_sharded_tensors(optimizers: Iterable[Any]) -> bool:
    """True where what this rank updates are shards of their own (DTensor)."""
    groups = [group for o in optimizers for group in param_groups(o)]
    return any("DTensor" in class_names(w) for group in groups for w in group["params"])


_LAZY_GROUP_MODULES = (
    "megatron.",
    "torch.",
    "accelerate.",
    "transformers.",
    "lightning.",
    "deepspeed.",
)
"""Whose optimizers may work out their groups when they are asked for them."""


def param_groups(optimizer: Any) -> list[dict[str, Any]]:
    """What an optimizer updates, as torch groups it; nothing of a user's own class is run."""
    groups = attribute(optimizer, "param_groups")
    if groups is None and type(optimizer).__module__.startswith(_LAZY_GROUP_MODULES):
        groups = getattr(optimizer, "param_groups", None)
    return list(groups) if isinstance(groups, (list, tuple)) else []


def update_calls(optimizer: Any) -> int:
    """Calls of one of torch's optimizers in a step, one for each tensor that it works on.

    8 for each tensor of Adam one by one and 3 with momentum alone, 1 where all tensors go in one
    call: that is what torch does on accelerators unless it is told otherwise.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return _calls_of_each(optimizer) * len(weights)


def _calls_of_each(optimizer: Any) -> int:
    group = optimizer.param_groups[0]
    weight = group["params"][0]
    is_one_by_one = group.get("foreach") is False and not group.get("fused")
    if group.get("foreach") is None and not group.get("fused"):
        is_one_by_one = getattr(getattr(weight, "device", None), "type", "cpu") == "cpu"
    if not is_one_by_one:
        return 1
    state_values = getattr(optimizer, "state", {}).get(weight, {}).values()
    moments = sum(getattr(one, "shape", None) == weight.shape for one in state_values)
    return _LOOP_CALLS[min(moments, len(_LOOP_CALLS) - 1)]


_LOOP_CALLS = (1, 3, 8)
"""By the number of moments: of SGD, with momentum, of Adam (torch 2.13, ``_single_tensor_*``)."""


def num_parameters(optimizers: Iterable[Any]) -> int:
    """Parameters that this rank updates: its shards where they are distributed."""
    groups = [group for o in optimizers for group in param_groups(o)]
    weights = [weight for group in groups for weight in group["params"]]
    return sum((w._local_tensor if "DTensor" in class_names(w) else w).numel() for w in weights)
