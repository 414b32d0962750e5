"""``RunConfig`` as Megatron's options: read, write, and replace within a command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..errors import ConfigError
from ..workload.argument_values import ArgumentValue, Values, name_of, whole
from ..workload.choices import NAMED_CHOICES
from ..workload.config import Batch, RunConfig
from ..workload.model_shape import AttentionWindow, Experts, ModelShape, OpaqueLayer, RankLoad
from ..workload.parallelism import Engine, Parallelism
from ..workload.pipeline_layout import write_layout
from ._hybrid_pattern import PATTERN, write_pattern
from ._megatron_model import default_ffn
from ._megatron_settings import RECOMPUTE, SPLIT
from .megatron_command import split_launcher
from .megatron_namespace import from_namespace
from .megatron_options import (
    GROUPS,
    LISTS,
    MODELLED,
    SPELLED,
    SWITCHES,
    read_words,
    target_of,
)
from .megatron_rules import misplaced, required_values
from .megatron_values import as_given, as_options, layout_values, model_values
from .option_words import option_words, options_of, sayings
from .short_names import expand

_GPUS = "--gpus"
_PP = "pipeline_model_parallel_size"
_REPLICAS = "--data-parallel-size"
_PADDED = frozenset({"padded_vocab_size"})
"""Arguments that follow from the vocabulary and tp, and have no option."""
_SPLIT = SPLIT.names
_LAYOUT = frozenset().union(*GROUPS)
_TOGETHER = [group for group in GROUPS if len(group) > 1]
_ALONE = _LAYOUT.difference(*_TOGETHER)
_ONE_BATCH = Batch(micro_batch_size=1, global_batch_size=1)
_NOT_TAKEN = ["allgather"]
"""Words of Megatron's help that Transformer Engine refuses; we write its own instead."""
_NOT_RESUMED = (
    *("--finetune", "--ckpt-step", "--pretrained-checkpoint"),
    *("--no-load-optim", "--load-main-params-from-ckpt"),
)
_EXCLUSIVE = {
    "attention_backend": {"transformer_impl"},
    "bf16": {"fp16"},
    "fp16": {"bf16"},
    "fp4": {"fp8", "fp8_recipe", "fp8_param_gather"},
    "fp8": {"fp4", "fp4_param"},
    "vocab_size": {"padded_vocab_size"},
}
"""Arguments of the running config that a given argument overrides."""


def apply_options(config: RunConfig, argv: Sequence[str]) -> RunConfig:
    """Return the config with Megatron's options, or short ones (``--tp 2``), applied.

    The number of ranks stays unless ``--gpus`` or ``--data-parallel-size`` is given; dp follows.
    ``--no-...`` turns a switch off.  Raise ``ConfigError`` for an unknown option.
    """
    given = _parsed(argv)
    values = {**_preserved_values(config, given), **given}
    if config.parallelism.engine is Engine.TORCH:
        values.setdefault("framework", config.framework)
    if "data_parallel_size" in given and "world_size" not in given:
        values.pop("world_size")
    if "recompute_num_layers" in given:
        values.setdefault("recompute_method", "block")
    parsed_config = from_namespace(values)
    new_config = as_given(_with_inexpressible(parsed_config, config), values)
    if given.keys() & {"transformer_impl", "framework"}:
        new_config = replace(new_config, fuses_norms=parsed_config.fuses_norms)
    unmodelled = dict.fromkeys((*config.unmodelled, *new_config.unmodelled))
    return replace(new_config, unmodelled=tuple(unmodelled))


def options(config: RunConfig) -> tuple[str, ...]:
    """Return Megatron's options for this layout (the launcher sets the number of ranks).

    Options at Megatron's defaults are omitted, except sizes; so are those that the program does
    not accept.  The user's words stay if they still describe the layout.
    """
    values = as_options(_stated_values(config))
    accepted = (option_words(*one) for one in values if one[0] not in config.absent)
    return tuple(word for words in accepted for word in words)


def rewrite_command(
    host_argv: Sequence[str], config: RunConfig, *, running: RunConfig | None = None
) -> tuple[str, ...]:
    """Return the user's command line with only the layout's options replaced.

    Options that the user gave are changed in place, unless they already express the same setting.
    Further options that the layout needs are appended, except those whose value the ``running``
    layout has without an option, such as by a script's own defaults.  Differences in the model (a
    longer sequence, an overlap of experts) and Megatron's requirements of the layout
    (``megatron_rules``) are written as well.
    """
    arguments = split_launcher(host_argv)[1]
    given = read_words(arguments).values
    kept = _kept_names(given, config, running)
    stated = {
        target_of(name)[0]: words[0] if words else True for name, words in options_of(arguments)
    }
    if "use_torch_fsdp2" not in kept:
        stated.pop("use_torch_fsdp2", None)
    required = required_values(config, stated)
    other = {} if running is None else _other_model(config, running)
    needed = {
        **_needed_values(given, kept, config, running),
        **{name: v for name, v in required.items() if name not in kept & stated.keys()},
        **{name: value for name, value in other.items() if value is not None},
    }
    replaced = _LAYOUT | needed.keys() | other.keys() | misplaced(config, stated)
    return _with_values(host_argv, needed, replaced - kept)


def _kept_names(given: Values, config: RunConfig, running: RunConfig | None) -> frozenset[str]:
    """Return the names whose words stay, as they already describe the layout."""
    # Megatron may refuse an option that no longer has an effect in this layout.
    values, unsaid = layout_values(config), {} if running is None else layout_values(running)
    changed = {name for name in _ALONE if values.get(name) != unsaid.get(name)}
    return _unchanged_names({n: v for n, v in given.items() if n not in changed}, config)


def _needed_values(
    given: Values, kept: frozenset[str], config: RunConfig, running: RunConfig | None
) -> Values:
    """Return the layout's values that an option must say: all but those of kept words, and those
    that the running layout has without an option."""
    unsaid: Values = {} if running is None else layout_values(running)
    restated = _expand_to_groups(given.keys()) - kept | given.keys()
    usual = unsaid.get("global_batch_size")
    if running is not None and _passes(config) != _passes(running) == usual:
        restated |= {"global_batch_size"}  # Megatron's default depends on mbs x dp
    return {
        name: value
        for name, value in layout_values(config).items()
        if name not in kept and (name in restated or unsaid.get(name) != value)
    }


def _with_values(
    host_argv: Sequence[str], needed: Values, replaced: frozenset[str]
) -> tuple[str, ...]:
    """Return a command with the needed values in place of the replaced names' words."""
    wanted = dict(as_options(needed))
    out: list[str] = []
    for said in sayings(host_argv):
        if target_of(said.option)[0] not in replaced:
            out += said.written
        elif said.option in wanted:
            out += said.with_words(wanted.pop(said.option))
    for name, words in wanted.items():
        if words != ["1"] or not name.endswith("-model-parallel-size"):
            out += option_words(name, words)
    return tuple(out)


def _other_model(config: RunConfig, running: RunConfig) -> dict[str, ArgumentValue | None]:
    """Return model values that differ from the running one's; None if ``config`` has none."""
    running_values, others = model_values(running), model_values(config)
    return {
        name: others.get(name)
        for name in running_values | others
        if running_values.get(name) != others.get(name) and name in MODELLED - _PADDED
    }


def resumed_command(host_argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command line that resumes from this one's checkpoints: ``--load`` as ``--save``.

    Options that start from scratch or from another checkpoint are dropped.  Without ``--save``,
    return the command line unchanged.

    >>> resumed_command(["t.py", "--no-load-optim", "--load", "old", "--save", "here"])
    ('t.py', '--load', 'here', '--save', 'here')
    """
    options = dict(options_of(host_argv))
    saved = options.get("--save")
    if not saved:
        return tuple(host_argv)
    out: list[str] = []
    for said in sayings(host_argv):
        if said.option == "--load":
            out += ["--load", *saved]
        elif said.option not in _NOT_RESUMED:
            out += said.written
    return tuple(out if "--load" in options else [*out, "--load", *saved])


def _preserved_values(config: RunConfig, given: Values) -> Values:
    """Return the config's values, without those that the given ones override."""
    values, par = _argument_values(config, _stated_values(config)), config.parallelism
    void: set[str] = set()
    if given.keys() & _SPLIT:
        void |= _SPLIT
    elif given.keys() & {_PP, "num_layers"}:
        void |= _SPLIT
        pp = whole(_PP, given.get(_PP, par.pp))
        values["virtual_pipeline_model_parallel_size"] = par.vp if pp > 1 else 1
    void |= _derived_names(config, given)
    granularity = given.get("recompute_granularity")
    if granularity is not None and granularity != config.recompute.value:
        void |= RECOMPUTE.names
    if "mtp_num_layers" in given and par.chunk_layers and not void & _SPLIT:
        predicted = whole("mtp_num_layers", given["mtp_num_layers"])
        values["pipeline_model_parallel_layout"] = write_layout(par.chunk_layers, predicted)
    for name, others in _EXCLUSIVE.items():
        if name in given:
            void |= others
    if config.model.layer_kinds and not given.keys() & set(PATTERN):
        # The pattern is the model, whatever becomes of its segments.
        whole_model = replace(config, parallelism=Parallelism(), batch=_ONE_BATCH)
        values[PATTERN[0]] = write_pattern(whole_model if void & _SPLIT else config)
        void -= set(PATTERN)
    return {name: value for name, value in values.items() if name not in void}


def _derived_names(config: RunConfig, given: Values) -> set[str]:
    """Return names of sizes that a given one determines by Megatron's defaults, as in the run."""
    model = config.model
    derived_names: set[str] = set()
    if given.keys() & {"hidden_size", "swiglu"}:
        is_usual = model.ffn_hidden_size == default_ffn(model.hidden_size, model.is_gated)
        derived_names |= {"ffn_hidden_size"} if is_usual else set()
    if given.keys() & {"hidden_size", "num_attention_heads"}:
        is_usual = model.kv_channels * model.num_attention_heads == model.hidden_size
        derived_names |= {"kv_channels"} if is_usual else set()
    return derived_names


def _stated_values(config: RunConfig) -> Values:
    """Return the layout's values as given, if they still describe it; else in our spelling."""
    ours = layout_values(config)
    if not config.given:
        return ours
    given = read_words(config.given).values
    unchanged_names = _unchanged_names(given, config)
    return {
        **{name: value for name, value in ours.items() if name not in unchanged_names},
        **{name: value for name, value in given.items() if name in unchanged_names},
    }


def _argument_values(config: RunConfig, layout: Values) -> Values:
    """Return all values that Megatron's arguments can express for a run, and its ranks."""
    ranks = {name: getattr(config.parallelism, name) for name in ("num_ranks", "ranks_per_node")}
    ranks["world_size"] = ranks.pop("num_ranks")
    return {**model_values(config), **layout, **ranks}


def _parsed(argv: Sequence[str]) -> Values:
    """Return values by name in Megatron's namespace; ``--no-...`` is False."""
    given: Values = {}
    for option, words in options_of(expand(argv)):
        target, constant = target_of(option)
        negated = name_of(option.removeprefix("--no-")) if option.startswith("--no-") else ""
        if option in (_GPUS, _REPLICAS):
            target = "world_size" if option == _GPUS else "data_parallel_size"
        if constant is not None or (target in SWITCHES and not words):
            given[target] = True if constant is None else constant
        elif negated in SWITCHES:
            given[negated] = False
        elif target in MODELLED or option in (_GPUS, _REPLICAS):
            given[target] = _value(option, words, is_switch=target in SWITCHES)
        else:
            raise ConfigError(
                f"{option or words[0]} is not an option of a layout; "
                f"nearest: {', '.join(_nearest(option))}"
            )
    return given


def _value(option: str, words: list[str], *, is_switch: bool) -> ArgumentValue:
    if not words:
        raise ConfigError(f"{option} has no value; write {option} VALUE")
    if is_switch:
        raise ConfigError(f"{option} is a switch and takes no {words[0]!r}; leave it out")
    if len(words) == 1:
        return words[0]
    if target_of(option)[0] not in LISTS:
        raise ConfigError(f"{option} has {len(words)} values {words}; give one")
    return words


def _nearest(option: str) -> list[str]:
    names = ["--" + name.replace("_", "-") for name in (*MODELLED, *SPELLED)] + [_REPLICAS]
    names += [spelling for axis in NAMED_CHOICES for spelling in axis.spellings]
    return difflib.get_close_matches(option, names, n=3, cutoff=0.4) or sorted(names)[:3]


def _unchanged_names(host: Values, config: RunConfig) -> frozenset[str]:
    """Return the names of the groups whose given values already describe this layout."""
    config_values = _argument_values(config, layout_values(config))
    host = {name: value for name, value in host.items() if value != _NOT_TAKEN}
    unchanged_names: frozenset[str] = frozenset()
    for group in GROUPS:
        # An unchanged group decides how others are read, as the kind of FSDP its gradients' types.
        names = group | unchanged_names
        values = {name: value for name, value in config_values.items() if name not in names}
        values |= {name: value for name, value in host.items() if name in names}
        if host.keys() & group and _describes_config(values, config):
            unchanged_names |= group
    return unchanged_names


def _passes(config: RunConfig) -> int:
    """Return the samples of one micro-batch over all replicas."""
    return config.batch.micro_batch_size * config.parallelism.dp


def _expand_to_groups(names: Iterable[str]) -> frozenset[str]:
    """Return all names of the groups that contain one of these."""
    given_names = frozenset(names)
    return frozenset().union(*(group for group in _TOGETHER if group & given_names))


def _describes_config(values: Values, config: RunConfig) -> bool:
    try:
        parsed_config = from_namespace(values)
    except ConfigError:
        return False
    return (
        replace(_with_inexpressible(parsed_config, config), unmodelled=config.unmodelled) == config
    )


def _with_inexpressible(parsed_config: RunConfig, config: RunConfig) -> RunConfig:
    """Return the parsed config; fields that Megatron cannot express are those of ``config``."""
    experts, base_experts = parsed_config.model.experts, config.model.experts
    if experts is not None and base_experts is not None:
        experts = replace(
            experts, imbalance=base_experts.imbalance, measured=_counted(base_experts, experts)
        )
    return replace(
        parsed_config,
        recompute_span=(parsed_config if parsed_config.recomputes_all else config).recompute_span,
        model=replace(
            parsed_config.model,
            experts=experts,
            opaque_layers=_sized(parsed_config.model, config.model),
            is_residual_parallel=config.model.is_residual_parallel,
            window=_chunked(parsed_config.model.window, config.model.window),
        ),
        parallelism=replace(
            parsed_config.parallelism,
            keeps_grads_whole=parsed_config.parallelism.keeps_grads_whole
            or config.parallelism.keeps_grads_whole,
            prefetches_backward=config.parallelism.prefetches_backward,
        ),
        fuses_norms=config.fuses_norms,
        has_open_memory=config.has_open_memory,
        sharded_update_calls=config.sharded_update_calls,
        device=config.device,
        framework=parsed_config.framework or config.framework,
        program=config.program,
        absent=config.absent,
        given=config.given,
    )


def _chunked(
    window: AttentionWindow | None, base: AttentionWindow | None
) -> AttentionWindow | None:
    """Return the window, or ``base`` if that has the same size in chunks."""
    if window is None or base is None or replace(base, is_chunked=False) != window:
        return window
    return base


def _sized(model: ModelShape, base: ModelShape) -> tuple[OpaqueLayer, ...]:
    """Return the opaque layers, with the sizes of ``base`` in a model of the same width."""
    known = {one.symbol: one for one in base.opaque_layers}
    if model.hidden_size != base.hidden_size:
        known = {}
    return tuple(known.get(one.symbol, one) for one in model.opaque_layers)


def _counted(base_experts: Experts, experts: Experts) -> tuple[RankLoad, ...]:
    """Return the measured loads of ranks if experts and routing are the same; else none."""
    names = ("num_experts", "top_k", "capacity_factor", "is_balance_forced")
    is_same = all(getattr(base_experts, name) == getattr(experts, name) for name in names)
    return base_experts.measured if is_same else ()
