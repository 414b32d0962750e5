"""Variables that a command sets for its processes."""

from __future__ import annotations

from collections.abc import Callable

from ..arguments.megatron_rules import CONNECTIONS, environment
from .rule import Harm, Remedy, Rule, StatedLaunch

_PYTORCH = "PyTorch: CUDA Environment Variables"
_NCCL = "NCCL user guide: Environment Variables"
_TAKEN_WITH = "no step was timed both with it and without it"
_HOST = "the cost of a waiting host is not in the model"
_MANY_CONNECTIONS = "32"
"""What ``validate_args`` of Megatron names where exchanges of experts overlap."""
_THREADS = "8"
"""More than one is what counts; eight ranks on a node of 64 cores have as many each."""


def _is_set(value: str) -> bool:
    return value.lower() not in ("", "0", "false", "off")


def _spans_nodes(launch: StatedLaunch) -> bool:
    par = launch.config.parallelism
    return 0 < par.ranks_per_node < par.num_ranks


def _variable(
    name: str,
    values: str,
    why: str,
    *,
    source: str = _NCCL,
    harm: Harm = Harm.WASTES,
    unpriced: str = _TAKEN_WITH,
    is_bad: Callable[[str], bool] = _is_set,
    instead: str = "",
    holds: Callable[[StatedLaunch], bool] = lambda _: True,
) -> Rule:
    """A variable that should not have some of its ``values``; ``instead`` is empty for none."""

    def find(launch: StatedLaunch, _: object) -> Remedy | None:
        value = launch.variables.get(name)
        if value is None or not is_bad(value) or not launch.is_on_gpu or not holds(launch):
            return None
        return Remedy(what=f"{name}={value}", variables={name: instead})

    when = f"`{name}` {values}"
    return Rule(
        name=name, harm=harm, when=when, why=why, source=source, unpriced=unpriced, find=find
    )


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
    is_said = name in launch.variables
    what = f"{name}=1" if is_said else f"{name} is not set by the command"
    return Remedy(what=what, variables={name: _THREADS})


RULES = (
    _variable(
        "CUDA_LAUNCH_BLOCKING",
        "set",
        "the host waits for each kernel, so that nothing overlaps",
        source=_PYTORCH,
        harm=Harm.DISTORTS,
    ),
    _variable(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "set",
        "each tensor asks the driver for its memory, which waits for the device",
        source=_PYTORCH,
        harm=Harm.DISTORTS,
    ),
    _variable(
        "NCCL_DEBUG",
        "at `INFO` or `TRACE`",
        "every rank writes lines of each communicator, at TRACE of each call",
        harm=Harm.DISTORTS,
        unpriced=_HOST,
        is_bad=lambda value: value.upper() in ("INFO", "TRACE"),
        instead="WARN",
    ),
    _variable(
        "TORCH_DISTRIBUTED_DEBUG",
        "at `DETAIL`",
        "each collective is checked by another one before it starts",
        source="PyTorch: Distributed communication package, Debugging",
        harm=Harm.DISTORTS,
        is_bad=lambda value: value.upper() == "DETAIL",
    ),
    _variable(
        "TORCH_NCCL_BLOCKING_WAIT",
        "set",
        "the host waits for each collective; otherwise only the device does",
        source="PyTorch: PYTORCH ProcessGroupNCCL Environment Variables",
        unpriced=_HOST,
    ),
    _variable(
        "NCCL_P2P_DISABLE",
        "set",
        "ranks of a node send through the host's memory, not over NVLink or PCIe",
    ),
    _variable(
        "NCCL_SHM_DISABLE", "set", "ranks of a node without a direct path send over the network"
    ),
    _variable(
        "NCCL_IB_DISABLE",
        "set, over several nodes",
        "nodes send through sockets, not over InfiniBand or RoCE",
        holds=_spans_nodes,
    ),
    _variable(
        "NCCL_ALGO",
        "set, without `--deterministic-mode`",
        "NCCL may not choose the fastest algorithm for each size",
        is_bad=bool,
        holds=lambda launch: not launch.says("--deterministic-mode"),
    ),
    _variable(
        "NCCL_PROTO", "set", "NCCL may not choose the fastest protocol for each size", is_bad=bool
    ),
    _variable(
        "PYTORCH_CUDA_ALLOC_CONF",
        "with `expandable_segments:True` beside `--use-nccl-ub`",
        "buffers that NCCL registers cannot lie in segments that grow",
        source="docs/discussions/megatron-fsdp-user-guide/megatron-fsdp-user-guide.md",
        harm=Harm.RISKS,
        unpriced="it is an error, not a loss of time",
        is_bad=lambda value: "expandable_segments:true" in value.lower().replace(" ", ""),
        holds=lambda launch: launch.says("--use-nccl-ub"),
    ),
    Rule(
        name=CONNECTIONS,
        harm=Harm.RISKS,
        when=f"`{CONNECTIONS}` other than 1 with tp or cp before Blackwell; 1 with FSDP, or with "
        "`--overlap-moe-expert-parallel-comm`",
        why="one queue keeps transfers of tp and cp before the products that they hide behind; "
        "FSDP and exchanges of experts need several",
        source="megatron/training/arguments.py",
        unpriced="how kernels take turns in the queues of a device is not in the model",
        find=_connections,
    ),
    Rule(
        name="OMP_NUM_THREADS",
        harm=Harm.RISKS,
        when="`--optimizer-cpu-offload`, and no `OMP_NUM_THREADS` in the command or 1",
        why="torchrun sets 1 where nothing is set, and one thread of the host updates all states",
        source="PyTorch: torch/distributed/run.py",
        unpriced="how many threads update states in the host's memory is not in the model",
        find=_threads,
    ),
)
