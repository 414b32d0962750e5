"""``RunConfig`` from a complete command line or a file of Megatron's arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import PurePath

from ..errors import ConfigError, UnreadError
from ..workload.argument_values import Arguments, Values, shown
from ..workload.config import RunConfig
from ..workload.model_shape import MOST
from ._hybrid_pattern import PATTERN, RATIOS
from ._megatron_model import usual_vocab_size
from .launchers import (
    GPUS_PER_NODE,
    MODULES,
    attention_values,
    ranks_of,
    unknown_variables,
    unmodelled_variables,
    variables_of,
)
from .megatron_namespace import from_namespace
from .megatron_options import (
    ASIDE,
    DERIVED,
    GROUPS,
    ArgumentTable,
    is_expansion,
    read_mapping,
    read_words,
)
from .megatron_values import as_given

_DEFAULTS = {"attention_dropout": 0.1, "eval_iters": 100, "hidden_dropout": 0.1}
"""Defaults that only Megatron's parser sets."""
_HYBRID = ("pretrain_hybrid.py", "pretrain_mamba.py")
_OTHER_MODELS = frozenset(
    f"pretrain_{name}.py" for name in ("bert", "ict", "mimo", "retro", "t5", "vision", "vlm")
)
"""Megatron's programs that train no decoder of one stack: their lines are read as one."""
_PATHS = ("merge_file", "tokenizer_model")
_MOST_NAMED = 3
_OF_RANKS = re.compile(
    r"(?i)(?=-|[\w.]+=)[^=]*?(?:gpu|devices?(?=$|=)|nodes?(?=$|=)|rank|nproc|world.size)"
)
"""Options, and settings ``a.b=1``, that may state a number of ranks."""
_OF_A_NODE = (
    f"{GPUS_PER_NODE} ranks a node assumed, which is left open; a launcher's --nproc-per-node or a "
    "file's ranks_per_node sets another number"
)
_SIZES = frozenset({"num_layers", "encoder_num_layers", "hidden_size"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A run that arguments describe, and the arguments that are unknown."""

    config: RunConfig
    unknown: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Assumptions about settings that the description leaves open."""
    has_layout: bool = True
    """False for a model alone, whose degrees are those of the run that it is put into."""


def config_from_command(
    argv: Sequence[str], *, num_ranks: int = 0, usual_ranks: int = 0, ranks_per_node: int = 0
) -> Described:
    """Return the run of a Megatron command line, with or without ``torchrun ... SCRIPT.py``.

    The launcher determines ranks and nodes; if it does not, or if the layout cannot run on so many,
    ``num_ranks`` applies, and without a launcher ``usual_ranks`` (0: the fewest that the layout
    needs, dp 1).  Variables that the launcher sets are read like options.  Raise ``ConfigError`` if
    a launcher leaves the number of ranks open, a size is missing or the layout cannot run.
    """
    launcher, words = split_launcher(argv)
    launcher_ranks = ranks_of(launcher)
    known = launcher_ranks.num_ranks or num_ranks or launcher_ranks.usual_ranks
    if not known and launcher_ranks.launcher:
        raise ranks_unknown(argv, launcher_ranks.launcher)
    table = read_words(words)
    table.variables = variables_of(launcher)
    program = PurePath(argv[len(argv) - len(words) - 1]).name if len(words) < len(argv) else ""
    _add_pattern(table, program)
    num_nodes = launcher_ranks.num_nodes
    per_node = launcher_ranks.per_node or (known // num_nodes if num_nodes else 0) or ranks_per_node
    try:
        described = _described(table, known or usual_ranks, per_node)
    except ConfigError:
        if num_ranks in (0, known):
            raise
        described = _described(table, num_ranks, per_node)
    if program not in _OTHER_MODELS:
        return described
    config = described.config
    return replace(described, config=replace(config, unmodelled=(*config.unmodelled, program)))


def _add_pattern(table: ArgumentTable, program: str) -> None:
    """Add the pattern that a program of hybrid models has without one: Mamba alone, before
    core_v0.17.0; raise ``ConfigError`` if it has none."""
    if program not in _HYBRID or any(table.values.get(name) for name in PATTERN):
        return
    layers = Arguments(table.values).number("num_layers")
    if program != "pretrain_mamba.py" or not layers:
        raise ConfigError(
            f"{program} has no --hybrid-layer-pattern; give it, such as '*-*-' for two layers of "
            f"a GPT"
        )
    if not any(table.values.get(name) for name in RATIOS):
        table.values[PATTERN[1]] = "M" * min(layers, MOST["num_layers"])


def config_from_mapping(
    mapping: Mapping[str, object],
    options: Sequence[str] = (),
    *,
    num_ranks: int = 0,
    ranks_per_node: int = 0,
) -> Described:
    """Return the run of a parsed YAML or JSON file of Megatron's arguments or a dumped namespace.

    ``options`` stand over the file, and ``world_size`` in it over ``num_ranks``.  Raise
    ``ConfigError`` as ``config_from_command`` does.
    """
    table = read_mapping(mapping)
    table.values |= read_words(options).values
    return _described(table, num_ranks, ranks_per_node, is_mapping=True)


def split_launcher(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the words before the training script, and those after it."""
    for place, word in enumerate(argv):
        if word.endswith(".py"):
            return argv[:place], argv[place + 1 :]
        is_module = word in ("-m", "--module") and place + 1 < len(argv)
        if is_module and argv[place + 1] not in MODULES:
            return argv[:place], argv[place + 2 :]
    return (), argv


def program_of(argv: Sequence[str]) -> str:
    """Return the name of the training script or module, from a command line without launcher.

    >>> program_of(["/w/pretrain_gpt.py", "--lr", "1"]), program_of(["-m", "pkg.train"])
    ('pretrain_gpt.py', 'pkg.train')
    """
    if not argv:
        return ""
    return argv[1] if argv[0] in ("-m", "--module") and argv[1:] else PurePath(argv[0]).name


def _effective(values: Values, config: RunConfig) -> Values:
    """Return the values without those that change nothing, such as the defaults of a namespace."""
    # Derived names first, since no option sets them.
    of_layout = [name for name in values if any(name in group for group in GROUPS)]
    for name in dict.fromkeys((*sorted(DERIVED & values.keys()), *of_layout)):
        rest = {other: value for other, value in values.items() if other != name}
        with suppress(ConfigError):
            values = rest if from_namespace(rest) == config else values
    return values


def _described(
    table: ArgumentTable, num_ranks: int, ranks_per_node: int, *, is_mapping: bool = False
) -> Described:
    unknown = (*table.unknown, *unknown_variables(table.variables))
    unread = _unread([word for word in unknown if word not in ASIDE])
    if not _SIZES & table.values.keys():
        raise UnreadError(
            f"the run has no layers or sizes of a model among Megatron's arguments{unread}; add "
            "them (--num-layers, --hidden-size, ...), or ask predict with the config.json of its "
            "model as --config FILE and --gpus N"
        )
    values = {**_DEFAULTS, **attention_values(table.variables), **table.values}
    if not values.get("data_parallel_size"):
        values.setdefault("world_size", num_ranks)
    each = table.values.get("ranks_per_node") or ranks_per_node
    values["ranks_per_node"] = each or GPUS_PER_NODE
    # A path matters only by being given, so it may contain a shell variable.
    names = [n for n, value in values.items() if is_expansion(str(value)) and n not in _PATHS]
    if names:
        words = ", ".join(f"{name} {shown(values[name])}" for name in names)
        raise ConfigError(f"{words}: a variable of the shell; write its value")
    try:
        config = from_namespace(values)
        config = as_given(config, _effective(values, config) if is_mapping else table.values)
    except ConfigError as err:
        if not unread or "is missing" not in str(err):
            raise
        raise UnreadError(f"{err}{unread}") from err
    notes, given, par = [], Arguments(values), config.parallelism
    if not each and par.num_ranks > GPUS_PER_NODE:
        notes.append(_OF_A_NODE)
    if not (given.get("padded_vocab_size", "vocab_size")) and (size := usual_vocab_size(given)):
        what = f"a vocabulary of {size:,} assumed, as the tokenizer's"
        notes.append(f"{what}; --vocab-size sets another")
    unmodelled = (*config.unmodelled, *unmodelled_variables(table.variables, par))
    config = replace(config, unmodelled=unmodelled)
    return Described(config=config, unknown=unknown, notes=tuple(notes))


def ranks_unknown(argv: Sequence[str], launcher: str = "it") -> UnreadError:
    """Return the error for a command that starts a number of ranks which was not read, with the
    words that may state it.

    >>> "'trainer.devices=8'" in str(ranks_unknown(["train.py", "trainer.devices=8", "--lr", "1"]))
    True
    """
    words = [
        word if "=" in word else f"{word} {following}"
        for word, following in zip(argv, [*argv[1:], ""], strict=True)
        if _OF_RANKS.match(word) and re.search(r"\d|\$", f"{word} {following}")
    ]
    return UnreadError(
        f"the command does not say how many ranks {launcher} starts{_unread(words)}; give --gpus N"
    )


def _unread(unknown: Sequence[str]) -> str:
    """Return a clause that names words that were not read, expansions of a shell first."""
    words = [shown(word) for word in sorted(unknown, key=is_expansion, reverse=True)]
    more = f" and {len(words) - _MOST_NAMED} more" * (len(words) > _MOST_NAMED)
    return f" (not read: {', '.join(words[:_MOST_NAMED])}{more})" * bool(words)
