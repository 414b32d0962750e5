"""``RunConfig`` from a whole command line, or from a file of Megatron's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import SimpleNamespace

from ..errors import ConfigError
from ..workload.argument_values import Arguments
from ..workload.config import RunConfig
from .megatron_namespace import from_namespace
from .megatron_options import ArgumentTable, options_of, read_mapping, read_words

_DEFAULTS = {"attention_dropout": 0.1, "eval_iters": 100, "hidden_dropout": 0.1}
"""Defaults that only Megatron's parser knows."""
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A run as its arguments describe it, and the arguments that are not known."""

    config: RunConfig
    unknown: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Assumptions about settings that the description leaves open."""


def config_from_command(
    argv: Sequence[str], *, num_ranks: int = 0, ranks_per_node: int = 0
) -> Described:
    """The run of a Megatron command line, with or without ``torchrun ... SCRIPT.py`` in front.

    torchrun's ``--nproc-per-node`` and ``--nnodes`` give ranks and their nodes; without them
    ``num_ranks`` does (0: as few as the layout has, dp 1).  Raises ``ConfigError`` where a size is
    missing or the layout cannot run.
    """
    launcher, words = split_launcher(argv)
    found = _launched(launcher)
    table = read_words(words)
    return _described(table, found[0] or num_ranks, found[1] or ranks_per_node)


def config_from_mapping(
    mapping: Mapping[str, object], *, num_ranks: int = 0, ranks_per_node: int = 0
) -> Described:
    """The run of a parsed YAML or JSON file of Megatron's arguments, or of a dumped namespace.

    ``world_size`` is read where the file has it.  Otherwise as ``config_from_command``.
    """
    return _described(read_mapping(mapping), num_ranks, ranks_per_node)


def split_launcher(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The words before the training script, and those after it."""
    for place, word in enumerate(argv):
        if word.endswith(".py"):
            return argv[:place], argv[place + 1 :]
        is_module = word in ("-m", "--module") and place + 1 < len(argv)
        if is_module and argv[place + 1] not in _LAUNCHERS:
            return argv[:place], argv[place + 2 :]
    return (), argv


def program_of(argv: Sequence[str]) -> str:
    """The name of the script or module that trains, from its command line without a launcher.

    >>> program_of(["/w/pretrain_gpt.py", "--lr", "1"]), program_of(["-m", "pkg.train"])
    ('pretrain_gpt.py', 'pkg.train')
    """
    if not argv:
        return ""
    return argv[1] if argv[0] in ("-m", "--module") and argv[1:] else PurePath(argv[0]).name


def _launched(launcher: Sequence[str]) -> tuple[int, int]:
    """Ranks and ranks per node of torchrun's options; 0 where they are not given."""
    values = {
        option.lstrip("-").replace("-", "_"): words[0]
        for option, words in options_of(launcher)
        if words
    }
    # An elastic run (MIN:MAX) is taken at its full size.
    given = Arguments({name: value.rpartition(":")[2] for name, value in values.items()})
    per_node = given.number("nproc_per_node")
    return per_node * given.number("nnodes", default=1), per_node


def _described(table: ArgumentTable, num_ranks: int, ranks_per_node: int) -> Described:
    values = {**_DEFAULTS, **table.values}
    if not values.get("data_parallel_size"):
        values.setdefault("world_size", num_ranks)
    values.setdefault("ranks_per_node", ranks_per_node)
    if any(str(value).startswith("$") for value in values.values()):
        names = [name for name, value in values.items() if str(value).startswith("$")]
        raise ConfigError(f"{', '.join(names)}: a variable of the shell; write its value")
    return Described(config=from_namespace(SimpleNamespace(**values)), unknown=tuple(table.unknown))
