"""The choices that make up a layout, and layouts with some choices taken from another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from ..errors import ConfigError
from ..layers import RecomputeOption
from ..search import GRAD_OVERLAP, NO_OVERLAP, NO_P2P, layers_text, layout_label
from ..workload import Parallelism, Recompute, RunConfig, uneven_layers

AXES = (
    *("gpus", "tp", "sp", "cp", "ep", "pp", "vp", "mbs"),
    *("recompute", "sharding", "offload", "overlap", "other"),
)
"""Axes in tie-breaking order; dp follows from the rest."""
_DEGREES: Mapping[str, tuple[str, ...]] = {
    "gpus": ("ranks_per_node",),
    "tp": ("tp",),
    "sp": ("is_sequence_parallel",),
    "cp": ("cp", "context_comm", "context_inner"),
    "ep": ("ep", "etp"),
    "pp": ("pp",),
    "vp": ("vp", "microbatch_group_size", "overlaps_p2p", "overlaps_p2p_ends"),
    "sharding": (
        *("is_optimizer_distributed", "sharding", "num_optimizer_instances"),
        *("regathers_weights", "prefetches_backward", "keeps_grads_whole"),
    ),
    "overlap": ("overlaps_grad_reduce", "overlaps_param_gather", "overlaps_tp"),
}
_RECOMPUTE = ("recompute", "recompute_num_layers", "recompute_modules")
_FOLLOWS = ("dp", "chunk_layers")
"""Fields that follow from the other degrees."""
_SIZES = ("micro_batch_size", "global_batch_size")
_NAMES = tuple(field.name for field in fields(Parallelism))


def axis_value(config: RunConfig, axis: str) -> str:
    """Return a layout's value on an axis, as text; empty for ``other``.

    >>> from ..workload import Batch, ModelShape
    >>> gpt = ModelShape(num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> config = RunConfig(model=gpt, parallelism=Parallelism(dp=2, is_optimizer_distributed=True),
    ...     batch=Batch(micro_batch_size=4, global_batch_size=8))
    >>> [axis_value(config, axis) for axis in ("gpus", "mbs", "recompute", "sharding", "overlap")]
    ['2', '4', 'none', 'optimizer', 'none']
    """
    return _TEXTS[axis](config)


def differing_axes(one: RunConfig, other: RunConfig) -> tuple[str, ...]:
    """Return the axes on which two layouts differ, in the order of ``AXES``."""
    return tuple(axis for axis in AXES if _taken(one, axis) != _taken(other, axis))


def single_choices(one: RunConfig, other: RunConfig) -> dict[str, dict[str, object]]:
    """Return the choices of ``other`` that differ, with the values for ``changed``.

    A choice is an axis if its text differs, else each of its fields on its own.
    """
    choices: dict[str, dict[str, object]] = {}
    for axis in differing_axes(one, other):
        ours, theirs = _taken(one, axis), _taken(other, axis)
        if axis_value(one, axis) != axis_value(other, axis):
            choices[axis] = theirs
        else:
            each = {name: {name: theirs[name]} for name in theirs if theirs[name] != ours[name]}
            choices |= each
    return choices


def with_axes_of(config: RunConfig, other: RunConfig, axes: Collection[str]) -> RunConfig:
    """Return ``config`` with the choices of ``other`` on some axes, see ``changed``.

    Layers are split over stages as in the layout that the number of stages is from.
    """
    taken: dict[str, Any] = {}
    for axis in axes:
        taken |= _taken(other, axis)
    return changed(config, taken, like=other)


def changed(
    config: RunConfig, values: Mapping[str, object], *, like: RunConfig | None = None
) -> RunConfig:
    """Return the layout with other values of some fields; dp follows from the number of ranks.

    Layers are split over stages as in ``like``, else as before, if the number of stages is the
    same, else evenly except for the last stage.  Raises ``ConfigError`` if the layout cannot run.
    """
    taken: dict[str, Any] = dict(values)
    par = config.parallelism
    ranks = taken.pop("num_ranks", par.num_ranks)
    batch = {name: taken.pop(name) for name in _SIZES if name in taken}
    degrees = {name: taken.pop(name) for name in _NAMES if name in taken}
    tp, cp, pp, vp = (degrees.get(name, getattr(par, name)) for name in ("tp", "cp", "pp", "vp"))
    if ranks % (tp * cp * pp):
        raise ConfigError(f"{ranks} ranks do not split over tp {tp} x cp {cp} x pp {pp}")
    degrees["dp"] = ranks // (tp * cp * pp)
    stated = degrees.pop("chunk_layers", ())
    is_stated = len(stated) == pp * vp > 1
    degrees["chunk_layers"] = stated if is_stated else _chunk_layers(config, like or config, pp, vp)
    if tp == 1:
        degrees["is_sequence_parallel"] = False
    return replace(
        config,
        parallelism=replace(par, **degrees),
        batch=replace(config.batch, **batch),
        **taken,
    )


def _taken(config: RunConfig, axis: str) -> dict[str, Any]:
    """Return the fields of an axis with their values; no two axes share a field name."""
    par = config.parallelism
    axis_fields = {name: getattr(par, name) for name in _DEGREES.get(axis, ())}
    if axis == "gpus":
        return {**axis_fields, "num_ranks": par.num_ranks}
    if axis == "sp" and par.tp == 1:
        return {"is_sequence_parallel": False}
    if axis == "offload":
        return {"optimizer_offload_frac": config.optimizer_offload_frac}
    if axis == "pp":
        return {**axis_fields, "chunk_layers": par.chunk_layers if par.vp == 1 else ()}
    if axis == "mbs":
        return {"micro_batch_size": config.batch.micro_batch_size}
    if axis == "recompute":
        return {name: getattr(config, name) for name in _RECOMPUTE}
    if axis == "other":
        named = {name for names in _DEGREES.values() for name in names} | {*_FOLLOWS}
        excluded = {*_RECOMPUTE, "optimizer_offload_frac", "parallelism", "batch", "unmodelled"}
        excluded |= {"cadence"}
        degrees = {f.name for f in fields(par)} - named
        compared = [f.name for f in fields(config) if f.compare]
        return {
            **{name: getattr(par, name) for name in sorted(degrees)},
            **{name: getattr(config, name) for name in compared if name not in excluded},
            "global_batch_size": config.batch.global_batch_size,
        }
    return axis_fields


def _chunk_layers(config: RunConfig, other: RunConfig, pp: int, vp: int) -> tuple[int, ...]:
    for one in (other, config):
        par = one.parallelism
        if (par.pp, par.vp) == (pp, vp):
            return par.chunk_layers
    return uneven_layers(config.model.num_layers, pp) if vp == 1 else ()


def _overlaps(config: RunConfig) -> str:
    par = config.parallelism
    is_on = {
        "gradients": par.overlaps_grad_reduce,
        "weights": par.overlaps_param_gather,
        "tp": par.overlaps_tp,
    }
    return "+".join(name for name, on in is_on.items() if on) or "none"


def _sharding(config: RunConfig) -> str:
    par = config.parallelism
    copies = f"x{par.num_optimizer_instances}" if par.num_optimizer_instances > 1 else ""
    return par.sharded.value + copies


def _recompute(config: RunConfig) -> str:
    layers = f":{config.recompute_num_layers}" if config.recompute_num_layers else ""
    modules = config.recompute_modules if config.recompute is Recompute.SELECTIVE else ()
    return "+".join((config.recompute.value + layers, *modules))


def _split(config: RunConfig) -> str:
    """Return the layers of the stages; empty if all stages have as many."""
    layers = config.parallelism.chunk_layers if config.parallelism.vp == 1 else ()
    return f"({layers_text(layers)})" if layers else ""


def _degree(name: str) -> Callable[[RunConfig], str]:
    return lambda config: str(getattr(config.parallelism, name))


_TEXTS: Mapping[str, Callable[[RunConfig], str]] = {
    "gpus": _degree("num_ranks"),
    **{name: _degree(name) for name in ("tp", "cp", "ep", "vp")},
    "sp": lambda config: "on" if config.parallelism.is_sequence_parallel else "off",
    "pp": lambda config: " ".join(filter(None, (str(config.parallelism.pp), _split(config)))),
    "offload": lambda config: f"{100 * config.optimizer_offload_frac:.0f} %",
    "mbs": lambda config: str(config.batch.micro_batch_size),
    "recompute": _recompute,
    "sharding": _sharding,
    "overlap": _overlaps,
    "other": lambda config: "",
}


_SPELLED = {
    "SP": "sequence parallel",
    "noSP": "no sequence parallelism",
    NO_OVERLAP: "transfers of the replicas not overlapped",
    GRAD_OVERLAP: "of the replicas' transfers, only gradients overlapped with the passes",
    NO_P2P: "messages between stages not overlapped",
}


def layout_words(config: RunConfig) -> str:
    """Return a layout in words: degrees and sharding, then the rest of its label.

    >>> from dataclasses import replace
    >>> from ..workload import Batch, ModelShape, Parallelism
    >>> gpt = ModelShape(num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> run = RunConfig(model=gpt, parallelism=Parallelism(pp=2, dp=2),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8))
    >>> layout_words(run)
    'PP2 DP2, micro-batch 1'
    >>> layout_words(replace(run, parallelism=Parallelism(), recompute=Recompute.FULL))
    'no parallelism, micro-batch 1, all layers computed again'
    """
    micro_batch = f"mbs{config.batch.micro_batch_size}"
    words = layout_label(config).split()
    degrees, others = [], []
    for word in words[: words.index(micro_batch)]:
        if word[0].isdecimal():
            others.append(f"layers {word}")
        elif word in _SPELLED:
            others.append(_SPELLED[word])
        else:
            degrees.append(word)
    others.append(f"micro-batch {config.batch.micro_batch_size}")
    if config.recompute is not Recompute.NONE:
        others.append(recompute_text(config).replace("again", "computed again"))
    if config.optimizer_offload_frac:
        share = f"{100 * config.optimizer_offload_frac:.0f} %"
        others.append(f"{share} of the optimizer in the host's memory")
    return ", ".join((" ".join(degrees) or "no parallelism", *others))


def recompute_text(config: RunConfig) -> str:
    """Return what a layout recomputes, in words.

    >>> from dataclasses import replace
    >>> from ..workload import Batch, ModelShape, Parallelism
    >>> gpt = ModelShape(num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> run = RunConfig(model=gpt, parallelism=Parallelism(), recompute=Recompute.SELECTIVE,
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8))
    >>> recompute_text(run), recompute_text(replace(run, recompute=Recompute.NONE))
    ('core_attn again', 'no recompute')
    """
    if config.recompute is Recompute.NONE:
        return "no recompute"
    if config.recompute is Recompute.SELECTIVE:
        return f"{'+'.join(RecomputeOption.from_config(config).names)} again"
    number = config.recompute_num_layers
    return f"{number} layers of a chunk again" if number else "all layers again"
