"""Description of the host's training by an adapter, with weak references to its objects."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...calib.workload.collectives import GroupRole
from ...calib.workload.config import RunConfig
from ...calib.workload.operators import Operator, optimizer_operator
from .inspection import attribute, class_names, forked_rng, is_a, is_tensor, module_name

Reference = Callable[[], Any]
"""Function that returns an object while others keep it alive, then None."""


def reference(thing: Any) -> Reference:
    """Return a weak reference; dead from the start for objects that do not support one."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: None


def references(things: Iterable[Any]) -> tuple[Reference, ...]:
    """Return a weak reference to each object."""
    return tuple(map(reference, things))


def live_objects(known: Iterable[Reference]) -> tuple[Any, ...]:
    """Return the objects that are still alive."""
    return tuple(thing for thing in (each() for each in known) if thing is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Model, optimizer and ranks of this process, as far as the framework reports them."""

    models: tuple[Any, ...] = ()
    optimizers: tuple[Any, ...] = ()
    timer_holders: tuple[tuple[Any, str], ...] = ()
    """Objects with the framework's timers, and the attribute of each that has them."""
    passes: tuple[Any, ...] = ()
    """A model and its wrappers, whose outermost call is a forward phase; if empty, timers mark
    phases."""
    unseen: tuple[str, ...] = ()
    """Names of what hooks cannot observe here; part of the coverage."""
    roles: Mapping[str, GroupRole] = field(default_factory=dict)
    """Roles of process groups by name, for groups whose descriptions do not give them."""
    run_config: Callable[[], RunConfig | None] | None = None
    """Function that returns the run's configuration; it is stored, so must not retain host
    objects."""
    stage: int = 0
    tp_rank: int = 0
    dp_rank: int = 0
    is_home: bool | None = None
    """True on the rank where the host prints and logs; None means the last rank."""
    stop: Callable[[], bool] | None = None
    """Function that asks the framework to save and end after the running step; called on all
    ranks."""
    stop_is_lossy: str = ""
    """Reason not to stop: what a stop would lose, and the remedy."""
    is_wandb_stepped: bool = True
    """True if the host passes W&B its own step; else our values join the host's next row."""


_OBJECTS = ("models", "optimizers", "passes")


class WeakHost:
    """Host with weak references to its objects; ``detached_host`` is all but these objects."""

    def __init__(self, host: Host) -> None:
        self.detached_host = replace(host, timer_holders=(), **dict.fromkeys(_OBJECTS, ()))
        self._references = {name: references(getattr(host, name)) for name in _OBJECTS}
        self._holders = tuple((reference(owner), name) for owner, name in host.timer_holders)
        self._num_parameters = num_parameters(host.optimizers)

    def alive(self) -> Host | None:
        """Return the host with its objects, not to be stored; None if a model is gone."""
        living_objects = {name: live_objects(refs) for name, refs in self._references.items()}
        if len(living_objects["models"]) < len(self._references["models"]):
            return None
        holders = ((find(), name) for find, name in self._holders)
        alive = tuple(holder for holder in holders if holder[0] is not None)
        return replace(self.detached_host, timer_holders=alive, **living_objects)

    def optimizer(self, config: RunConfig | None) -> Operator | None:
        """Return the optimizer as an operator of layouts; None if this rank updates nothing.

        ``config`` is the run's configuration, if known.
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
        """Number of parameters that this rank updates; the last known if an optimizer is gone."""
        optimizers = live_objects(self._references["optimizers"])
        if len(optimizers) == len(self._references["optimizers"]):
            self._num_parameters = num_parameters(optimizers)
        return self._num_parameters


def has_sharded_tensors(optimizers: Iterable[Any]) -> bool:
    """Return True if this rank updates sharded parameters (DTensor)."""
    return any("DTensor" in class_names(w) for o in optimizers for w in updated_by(o))


_LAZY = ("megatron.", "torch.", "accelerate.", "transformers.", "lightning.", "deepspeed.")
"""Packages whose optimizers may compute ``param_groups`` on access."""


def updated_by(optimizer: Any) -> Iterator[Any]:
    """Yield the tensors that an optimizer updates, without running code of a user's own class.

    If such a class computes its ``param_groups``, they are those that have a state.
    """
    groups = list.__iter__(_stored(optimizer, "param_groups", list))
    lists = [dict.get(group, "params") for group in groups if is_a(group, dict)]
    for weights in lists or [list(dict.keys(_stored(optimizer, "state", dict)))]:
        yield from filter(is_tensor, weights if type(weights) is list else ())


def _stored(optimizer: Any, name: str, kind: type) -> Any:
    """Return what an optimizer, or the one that it wraps, stores, to be read by methods of ``kind``
    alone; else empty."""
    value, inner = attribute(optimizer, name), attribute(optimizer, "optimizer")
    if value is None and inner is not None:
        return _stored(inner, name, kind)
    if value is None and module_name(optimizer).startswith(_LAZY):
        with forked_rng():
            value = getattr(optimizer, name, None)
    return value if is_a(value, kind) else kind()


def update_calls(optimizer: Any) -> int:
    """Return the calls of one of torch's optimizers in a step, one for each tensor that it works
    on.

    8 for each tensor with Adam and 3 with momentum if tensors are updated one by one, 1 if all are
    updated in one call (foreach or fused), torch's default on accelerators.
    """
    weights = [*updated_by(optimizer)]
    return _calls_of_each(optimizer, weights[0]) * len(weights) if weights else 0


def _calls_of_each(optimizer: Any, weight: Any) -> int:
    group = next(list.__iter__(_stored(optimizer, "param_groups", list)), {})
    foreach, is_fused = (dict.get(group, name) for name in ("foreach", "fused"))
    is_one_by_one = weight.device.type == "cpu" if foreach is None else foreach is False
    if is_fused or not is_one_by_one:
        return 1
    state = dict.get(_stored(optimizer, "state", dict), weight, {})
    moments = sum(is_tensor(one) and one.shape == weight.shape for one in dict.values(state))
    return _LOOP_CALLS[min(moments, len(_LOOP_CALLS) - 1)]


_LOOP_CALLS = (1, 3, 8)
"""Calls per tensor by number of moments: SGD, momentum, Adam (torch 2.13, ``_single_tensor_*``)."""


def num_parameters(optimizers: Iterable[Any]) -> int:
    """Return the number of parameters that this rank updates: its shards if they are
    distributed."""
    weights = (weight for optimizer in optimizers for weight in updated_by(optimizer))
    return sum((w._local_tensor if "DTensor" in class_names(w) else w).numel() for w in weights)
