"""Variables of a launch line that change how a step runs, by what is done with them.

They are those of NCCL, Transformer Engine, PyTorch and CUDA that a command sets for its processes:
in front of it, behind ``env``, by ``mpirun -x`` or ``srun --export``, or exported by the script
that starts it.  What the user's own shell exports is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..workload.config import Parallelism
from .launchers import split_variables
from .megatron_options import NAMES, Values

_TABLE = NAMES["variables"]
ASIDE_VARIABLES: Mapping[str, Sequence[str]] = _TABLE["aside_unless"]
"""Those that are set for a cluster or by recipes, as public rates had them, and deterministic
kernels: named, and no reason to say no number; with the values that change nothing."""
_BETWEEN_NODES: Mapping[str, Sequence[str]] = _TABLE["left_out_between_nodes"]
_LEFT_OUT: Mapping[str, Sequence[str]] = {**_TABLE["left_out"], **_BETWEEN_NODES}
"""Those that are not modelled: why a step is another, and the values that change nothing."""
_PREFIXES = tuple(_TABLE["prefixes"])
_KNOWN = {*_TABLE["modelled"], *_TABLE["harmless"], *ASIDE_VARIABLES, *_LEFT_OUT}
_FUSED = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")
"""Transformer Engine's two kinds of fused attention; without both the unfused one is left."""


def is_of_library(name: str) -> bool:
    """Return True for a variable that is looked at.

    >>> [is_of_library(name) for name in ("NCCL_NEW", "CUDA_LAUNCH_BLOCKING", "DATA")]
    [True, True, False]
    """
    return name in _KNOWN or name.startswith(_PREFIXES)


def variables_of(words: Sequence[str]) -> dict[str, str]:
    """Variables that the words before a training script set.

    >>> variables_of("A=1 mpirun -x B=2 -x PATH env C=3 python".split())
    {'A': '1', 'C': '3', 'B': '2'}
    >>> variables_of(["srun", "--export=ALL,D=4", "python"])
    {'D': '4'}
    """
    found, _ = split_variables(words)
    pairs: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        if before == "-x":
            pairs.append(word)
        elif before == "--export" or word.startswith("--export="):
            pairs += word.removeprefix("--export=").split(",")
    parts = [pair.partition("=") for pair in pairs]
    return {**found, **{name: value for name, is_set, value in parts if is_set}}


def attention_values(variables: Mapping[str, str]) -> Values:
    """The value of Megatron's argument that attention's variables stand for; empty: none.

    >>> attention_values({"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"})
    {'attention_backend': 'unfused'}
    >>> attention_values({"NVTE_FLASH_ATTN": "0"})
    {}
    """
    is_left = any(variables.get(name) != "0" for name in _FUSED)
    return {} if is_left else {"attention_backend": "unfused"}


def left_out_variables(variables: Mapping[str, str], par: Parallelism) -> tuple[str, ...]:
    """Names of those in use that the model of a layout's step leaves out, also aside."""
    is_one_node = par.num_ranks <= (par.ranks_per_node or par.num_ranks)
    idle = {name: values[1:] for name, values in _LEFT_OUT.items()} | dict(ASIDE_VARIABLES)
    void = _BETWEEN_NODES if is_one_node else ()
    used = {name for name in idle.keys() & variables.keys() if variables[name] not in idle[name]}
    return tuple(
        name for name in variables if name in used and variables[name] and name not in void
    )


def unknown_variables(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the same libraries that are in no list."""
    return tuple(name for name in variables if is_of_library(name) and name not in _KNOWN)


def reason(name: str) -> str:
    """Why a variable that is not modelled changes a step; empty for any other name."""
    return _LEFT_OUT.get(name, ("",))[0]
