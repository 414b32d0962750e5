"""Columns that say how replicas share states and in what order passes run, whoever wrote a table.

Every reader of step tables takes these from here, and hands over which columns it has read, so that
no table's ``zero_stage`` is dropped: what is neither read nor without effect refuses its row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ..errors import ConfigError
from ..workload.config import Engine, Parallelism, Schedule, Sharding

Text = Callable[..., str]
"""The first cell of these columns that says something, "" where none does."""

ZERO = ("zero_stage", "zero", "deepspeed_zero_stage", "zero_optimization_stage")
FSDP = ("fsdp", "fsdp_degree", "fsdp_size", "sharding", "sharding_strategy")
SCHEDULE = ("schedule", "pp_schedule", "pipeline_schedule", "pp_schedule_in_config")
SPLIT_COLUMNS = (*ZERO, *FSDP, *SCHEDULE)
"""Every column that ``as_stated`` reads."""

_STAGES = (Sharding.NONE, Sharding.OPTIMIZER, Sharding.GRADS, Sharding.WEIGHTS)
"""By the stage of ZeRO."""
_STRATEGIES = {
    **dict.fromkeys(("no_shard", "none", "ddp", "off"), Sharding.NONE),
    "optim": Sharding.OPTIMIZER,
    "optim_grads": Sharding.GRADS,
    **dict.fromkeys(("full_shard", "shard_grad_op", "optim_grads_params"), Sharding.WEIGHTS),
}
"""By the names of PyTorch's and Megatron's FSDP."""
_SCHEDULES = {
    "1f1b": Schedule.ONE_F_ONE_B,
    "zb_h1": Schedule.ZERO_BUBBLE_H1,
    "zbh1": Schedule.ZERO_BUBBLE_H1,
    "zb_h2": Schedule.ZERO_BUBBLE_H2,
    "zbh2": Schedule.ZERO_BUBBLE_H2,
}
_INTERLEAVED = re.compile(r"interleav|\bvpp\b|virtual")
_ON, _OFF = ("true", "yes", "on"), ("", "false", "no", "off", "none", "0", "0.0")
_DECIDES = re.compile(
    r"zero(?!s)|fsdp|hsdp|shard|(?<!lr.)schedule(?!r)|offload|interleav|virtual", re.IGNORECASE
)
"""Names of columns that say how a model is split, or where it lies."""


def as_stated(par: Parallelism, text: Text) -> Parallelism:
    """The layout with what these columns say of it; as it is where they say nothing.

    ``ConfigError`` where two contradict each other, or where something is not modelled.

    >>> cells = {"zero_stage": "2"}
    >>> as_stated(Parallelism(dp=8), lambda *names: cells.get(names[0], "")).sharded.value
    'grads'
    """
    schedule, zero, fsdp = text(*SCHEDULE), text(*ZERO), text(*FSDP)
    par = _scheduled(par, schedule.strip().lower()) if schedule else par
    if zero:
        stage = _stage(zero)
        if stage and fsdp.strip().lower() not in _OFF:
            raise ConfigError(f"zero_stage {zero} and fsdp {fsdp} are both given; leave one out")
        par = _zero(par, stage)
    return _fsdp(par, fsdp) if fsdp else par


def refuse_unread(cells: Mapping[str, str], read: Iterable[str]) -> None:
    """Raises ``ConfigError`` by the name of a column that decides how the model is split and that
    no reader has read, unless its cell is empty or switches it off."""
    for name in sorted(set(cells) - set(read)):
        if _DECIDES.search(name) and cells[name].strip().lower() not in (*_OFF, "nan"):
            raise ConfigError(
                f"{name} {cells[name]!r} is not read, and decides time and memory; leave the row "
                f"out, or give what it says as one of {', '.join(SPLIT_COLUMNS)}"
            )


def _stage(text: str) -> int:
    digits = re.sub(r"^(zero|stage|[ _-])+", "", text.strip().lower())
    try:
        value = float(digits)
    except ValueError:
        value = -1.0
    if value not in (0, 1, 2, 3):
        raise ConfigError(f"zero_stage {text!r} is not known; give 0, 1, 2 or 3")
    return int(value)


def _zero(par: Parallelism, stage: int) -> Parallelism:
    if not stage:
        return replace(par, is_optimizer_distributed=False)
    if stage > 1 and par.pp > 1:
        raise ConfigError(
            f"zero_stage {stage} with pp {par.pp} is refused by DeepSpeed's pipeline; give 0 or 1"
        )
    return replace(
        par, engine=Engine.DEEPSPEED, is_optimizer_distributed=True, sharding=_STAGES[stage]
    )


def _fsdp(par: Parallelism, text: str) -> Parallelism:
    """By a switch, a strategy, or the ranks that share."""
    low = text.strip().lower().removeprefix("shardingstrategy.")
    if low.replace(".", "", 1).isdigit():
        return _over(par, round(float(low)))
    strategy = Sharding.WEIGHTS if low in _ON else _STRATEGIES.get(low)
    if strategy is None and low not in _OFF:
        raise ConfigError(
            f"fsdp {text!r} is not known; give true, false, the number of ranks that share, or one "
            f"of {', '.join(_STRATEGIES)}"
        )
    if strategy in (None, Sharding.NONE):
        return par
    return sharded(replace(par, regathers_weights=low != "shard_grad_op"), strategy)


def _over(par: Parallelism, number: int) -> Parallelism:
    """Weights sharded over so many of the replicas; ranks of context parallelism share as well."""
    if not number:
        return par
    if number == 1 < par.dp:
        raise ConfigError(
            f"fsdp 1 beside dp {par.dp} may be a switch or a number of ranks; give true or {par.dp}"
        )
    copies = 1 if number == par.dp * par.cp else par.dp / number
    if copies != round(copies):
        raise ConfigError(f"fsdp {number} does not divide dp {par.dp}; give a divisor")
    return replace(sharded(par, Sharding.WEIGHTS), num_optimizer_instances=round(copies))


def stage_of(par: Parallelism) -> int:
    """The stage of ZeRO that shards as much."""
    return _STAGES.index(par.sharded)


def holds_narrow_grads(par: Parallelism) -> bool:
    """True where gradients are kept as wide as weights: DeepSpeed under ZeRO-2 and 3
    (``gradient_accumulation_dtype``)."""
    is_deep = par.sharded in (Sharding.GRADS, Sharding.WEIGHTS)
    return is_deep and par.engine is Engine.DEEPSPEED


def sharded(par: Parallelism, sharding: Sharding) -> Parallelism:
    """The layout under FSDP: what is sharded travels by layers, beside the passes."""
    return replace(
        par,
        is_optimizer_distributed=True,
        sharding=sharding,
        overlaps_grad_reduce=True,
        overlaps_param_gather=True,
    )


def _scheduled(par: Parallelism, low: str) -> Parallelism:
    """With this order of passes; chunks have to be stated beside it."""
    if par.pp == 1:
        return par
    if _INTERLEAVED.search(low):
        if par.vp == 1:
            raise ConfigError(f"schedule {low!r} needs its virtual stages; give vp")
        return par
    found = _SCHEDULES.get(low.replace("-", "_").replace(" ", "_"))
    if found is None:
        known = ", ".join((*_SCHEDULES, "interleaved"))
        raise ConfigError(f"schedule {low!r} is not modelled; known are {known}")
    if par.vp > 1:
        raise ConfigError(f"schedule {low!r} has no vp {par.vp}; give interleaved, or vp 1")
    return replace(par, schedule=found)
