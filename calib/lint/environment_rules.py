"""Variables that a command sets for its processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..arguments.megatron_rules import CONNECTIONS, environment
from .rule import Harm, Remedy, StatedRule
from .stated_launch import StatedLaunch

_PYTORCH = "PyTorch: CUDA Environment Variables"
_PROCESS_GROUP = "PyTorch: PYTORCH ProcessGroupNCCL Environment Variables"
_DISTRIBUTED = "PyTorch: Distributed communication package, Debugging"
_NCCL = "NCCL user guide: Environment Variables"
_ORDER = "how kernels take turns in the queues of a device is not in the model"
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


def _any(_: StatedLaunch) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variable:
    """A variable that should not have some of its values."""

    name: str
    harm: Harm
    values: str
    """Which values, in words."""
    why: str
    source: str
    unpriced: str
    is_bad: Callable[[str], bool] = _is_set
    instead: str = ""
    """The value to set; empty: none."""
    holds: Callable[[StatedLaunch], bool] = _any

    @property
    def rule(self) -> StatedRule:
        def find(launch: StatedLaunch) -> Iterator[Remedy]:
            value = launch.variables.get(self.name)
            if value is not None and self.is_bad(value) and launch.is_on_gpu and self.holds(launch):
                yield Remedy(what=f"{self.name}={value}", variables={self.name: self.instead})

        return StatedRule(
            name=self.name,
            harm=self.harm,
            when=f"`{self.name}` {self.values}",
            why=self.why,
            source=self.source,
            unpriced=self.unpriced,
            find=find,
        )


_VARIABLES = (
    _Variable(
        name="CUDA_LAUNCH_BLOCKING",
        harm=Harm.DISTORTS,
        values="set",
        why="the host waits for each kernel, so that nothing overlaps",
        source=_PYTORCH,
        unpriced=_TAKEN_WITH,
    ),
    _Variable(
        name="PYTORCH_NO_CUDA_MEMORY_CACHING",
        harm=Harm.DISTORTS,
        values="set",
        why="each tensor asks the driver for its memory, which waits for the device",
        source=_PYTORCH,
        unpriced=_TAKEN_WITH,
    ),
    _Variable(
        name="NCCL_DEBUG",
        harm=Harm.DISTORTS,
        values="at `INFO` or `TRACE`",
        why="every rank writes lines of each communicator, at TRACE of each call",
        source=_NCCL,
        unpriced=_HOST,
        is_bad=lambda value: value.upper() in ("INFO", "TRACE"),
        instead="WARN",
    ),
    _Variable(
        name="TORCH_DISTRIBUTED_DEBUG",
        harm=Harm.DISTORTS,
        values="at `DETAIL`",
        why="each collective is checked by another one before it starts",
        source=_DISTRIBUTED,
        unpriced=_TAKEN_WITH,
        is_bad=lambda value: value.upper() == "DETAIL",
    ),
    _Variable(
        name="TORCH_NCCL_BLOCKING_WAIT",
        harm=Harm.WASTES,
        values="set",
        why="the host waits for each collective; otherwise only the device does",
        source=_PROCESS_GROUP,
        unpriced=_HOST,
    ),
    _Variable(
        name="NCCL_P2P_DISABLE",
        harm=Harm.WASTES,
        values="set",
        why="ranks of a node send through the host's memory, not over NVLink or PCIe",
        source=_NCCL,
        unpriced=_TAKEN_WITH,
    ),
    _Variable(
        name="NCCL_SHM_DISABLE",
        harm=Harm.WASTES,
        values="set",
        why="ranks of a node without a direct path send over the network",
        source=_NCCL,
        unpriced=_TAKEN_WITH,
    ),
    _Variable(
        name="NCCL_IB_DISABLE",
        harm=Harm.WASTES,
        values="set, over several nodes",
        why="nodes send through sockets, not over InfiniBand or RoCE",
        source=_NCCL,
        unpriced=_TAKEN_WITH,
        holds=_spans_nodes,
    ),
    _Variable(
        name="NCCL_ALGO",
        harm=Harm.WASTES,
        values="set, without `--deterministic-mode`",
        why="NCCL may not choose the fastest algorithm for each size",
        source=_NCCL,
        unpriced=_TAKEN_WITH,
        is_bad=bool,
        holds=lambda launch: not launch.says("--deterministic-mode"),
    ),
    _Variable(
        name="NCCL_PROTO",
        harm=Harm.WASTES,
        values="set",
        why="NCCL may not choose the fastest protocol for each size",
        source=_NCCL,
        unpriced=_TAKEN_WITH,
        is_bad=bool,
    ),
    _Variable(
        name="PYTORCH_CUDA_ALLOC_CONF",
        harm=Harm.RISKS,
        values="with `expandable_segments:True` beside `--use-nccl-ub`",
        why="buffers that NCCL registers cannot lie in segments that grow",
        source="docs/discussions/megatron-fsdp-user-guide/megatron-fsdp-user-guide.md",
        unpriced="it is an error, not a loss of time",
        is_bad=lambda value: "expandable_segments:true" in value.lower().replace(" ", ""),
        holds=lambda launch: launch.says("--use-nccl-ub"),
    ),
)


def _connections(launch: StatedLaunch) -> Iterator[Remedy]:
    seen = launch.variables.get(CONNECTIONS)
    if seen is None or not launch.is_on_gpu:
        return
    wanted = environment(launch.config, {CONNECTIONS: seen}).get(CONNECTIONS, seen)
    experts = launch.config.model.experts
    if experts is not None and experts.overlaps_exchange and seen == "1":
        wanted = _MANY_CONNECTIONS
    if wanted != seen:
        yield Remedy(what=f"{CONNECTIONS}={seen}", variables={CONNECTIONS: wanted})


def _threads(launch: StatedLaunch) -> Iterator[Remedy]:
    name = "OMP_NUM_THREADS"
    value = launch.variables.get(name, "1")
    if launch.config.optimizer_offload_frac and value == "1":
        is_said = name in launch.variables
        what = f"{name}=1" if is_said else f"{name} is not set by the command"
        yield Remedy(what=what, variables={name: _THREADS})


RULES = (
    *(one.rule for one in _VARIABLES),
    StatedRule(
        name=CONNECTIONS,
        harm=Harm.RISKS,
        when=f"`{CONNECTIONS}` other than 1 with tp or cp before Blackwell; 1 with FSDP, or with "
        "`--overlap-moe-expert-parallel-comm`",
        why="one queue keeps transfers of tp and cp before the products that they hide behind; "
        "FSDP and exchanges of experts need several",
        source="megatron/training/arguments.py",
        unpriced=_ORDER,
        find=_connections,
    ),
    StatedRule(
        name="OMP_NUM_THREADS",
        harm=Harm.RISKS,
        when="`--optimizer-cpu-offload`, and no `OMP_NUM_THREADS` in the command or 1",
        why="torchrun sets 1 where nothing is set, and one thread of the host updates all states",
        source="PyTorch: torch/distributed/run.py",
        unpriced="how many threads update states in the host's memory is not in the model",
        find=_threads,
    ),
)
