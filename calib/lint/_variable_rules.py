"""Rules on environment variables that a command sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..arguments.megatron_rules import CONNECTIONS, environment
from .rule import Find, Remedy, StatedLaunch, rules_of

_MANY_CONNECTIONS = "32"
"""Value that Megatron's ``validate_args`` requires if expert exchanges overlap."""
_THREADS = "8"
"""Any value above 1 would do; eight ranks on a node with 64 cores have this many each."""


def _is_set(value: str) -> bool:
    return value.lower() not in ("", "0", "false", "off")


def _spans_nodes(launch: StatedLaunch) -> bool:
    par = launch.config.parallelism
    return 0 < par.ranks_per_node < par.num_ranks


def _bad(
    name: str,
    is_bad: Callable[[str], bool] = _is_set,
    *,
    instead: str = "",
    holds: Callable[[StatedLaunch], bool] = lambda _: True,
) -> Find:
    """Return the rule for a variable with a harmful value; empty ``instead`` unsets it."""

    def find(launch: StatedLaunch, _: object) -> Remedy | None:
        value = launch.variables.get(name)
        if value is None or not is_bad(value) or not launch.is_on_gpu or not holds(launch):
            return None
        return Remedy(what=f"{name}={value}", variables={name: instead})

    return find


def _connections(launch: StatedLaunch, _: object) -> Remedy | None:
    seen = launch.variables.get(CONNECTIONS)
    if seen is None or not launch.is_on_gpu:
        return None
    wanted = environment(launch.config, {CONNECTIONS: seen}).get(CONNECTIONS, seen)
    experts = launch.config.model.experts
    if experts is not None and experts.overlaps_exchange and seen == "1":
        wanted = _MANY_CONNECTIONS
    if wanted == seen:
        return None
    return Remedy(what=f"{CONNECTIONS}={seen}", variables={CONNECTIONS: wanted})


def _threads(launch: StatedLaunch, _: object) -> Remedy | None:
    name = "OMP_NUM_THREADS"
    if not launch.config.optimizer_offload_frac or launch.variables.get(name, "1") != "1":
        return None
    is_stated = name in launch.variables
    what = f"{name}=1" if is_stated else f"{name} is not set by the command"
    return Remedy(what=what, variables={name: _THREADS})


_SET = (
    *("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING", "TORCH_NCCL_BLOCKING_WAIT"),
    *("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_PROTO"),
)
_FIND: Mapping[str, Find] = {
    **{name: _bad(name) for name in _SET},
    "NCCL_DEBUG": _bad(
        "NCCL_DEBUG", lambda value: value.upper() in ("INFO", "TRACE"), instead="WARN"
    ),
    "TORCH_DISTRIBUTED_DEBUG": _bad(
        "TORCH_DISTRIBUTED_DEBUG", lambda value: value.upper() == "DETAIL"
    ),
    "NCCL_IB_DISABLE": _bad("NCCL_IB_DISABLE", holds=_spans_nodes),
    "NCCL_ALGO": _bad("NCCL_ALGO", holds=lambda one: not one.says("--deterministic-mode")),
    "PYTORCH_CUDA_ALLOC_CONF": _bad(
        "PYTORCH_CUDA_ALLOC_CONF",
        lambda value: "expandable_segments:true" in value.lower().replace(" ", ""),
        holds=lambda one: one.says("--use-nccl-ub"),
    ),
    CONNECTIONS: _connections,
    "OMP_NUM_THREADS": _threads,
}
RULES = rules_of("variables", holds={}, then={}, find=_FIND)
