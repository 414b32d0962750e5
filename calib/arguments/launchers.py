"""Ranks that a launch command requests, and its variables that change how a step runs.

The variables are those of NCCL, Transformer Engine, PyTorch and CUDA that a command sets for its
processes: in front of it, after ``env``, by ``mpirun -x`` or ``srun --export``, or exported by the
script that starts it.  Variables that the user's own shell exports are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from ..workload.argument_values import Values
from ..workload.parallelism import Parallelism
from .megatron_options import NAMES
from .option_words import options_of

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ENV = "env"
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
"""Program names of launchers that Python runs as modules, by module."""
MODULES = frozenset(_MODULES)
_MPI = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun")
_ALL_RANKS = ("WORLD_SIZE", "SLURM_NTASKS", "SLURM_NPROCS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_NODE_RANKS = (
    "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
)  # fmt: skip
"""Variables of torch, Slurm, Open MPI and PMI with the ranks of a job, and of a node."""
GPUS_PER_NODE = 8
"""Ranks per node assumed where a description leaves them open, as on a common server."""
_PPR = re.compile(r"ppr:(\d+):node")
_OF_SCHEDULER = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables that a launcher sets for the processes of a job, by how they begin."""
_PLAIN_FRONT = ("exec", "time", "command")
"""Words of a shell in front of a command."""
_TASKS = ("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node")
"""Options of ``srun`` that say how many tasks it starts."""
_PROGRAM = re.compile(r"(?:python[\d.]*|numactl|taskset|env|(?:ba)?sh)")
"""Programs that ``srun`` may start, whose options are their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks that a launcher's options request; 0 if they do not specify a number.

    ``launcher`` is its name, empty if there is none; ``usual_ranks`` is its default number of
    ranks, if the command does not specify one; ``num_nodes`` is a stated number, no default.
    """

    launcher: str = ""
    num_ranks: int = 0
    per_node: int = 0
    usual_ranks: int = 0
    num_nodes: int = 0


def ranks_of(words: Sequence[str]) -> Ranks:
    """Return the ranks that the words before a training script request.

    The innermost launcher that starts processes decides; Slurm and MPI do if no other launcher
    follows, and variables in front of the command if there is no launcher.

    >>> ranks_of("srun -N 4 --ntasks-per-node=8 python".split())
    Ranks(launcher='srun', num_ranks=32, per_node=8, usual_ranks=0, num_nodes=4)
    >>> ranks_of("torchrun --nproc-per-node gpu".split()).num_ranks
    0
    """
    variables, rest = split_variables(words)
    parts = _parts(rest)
    for name, launcher_words in reversed(parts):
        ranks = _READERS[name](launcher_words)
        is_outer = name == "srun" or name in _MPI
        if ranks.num_ranks or not is_outer:
            return ranks
    environment_ranks = _of_variables(variables)
    return (
        Ranks(launcher=parts[-1][0])
        if parts and not environment_ranks.num_ranks
        else environment_ranks
    )


def split_variables(words: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables that a command line sets, and the command without them.

    Assignments count at the start or after the word ``env``, because the value of an option may
    look like one.

    >>> split_variables(["A=1", "srun", "env", "B=2", "torchrun", "--rdzv-conf", "timeout=3"])
    ({'A': '1', 'B': '2'}, ('srun', 'torchrun', '--rdzv-conf', 'timeout=3'))
    """
    variables: dict[str, str] = {}
    rest: list[str] = []
    is_place = True
    for word in words:
        assigned = _ASSIGNED.fullmatch(word)
        if is_place and assigned is not None:
            variables[assigned[1]] = assigned[2]
        elif word.rpartition("/")[2] == _ENV:
            is_place = True
        else:
            is_place = False
            rest.append(word)
    return variables, tuple(rest)


def split_front(words: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables set in front of a command, and the command.

    Those that a scheduler or launcher sets for its own processes are dropped.

    >>> split_front(["A=1", "SLURM_NTASKS=4", "exec", "env", "B=2", "srun", "env", "C=3", "t.py"])
    ({'A': '1', 'B': '2'}, ('srun', 'env', 'C=3', 't.py'))
    """
    place = 0
    for word, after in zip(words, (*words[1:], ""), strict=False):
        is_env = word.rpartition("/")[2] == _ENV and not after.startswith("-")
        if not (is_env or word in _PLAIN_FRONT or _ASSIGNED.fullmatch(word)):
            break
        place += 1
    variables, _ = split_variables([word for word in words[:place] if word not in _PLAIN_FRONT])
    stays = {n: value for n, value in variables.items() if not n.startswith(_OF_SCHEDULER)}
    return stays, tuple(words[place:])


def with_tasks(words: Sequence[str], num_nodes: int, per_node: int) -> tuple[str, ...]:
    """Return a command with other numbers of nodes and tasks of its ``srun``: one task a node in
    front of another launcher, else ``per_node``.

    >>> " ".join(with_tasks("srun -N2 --mpi pmix -n 16 numactl -N 0 python".split(), 4, 8))
    'srun --nodes=4 --ntasks-per-node=8 --mpi pmix numactl -N 0 python'
    """
    out: list[str] = []
    is_of_srun = is_value = False
    for place, word in enumerate(words):
        name = PurePath(word).name
        is_of_srun &= not (name in _READERS or _PROGRAM.fullmatch(name))
        is_short = word[:2] in _TASKS and word[2:].isdecimal()
        is_dropped = is_value or (is_of_srun and (word.partition("=")[0] in _TASKS or is_short))
        is_value = is_dropped and not is_value and word in _TASKS
        out += [] if is_dropped else [word]
        if name == "srun":
            is_of_srun, each = True, 1 if _parts(words[place + 1 :]) else per_node
            out += [f"--nodes={num_nodes}", f"--ntasks-per-node={each}"]
    return tuple(out)


def leaves_tasks_open(words: Sequence[str]) -> bool:
    """Return True if an ``srun`` among the words does not say how many tasks it starts."""
    return any(name == "srun" and not _srun(part).num_ranks for name, part in _parts(words))


def _parts(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each launcher in order, with the words after it."""
    parts: list[tuple[str, list[str]]] = []
    for place, word in enumerate(words):
        is_module = place > 0 and words[place - 1] in ("-m", "--module")
        name = _MODULES.get(word, "") if is_module else PurePath(word).name
        if name in _READERS:
            parts.append((name, []))
        elif parts:
            parts[-1][1].append(word)
    return parts


def _torchrun(words: Sequence[str]) -> Ranks:
    # An elastic run (MIN:MAX) counts at its full size; ``gpu`` and ``auto`` are not numbers.
    nodes = _value(words, "--nnodes", default="1").rpartition(":")[2]
    nproc_per_node = _value(words, "--nproc-per-node")
    per_node = _number(nproc_per_node)
    return Ranks(
        launcher="torchrun",
        num_ranks=per_node * _number(nodes),
        per_node=per_node,
        usual_ranks=0 if nproc_per_node else _number(nodes),  # one on each node
        num_nodes=_number(nodes) if _value(words, "--nnodes") else 0,
    )


def _deepspeed(words: Sequence[str]) -> Ranks:
    included = _value(words, "--include", "-i")
    if included:
        slots = [host.partition(":")[2] for host in included.split("@")]
        counts = [len(one.split(",")) if one else 0 for one in slots]
        has_all_counts = all(counts)
        return _job(
            "deepspeed", sum(counts) if has_all_counts else 0, max(counts) if has_all_counts else 0
        )
    is_open = _value(words, "--hostfile", "-H") and not _value(words, "--num-nodes")
    per_node = _number(_value(words, "--num-gpus"))
    nodes = 0 if is_open else _number(_value(words, "--num-nodes", default="1"))
    return _job("deepspeed", per_node * nodes, per_node, _number(_value(words, "--num-nodes")))


def _accelerate(words: Sequence[str]) -> Ranks:
    ranks, nodes = (_number(_value(words, one)) for one in ("--num-processes", "--num-machines"))
    return _job("accelerate", ranks, 0, nodes)


def _srun(words: Sequence[str]) -> Ranks:
    stated = _value(words, "--nodes", "-N").rpartition("-")[2]
    per_node = _number(_value(words, "--ntasks-per-node"))
    ranks = _number(_value(words, "--ntasks", "-n")) or _number(stated or "1") * per_node
    return _job("srun", ranks, per_node, _number(stated))


def _mpi(words: Sequence[str]) -> Ranks:
    mapped = _PPR.search(_value(words, "--map-by"))
    names = ("--npernode", "-npernode", "-ppn", "--ppn", "-perhost", "-N")
    per_node = int(mapped[1]) if mapped else _number(_value(words, *names))
    hosts = [host for host in _value(words, "--host", "-host", "-H").split(",") if host]
    slots = [_number(host.partition(":")[2]) for host in hosts]
    ranks = _number(_value(words, "--np", "-np", "-n", "-c"))
    if not ranks and hosts:
        ranks = per_node * len(hosts) or (sum(slots) if all(slots) else 0)
    each = per_node or (max(slots) if slots and all(slots) else 0)
    return _job("mpirun", ranks, each, len(hosts))


def _job(launcher: str, num_ranks: int, per_node: int, num_nodes: int = 0) -> Ranks:
    """Return the ranks; ignore a number per node that exceeds all ranks."""
    per_node = per_node or (num_ranks // num_nodes if num_nodes else 0)
    each = per_node if num_ranks and per_node <= num_ranks else 0
    return Ranks(launcher=launcher, num_ranks=num_ranks, per_node=each, num_nodes=num_nodes)


def _of_variables(variables: Mapping[str, str]) -> Ranks:
    ranks, per_node = (
        next((_number(variables[name]) for name in names if name in variables), 0)
        for names in (_ALL_RANKS, _NODE_RANKS)
    )
    return _job("", ranks, per_node)


def _value(words: Sequence[str], *names: str, default: str = "") -> str:
    """Return the word after one of the options, or joined to it; underscores equal hyphens."""
    for option, values in options_of(words):
        plain = option.replace("_", "-") if option.startswith("--") else option
        if plain in names:
            return values[0] if values else ""
        if option[:2] in names and option[2:].isdecimal():
            return option[2:]
    return default


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


_READERS: Mapping[str, Callable[[Sequence[str]], Ranks]] = {
    "torchrun": _torchrun,
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
    "srun": _srun,
    **dict.fromkeys(_MPI, _mpi),
}


_TABLE = NAMES["variables"]
ASIDE_VARIABLES: Mapping[str, Sequence[str]] = _TABLE["aside_unless"]
"""Unmodelled variables that are reported but do not prevent an estimate, with their neutral
values: settings of clusters and recipes, as in public benchmarks, and deterministic kernels."""
_BETWEEN_NODES: Mapping[str, Sequence[str]] = _TABLE["left_out_between_nodes"]
_UNMODELLED_VARIABLES: Mapping[str, Sequence[str]] = {**_TABLE["left_out"], **_BETWEEN_NODES}
"""Unmodelled variables: the reason why a step changes, then the neutral values."""
_PREFIXES = tuple(_TABLE["prefixes"])
_KNOWN = {*_TABLE["modelled"], *_TABLE["harmless"], *ASIDE_VARIABLES, *_UNMODELLED_VARIABLES}
_FUSED = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")
"""Transformer Engine's two kinds of fused attention; with both off, the unfused one remains."""


def is_of_library(name: str) -> bool:
    """Return True for a variable of a library that can change a step.

    >>> [is_of_library(name) for name in ("NCCL_NEW", "CUDA_LAUNCH_BLOCKING", "DATA")]
    [True, True, False]
    """
    return name in _KNOWN or name.startswith(_PREFIXES)


def variables_of(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that the words before a training script set.

    >>> variables_of("A=1 mpirun -x B=2 -x PATH env C=3 python".split())
    {'A': '1', 'C': '3', 'B': '2'}
    >>> variables_of(["srun", "--export=ALL,D=4", "python"])
    {'D': '4'}
    """
    prefix_variables, _ = split_variables(words)
    pairs: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        if before == "-x":
            pairs.append(word)
        elif before == "--export" or word.startswith("--export="):
            pairs += word.removeprefix("--export=").split(",")
    parts = [pair.partition("=") for pair in pairs]
    return {**prefix_variables, **{name: value for name, is_set, value in parts if is_set}}


def attention_values(variables: Mapping[str, str]) -> Values:
    """Return Megatron's argument that attention variables are equivalent to; empty if none.

    >>> attention_values({"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"})
    {'attention_backend': 'unfused'}
    >>> attention_values({"NVTE_FLASH_ATTN": "0"})
    {}
    """
    has_fused_attention = any(variables.get(name) != "0" for name in _FUSED)
    return {} if has_fused_attention else {"attention_backend": "unfused"}


def unmodelled_variables(variables: Mapping[str, str], par: Parallelism) -> tuple[str, ...]:
    """Return the variables in use that are not modelled, including ``ASIDE_VARIABLES``."""
    is_one_node = par.num_ranks <= (par.ranks_per_node or par.num_ranks)
    idle = {name: values[1:] for name, values in _UNMODELLED_VARIABLES.items()} | dict(
        ASIDE_VARIABLES
    )
    void = _BETWEEN_NODES if is_one_node else ()
    used = {name for name in idle.keys() & variables.keys() if variables[name] not in idle[name]}
    return tuple(
        name for name in variables if name in used and variables[name] and name not in void
    )


def unknown_variables(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables of these libraries that are in no list."""
    return tuple(name for name in variables if is_of_library(name) and name not in _KNOWN)


def reason(name: str) -> str:
    """Return why an unmodelled variable changes a step; empty for any other name."""
    return _UNMODELLED_VARIABLES.get(name, ("",))[0]
