"""Megatron's option names and ``RunConfig``: read, write, and change within a command line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace

from ..errors import ConfigError
from .config import (
    ModelShape,
    Parallelism,
    Recompute,
    RunConfig,
)

_MODEL = {
    "--num-layers": "num_layers",
    "--hidden-size": "hidden_size",
    "--ffn-hidden-size": "ffn_hidden_size",
    "--num-attention-heads": "num_attention_heads",
    "--num-query-groups": "num_query_groups",
    "--kv-channels": "kv_channels",
    "--seq-length": "seq_length",
}
_DEGREES = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--data-parallel-size": "dp",
}
_BATCH = {
    "--micro-batch-size": "micro_batch_size",
    "--global-batch-size": "global_batch_size",
}
_SWITCHES = {
    "--sequence-parallel": "is_sequence_parallel",
    "--use-distributed-optimizer": "is_optimizer_distributed",
    "--overlap-grad-reduce": "overlaps_grad_reduce",
    "--overlap-param-gather": "overlaps_param_gather",
}
_GPUS = "--gpus"
_VIRTUAL = "--num-layers-per-virtual-pipeline-stage"
_RECOMPUTE = "--recompute-granularity"
_RECOMPUTE_LAYERS = "--recompute-num-layers"
_RECOMPUTE_METHOD = "--recompute-method"
_RECOMPUTE_ALIAS = "--recompute-activations"
_VIRTUAL_ALIAS = "--num-virtual-stages-per-pipeline-rank"
_WITH_VALUE = (
    *_MODEL,
    *_DEGREES,
    *_BATCH,
    _GPUS,
    _VIRTUAL,
    _RECOMPUTE,
    _RECOMPUTE_LAYERS,
    _RECOMPUTE_METHOD,
)
_NAMES = (*_WITH_VALUE, *_SWITCHES)


def apply_options(config: RunConfig, argv: Sequence[str]) -> RunConfig:
    """The config with Megatron's options laid over it.

    The number of ranks stays unless ``--gpus`` or ``--data-parallel-size`` is given; dp follows.
    ``--no-...`` turns a switch off.  Raises ``ConfigError`` for an option that is not known.
    """
    given = _parsed(argv)
    model = replace(
        config.model,
        **{field: _whole(name, given[name]) for name, field in _MODEL.items() if name in given},
    )
    batch = replace(
        config.batch,
        **{field: _whole(name, given[name]) for name, field in _BATCH.items() if name in given},
    )
    recompute, num_layers = _recompute(config, given)
    return replace(
        config,
        model=model,
        batch=batch,
        parallelism=_parallelism(config, model, given),
        recompute=recompute,
        recompute_num_layers=num_layers,
    )


def options(config: RunConfig) -> tuple[str, ...]:
    """Megatron's options that give this layout (the number of ranks is the launcher's).

    Options that are Megatron's default are left out, but for the sizes.
    """
    par = config.parallelism
    out = [
        "--tensor-model-parallel-size",
        str(par.tp),
        "--pipeline-model-parallel-size",
        str(par.pp),
        "--micro-batch-size",
        str(config.batch.micro_batch_size),
        "--global-batch-size",
        str(config.batch.global_batch_size),
    ]
    if par.vp > 1:
        out += [_VIRTUAL, str(config.model.num_layers // (par.pp * par.vp))]
    if config.recompute is not Recompute.NONE:
        out += [_RECOMPUTE, config.recompute.value]
    if config.recompute is Recompute.FULL:
        method = "block" if config.recompute_num_layers else "uniform"
        out += [_RECOMPUTE_METHOD, method, _RECOMPUTE_LAYERS, str(config.recompute_num_layers or 1)]
    return (*out, *(name for name, field in _SWITCHES.items() if getattr(par, field)))


def rewrite_command(host_argv: Sequence[str], config: RunConfig) -> tuple[str, ...]:
    """The user's own command line with the options of the layout replaced, all else as it was.

    Options that the user gave are changed in place; those that the layout needs beyond them come at
    the end.
    """
    wanted = _as_table(options(config))
    known = {
        *(n for n in _WITH_VALUE if n not in _MODEL and n not in (_GPUS,)),
        *_SWITCHES,
        _VIRTUAL_ALIAS,
        _RECOMPUTE_ALIAS,
    }
    out: list[str] = []
    place = 0
    while place < len(host_argv):
        name, joined, _ = host_argv[place].partition("=")
        place += 1
        if name not in known:
            out.append(host_argv[place - 1])
            continue
        if name in _WITH_VALUE or name == _VIRTUAL_ALIAS:
            place += not joined
            if name in wanted:
                new = wanted.pop(name)
                out += [f"{name}={new}"] if joined else [name, str(new)]
        elif name in wanted:
            out.append(name)
            wanted.pop(name)
    for name, new in wanted.items():
        if new is None:
            out.append(name)
        elif name not in _DEGREES or new != "1":
            out += [name, new]
    return tuple(out)


def _parsed(argv: Sequence[str]) -> dict[str, str]:
    """Option to its value (``""`` for a switch that is on, ``"off"`` for ``--no-...``)."""
    given: dict[str, str] = {}
    place = 0
    while place < len(argv):
        name, joined, value = argv[place].partition("=")
        place += 1
        if name in _SWITCHES:
            given[name] = ""
        elif name.startswith("--no-") and "--" + name[5:] in _SWITCHES:
            given["--" + name[5:]] = "off"
        elif name in _WITH_VALUE:
            if not joined:
                if place >= len(argv):
                    raise ConfigError(f"{name} has no value; write {name} VALUE")
                value = argv[place]
                place += 1
            given[name] = value
        else:
            near = difflib.get_close_matches(name, _NAMES, n=3, cutoff=0.4) or sorted(_NAMES)[:3]
            raise ConfigError(f"{name} is not an option of a layout; nearest: {', '.join(near)}")
    return given


def _whole(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError as err:
        raise ConfigError(f"{name} {value!r} is not a whole number; give one") from err


def _parallelism(config: RunConfig, model: ModelShape, given: dict[str, str]) -> Parallelism:
    par = config.parallelism
    degree = {field: _whole(name, given[name]) for name, field in _DEGREES.items() if name in given}
    tp, pp = degree.get("tp", par.tp), degree.get("pp", par.pp)
    if min(tp, pp) < 1:
        raise ConfigError(f"tp {tp} x pp {pp} is not a layout; give degrees of at least 1")
    num_ranks = _whole(_GPUS, given[_GPUS]) if _GPUS in given else par.num_ranks
    dp = degree.get("dp", 0)
    if not dp:
        dp, rest = divmod(num_ranks, tp * pp)
        if rest or not dp:
            raise ConfigError(
                f"{num_ranks} ranks do not split over tp {tp} x pp {pp}; "
                f"give {_GPUS} {max(1, round(num_ranks / (tp * pp))) * tp * pp}"
            )
    elif _GPUS in given and dp * tp * pp != num_ranks:
        raise ConfigError(
            f"{_GPUS} {num_ranks} is not tp {tp} x pp {pp} x dp {dp}; leave one of them out"
        )
    switches = {field: given[name] != "off" for name, field in _SWITCHES.items() if name in given}
    vp = par.vp if pp > 1 else 1
    if _VIRTUAL in given:
        vp = _virtual(model.num_layers, pp, _whole(_VIRTUAL, given[_VIRTUAL]))
    return replace(par, tp=tp, pp=pp, dp=dp, vp=vp, **switches)


def _virtual(num_layers: int, pp: int, per_virtual: int) -> int:
    if per_virtual < 1 or num_layers % (pp * per_virtual):
        raise ConfigError(
            f"{_VIRTUAL} {per_virtual} does not divide the {num_layers} layers over pp {pp}; "
            f"choose a divisor of {num_layers // pp}"
        )
    return num_layers // (pp * per_virtual)


def _recompute(config: RunConfig, given: dict[str, str]) -> tuple[Recompute, int]:
    recompute, num_layers = config.recompute, config.recompute_num_layers
    if _RECOMPUTE in given:
        values = [r.value for r in Recompute]
        if given[_RECOMPUTE] not in values:
            raise ConfigError(
                f"{_RECOMPUTE} {given[_RECOMPUTE]!r} is not known; choose from {', '.join(values)}"
            )
        recompute = Recompute(given[_RECOMPUTE])
        num_layers = num_layers if recompute is config.recompute else 0
    if _RECOMPUTE_LAYERS in given:
        num_layers = _whole(_RECOMPUTE_LAYERS, given[_RECOMPUTE_LAYERS])
    if given.get(_RECOMPUTE_METHOD) == "uniform":
        num_layers = 0
    return recompute, num_layers


def _as_table(argv: Sequence[str]) -> dict[str, str | None]:
    table: dict[str, str | None] = {}
    rest = list(argv)
    while rest:
        name = rest.pop(0)
        table[name] = None if name in _SWITCHES else rest.pop(0)
    return table
