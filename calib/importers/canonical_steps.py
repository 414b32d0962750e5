"""Our own format of step tables: Megatron's argument names as columns, and the measurements.

``recipes/published/FORMAT.md`` describes it for people.

Every reader of step tables uses this module for the columns of sharding and schedule, and passes on
which columns it has read, so that no table's ``zero_stage`` is dropped: a row is refused if it has
such a column that is neither read nor without effect.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from ..arguments.megatron_namespace import from_namespace
from ..arguments.megatron_options import LISTS, ArgumentTable, is_known
from ..arguments.megatron_values import layout_values, model_values
from ..errors import CalibrationError, ConfigError
from ..records.cluster import Cluster
from ..records.files import CREATED
from ..records.step_rows import SkippedRow, StepKind, StepRow, StepTable, Trait
from ..workload.config import Precision, RunConfig
from ..workload.model_shape import Experts
from ..workload.parallelism import Engine, Parallelism, Sharding
from .canonical_tables import unknown_table_error

Text = Callable[..., str]
"""Returns the first cell of the given columns that is not empty, "" if there is none."""

ZERO = ("zero_stage", "zero", "deepspeed_zero_stage", "zero_optimization_stage")
FSDP = ("fsdp", "fsdp_degree", "fsdp_size", "sharding", "sharding_strategy")
SCHEDULE = ("schedule", "pp_schedule", "pipeline_schedule", "pp_schedule_in_config")
SPLIT_COLUMNS = (*ZERO, *FSDP, *SCHEDULE)
"""Every column that ``with_split_columns`` reads."""

_STRATEGIES = {
    **dict.fromkeys(("no_shard", "none", "ddp", "off"), Sharding.NONE),
    "optim": Sharding.OPTIMIZER,
    "optim_grads": Sharding.GRADS,
    **dict.fromkeys(("full_shard", "shard_grad_op", "optim_grads_params"), Sharding.WEIGHTS),
}
"""Sharding by strategy name in PyTorch's and Megatron's FSDP."""
_INTERLEAVED = re.compile(r"interleav|\bvpp\b|virtual")
_ON, _OFF = ("true", "yes", "on"), ("", "false", "no", "off", "none", "0", "0.0")
_DECIDES = re.compile(
    r"zero(?!s)|fsdp|hsdp|shard|(?<!lr.)schedule(?!r)|offload|interleav|virtual", re.IGNORECASE
)
"""Names of columns that decide how a model is split, or where it resides."""


def with_split_columns(par: Parallelism, text: Text) -> Parallelism:
    """Return the layout with the values of ``SPLIT_COLUMNS``; unchanged if they are empty.

    Raise ``ConfigError`` if two contradict each other, or if something is not modelled.

    >>> cells = {"fsdp": "optim_grads"}
    >>> with_split_columns(Parallelism(dp=8), lambda *names: cells.get(names[0], "")).sharded.value
    'grads'
    """
    schedule, zero, fsdp = text(*SCHEDULE), text(*ZERO), text(*FSDP)
    if schedule:
        _check_schedule(par, schedule.strip().lower())
    if zero:
        _check_stage(zero)
        par = replace(par, is_optimizer_distributed=False)
    return _fsdp(par, fsdp) if fsdp else par


def refuse_unread(cells: Mapping[str, str], read: Iterable[str]) -> None:
    """Raise ``ConfigError`` for a column that decides how the model is split and that no reader has
    read, unless its cell is empty or switches it off."""
    for name in sorted(set(cells) - set(read)):
        if _DECIDES.search(name) and cells[name].strip().lower() not in (*_OFF, "nan"):
            raise ConfigError(
                f"{name} {cells[name]!r} is not read, and decides time and memory; leave the row "
                f"out, or give its value as one of {', '.join(SPLIT_COLUMNS)}"
            )


def _check_stage(text: str) -> None:
    if re.sub(r"^(zero|stage|[ _-])+", "", text.strip().lower()) not in ("0", "0.0"):
        raise ConfigError(
            f"zero_stage {text!r} is DeepSpeed's, whose engine is not modelled; leave the row out, "
            "or give fsdp or use_distributed_optimizer if those ran it"
        )


def _fsdp(par: Parallelism, text: str) -> Parallelism:
    """Apply an FSDP column: a switch, a strategy, or the number of ranks that share."""
    low = text.strip().lower().removeprefix("shardingstrategy.")
    if low.replace(".", "", 1).isdigit():
        return _sharded_over(par, round(float(low)))
    strategy = Sharding.WEIGHTS if low in _ON else _STRATEGIES.get(low)
    if strategy is None and low not in _OFF:
        raise ConfigError(
            f"fsdp {text!r} is not known; give true, false, the number of ranks that share, or one "
            f"of {', '.join(_STRATEGIES)}"
        )
    if strategy in (None, Sharding.NONE):
        return par
    return sharded(replace(par, regathers_weights=low != "shard_grad_op"), strategy)


def _sharded_over(par: Parallelism, number: int) -> Parallelism:
    """Shard weights over ``number`` of the replicas; context-parallel ranks share as well."""
    if not number:
        return par
    if number == 1 < par.dp:
        raise ConfigError(
            f"fsdp 1 with dp {par.dp} may be a switch or a number of ranks; give true or {par.dp}"
        )
    copies = 1 if number == par.dp * par.cp else par.dp / number
    if copies != round(copies):
        raise ConfigError(f"fsdp {number} does not divide dp {par.dp}; give a divisor")
    return replace(sharded(par, Sharding.WEIGHTS), num_optimizer_instances=round(copies))


def sharded(par: Parallelism, sharding: Sharding) -> Parallelism:
    """Return the layout under FSDP: sharded states are sent layer by layer, overlapping passes."""
    return replace(
        par,
        is_optimizer_distributed=True,
        sharding=sharding,
        overlaps_grad_reduce=True,
        overlaps_param_gather=True,
    )


def _check_schedule(par: Parallelism, low: str) -> None:
    """Raise ``ConfigError`` unless it is 1F1B, or interleaved with its virtual stages stated."""
    if par.pp == 1:
        return
    if _INTERLEAVED.search(low):
        if par.vp == 1:
            raise ConfigError(f"schedule {low!r} needs its virtual stages; give vp")
    elif low != "1f1b":
        raise ConfigError(f"schedule {low!r} is not modelled; known are 1f1b, interleaved")
    elif par.vp > 1:
        raise ConfigError(f"schedule {low!r} has no vp {par.vp}; give interleaved, or vp 1")


TIME = "step_time_s"
MEMORY = "peak_memory_nbytes"
REQUIRED = frozenset({TIME, "num_layers", "hidden_size", "micro_batch_size", "global_batch_size"})
CANONICAL_COLUMNS = (
    *("row_id", "device", "machine", "model", "framework", "kind", "traits", "flag", "pair"),
    "imbalance",
    *(TIME, MEMORY),
    *SPLIT_COLUMNS,
)
"""Columns that are not Megatron arguments."""


_WIDTHS = (
    *("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_fp32"),
    *("main_grads_dtype", "use_precision_aware_optimizer"),
)
"""Arguments that set the width of gradients; a row that has none leaves it open."""
_MOST_OF_A_HOST = 16
"""Most ranks per node on a single host; more are already those of an NVLink domain."""
_NOT_SET = frozenset({"", "nan", "none", "<na>", "nat"})


def read_steps(frame: pd.DataFrame, name: str) -> StepTable:
    """Read the rows of ``frame``; ``name`` is the table's name in answers and errors.

    Empty cells count as not given; rows that are no layout are listed with the reason.
    Raise ``ConfigError`` if columns are missing, ``CalibrationError`` if there are no rows.
    """
    columns = frozenset(map(str, frame.columns))
    if not len(frame) and (not columns or columns >= REQUIRED):
        raise CalibrationError(f"{name} has no rows; give a table with step times")
    if not columns >= REQUIRED:
        raise unknown_table_error(columns, name, {"steps": REQUIRED})
    rows: list[StepRow] = []
    skipped: list[SkippedRow] = []
    records: Iterable[Mapping[Any, Any]] = frame.to_dict(orient="records")
    for position, values in enumerate(records):
        cells = {str(column): str(value).strip() for column, value in values.items()}
        cells = {c: "" if text.lower() in _NOT_SET else text for c, text in cells.items()}
        row_id = cells.get("row_id") or f"row {position + 1}"
        try:
            rows.append(_row(cells, row_id, name))
        except ConfigError as err:
            skipped.append(SkippedRow(row_id=row_id, reason=str(err)))
    unused = tuple(c for c in map(str, frame.columns) if not _is_read(c) and c not in CREATED)
    return StepTable(name=name, rows=tuple(rows), skipped=tuple(skipped), unused=unused)


def _is_read(column: str) -> bool:
    return column in CANONICAL_COLUMNS or is_known(column)


def _row(cells: Mapping[str, str], row_id: str, table: str) -> StepRow:
    canonical_cells = {column: cells.get(column, "") for column in CANONICAL_COLUMNS}
    refuse_unread(cells, filter(_is_read, cells))
    traits = frozenset(_choice(Trait, text) for text in canonical_cells["traits"].split())
    given = {
        column: text for column, text in cells.items() if column not in canonical_cells and text
    }
    config = _config(_arguments(given), canonical_cells, traits)
    if config.parallelism.ranks_per_node <= _MOST_OF_A_HOST:
        layout = Cluster().with_domain_nodes(config.parallelism, config.device)
        config = replace(config, parallelism=layout)
    model, batch = config.model, config.batch.global_batch_size
    measured_s = _number(TIME, canonical_cells[TIME], math.nan)
    flags = [canonical_cells["flag"], "" if measured_s > 0 else "no step time"]
    label = canonical_cells["model"] or f"h{model.hidden_size} L{model.num_layers}"
    return StepRow(
        table=table,
        row_id=row_id,
        config=config,
        measured_s=measured_s,
        measured_memory_nbytes=_number(MEMORY, canonical_cells[MEMORY], 0.0) or None,
        machine=canonical_cells["machine"] or f"{config.device} {config.precision.value}",
        group=f"{label} x{config.parallelism.num_ranks} batch {batch}",
        kind=_choice(StepKind, canonical_cells["kind"] or StepKind.MEASURED.value),
        traits=traits,
        pair=canonical_cells["pair"],
        flag="; ".join(text for text in flags if text),
    )


def _config(
    given: Mapping[str, Any], canonical_cells: Mapping[str, str], traits: frozenset[Trait]
) -> RunConfig:
    """Return the run's config from Megatron's arguments and our own columns."""
    config = from_namespace(given)
    layout = with_split_columns(
        replace(
            config.parallelism,
            engine=Engine.TORCH
            if canonical_cells["framework"] == "torchtitan"
            else Engine.MEGATRON,
            prefetches_backward=Trait.LATE_GATHERS not in traits,
        ),
        lambda *names: next(
            (canonical_cells[name] for name in names if canonical_cells.get(name)), ""
        ),
    )
    return replace(
        config,
        model=replace(
            config.model,
            is_residual_parallel=Trait.PARALLEL_RESIDUAL in traits,
            experts=_routed(config.model.experts, canonical_cells["imbalance"]),
        ),
        parallelism=layout,
        is_compiled=Trait.COMPILED in traits,
        # Tables of other frameworks do not state the implementation of layers.
        fuses_norms=config.fuses_norms and given.get(_LAYERS) is not None,
        device=canonical_cells["device"] or "unknown",
        framework=canonical_cells["framework"],
        has_open_widths=config.precision is Precision.BF16
        and all(given.get(name) is None for name in _WIDTHS),
    )


def _routed(experts: Experts | None, imbalance: str) -> Experts | None:
    """Return the experts with the row's imbalance, the tokens on the busiest rank."""
    if experts is None:
        return None
    return replace(experts, imbalance=_number("imbalance", imbalance, 0.0))


def _number(name: str, text: str, default: float) -> float:
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{name} {text!r} is not a number; give one")
    return value


def canonical_frame(rows: list[StepRow]) -> pd.DataFrame:
    """Return rows in our own format, without columns that no row needs."""
    frame = pd.DataFrame([_cells(row) for row in rows])
    return frame.loc[:, [c for c in frame.columns if frame[c].notna().any()]]


def _cells(row: StepRow) -> dict[str, Any]:
    """Return one row in our own format; ``read_steps`` gives an equal config back."""
    config, par = row.config, row.config.parallelism
    cells = {
        "row_id": row.row_id,
        "device": config.device,
        "machine": row.machine,
        "model": row.group.rpartition(f" x{par.num_ranks} batch ")[0],
        "framework": config.framework or None,
        "kind": row.kind.value,
        "traits": " ".join(sorted(t.value for t in row.traits)) or None,
        "flag": row.flag or None,
        "pair": row.pair or None,
        "imbalance": (config.model.experts.imbalance or None) if config.model.experts else None,
        TIME: row.measured_s,
        MEMORY: row.measured_memory_nbytes,
        "world_size": par.num_ranks,
        "ranks_per_node": par.ranks_per_node or None,
    }
    arguments = model_values(config) | layout_values(config)
    if config.precision is Precision.BF16 and not config.has_open_widths:
        arguments["grad_reduce_in_bf16"] = config.reduces_grads_in_bf16
    if config.fuses_norms:
        arguments[_LAYERS] = "transformer_engine"
    # A list of words is one cell; an empty one counts as not given.
    return cells | {n: " ".join(v) if isinstance(v, list) else v for n, v in arguments.items()}


def _arguments(cells: Mapping[str, str]) -> Mapping[str, Any]:
    """Return cells by the names of Megatron's namespace, for any spelling of its command line."""
    table = ArgumentTable()
    for column, text in cells.items():
        table.put(column, _value(text, column))
    return table.values


def _value(text: str, name: str) -> Any:
    """Convert a cell as Megatron's argument parser would."""
    if name in LISTS:
        return text.split()
    low = text.lower()
    if low in ("true", "false"):
        return low == "true"
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


_LAYERS = "transformer_impl"


def _choice(kind: Any, text: str) -> Any:
    try:
        return kind(text)
    except ValueError as err:
        known = ", ".join(choice.value for choice in kind)
        raise ConfigError(f"{text!r} is not known; choose from {known}") from err
