"""Our own format of step tables: Megatron's argument names as columns, and what was measured.

``recipes/published/FORMAT.md`` describes it for people.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pandas as pd

from ..arguments.megatron_namespace import from_namespace
from ..arguments.megatron_options import LISTS, ArgumentTable, is_known
from ..arguments.megatron_values import layout_values, model_values
from ..errors import CalibrationError, ConfigError
from ..records.cluster import Cluster
from ..records.step_rows import SkippedRow, StepKind, StepRow, StepTable, Trait
from ..workload.config import Engine, Experts, Precision, RunConfig, Schedule
from .own_format import unlike
from .split_columns import SPLIT_COLUMNS, as_stated, holds_narrow_grads, refuse_unread, stage_of

TIME = "step_time_s"
MEMORY = "peak_memory_nbytes"
REQUIRED = frozenset({TIME, "num_layers", "hidden_size", "micro_batch_size", "global_batch_size"})
OWN_COLUMNS = (
    *("row_id", "device", "machine", "model", "framework", "kind", "traits", "flag", "pair"),
    "imbalance",
    *(TIME, MEMORY),
    *SPLIT_COLUMNS,
)
"""Columns that are no arguments of Megatron."""


_WIDTHS = (
    *("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_fp32"),
    *("main_grads_dtype", "use_precision_aware_optimizer"),
)
"""Arguments that say how wide gradients are: a row that has none leaves it open."""
_MOST_OF_A_HOST = 16
"""Ranks a node that can be those of one host; more are already those of an NVLink domain."""
_NOT_SET = frozenset({"", "nan", "none", "<na>", "nat"})


def read_steps(frame: pd.DataFrame, name: str) -> StepTable:
    """The rows of ``frame``; ``name`` is how answers and errors call the table.

    Cells that are empty count as not given; rows that are no layout are listed with the reason.
    ``ConfigError`` where columns are missing, ``CalibrationError`` where there are no rows.
    """
    columns = frozenset(map(str, frame.columns))
    if not len(frame) and (not columns or columns >= REQUIRED):
        raise CalibrationError(f"{name} has no rows; give a table with step times")
    if not columns >= REQUIRED:
        raise unlike(columns, name, {"steps": REQUIRED})
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
    unused = tuple(c for c in map(str, frame.columns) if not _is_read(c))
    return StepTable(name=name, rows=tuple(rows), skipped=tuple(skipped), unused=unused)


def _is_read(column: str) -> bool:
    return column in OWN_COLUMNS or is_known(column)


def _row(cells: Mapping[str, str], row_id: str, table: str) -> StepRow:
    own = {column: cells.get(column, "") for column in OWN_COLUMNS}
    refuse_unread(cells, filter(_is_read, cells))
    traits = frozenset(_choice(Trait, text) for text in own["traits"].split())
    given = {column: text for column, text in cells.items() if column not in own and text}
    config = _config(_arguments(given), own, traits)
    if config.parallelism.ranks_per_node <= _MOST_OF_A_HOST:
        layout = Cluster().joined(config.parallelism, config.device)
        config = replace(config, parallelism=layout)
    model, batch = config.model, config.batch.global_batch_size
    measured_s = _number(TIME, own[TIME], math.nan)
    flags = [own["flag"], "" if measured_s > 0 else "no step time"]
    label = own["model"] or f"h{model.hidden_size} L{model.num_layers}"
    return StepRow(
        table=table,
        row_id=row_id,
        config=config,
        measured_s=measured_s,
        measured_memory_nbytes=_number(MEMORY, own[MEMORY], 0.0) or None,
        machine=own["machine"] or f"{config.device} {config.precision.value}",
        group=f"{label} x{config.parallelism.num_ranks} batch {batch}",
        kind=_choice(StepKind, own["kind"] or StepKind.MEASURED.value),
        traits=traits,
        pair=own["pair"],
        flag="; ".join(text for text in flags if text),
    )


def _config(
    given: Mapping[str, Any], own: Mapping[str, str], traits: frozenset[Trait]
) -> RunConfig:
    """The layout of Megatron's arguments, with what our own columns say of it."""
    # A mapping would not report the options that are left out.
    config = from_namespace(SimpleNamespace(**given))
    layout = as_stated(
        replace(
            config.parallelism,
            engine=_ENGINES.get(own["framework"], Engine.MEGATRON),
            prefetches_backward=Trait.LATE_GATHERS not in traits,
        ),
        lambda *names: next((own[name] for name in names if own.get(name)), ""),
    )
    is_narrow = holds_narrow_grads(layout)
    return replace(
        config,
        model=replace(
            config.model,
            is_residual_parallel=Trait.PARALLEL_RESIDUAL in traits,
            experts=_routed(config.model.experts, own["imbalance"]),
        ),
        parallelism=layout,
        reduces_grads_in_bf16=config.reduces_grads_in_bf16
        or (is_narrow and config.precision is not Precision.FP32),
        is_compiled=Trait.COMPILED in traits,
        # Tables of other frameworks leave out whose layers theirs are.
        fuses_norms=config.fuses_norms and given.get(_LAYERS) is not None,
        device=own["device"] or "unknown",
        framework=own["framework"],
        has_open_widths=config.precision is Precision.BF16
        and not is_narrow
        and all(given.get(name) is None for name in _WIDTHS),
    )


def _routed(experts: Experts | None, imbalance: str) -> Experts | None:
    """With tokens on the busiest rank as the row says."""
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


def own_frame(rows: list[StepRow]) -> pd.DataFrame:
    """Rows in our own format; columns that no row needs are left out."""
    frame = pd.DataFrame([_cells(row) for row in rows])
    return frame.loc[:, [c for c in frame.columns if frame[c].notna().any()]]


def _cells(row: StepRow) -> dict[str, Any]:
    """One row in our own format; ``read_steps`` gives an equal config back."""
    config, par = row.config, row.config.parallelism
    own = {
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
    own["zero_stage"] = stage_of(par) if par.engine is Engine.DEEPSPEED else None
    own["schedule"] = par.schedule.value if par.schedule is not Schedule.ONE_F_ONE_B else None
    # A list of words is one cell, and one that is empty says nothing.
    return own | {n: " ".join(v) if isinstance(v, list) else v for n, v in arguments.items()}


def _arguments(cells: Mapping[str, str]) -> Mapping[str, Any]:
    """Cells by the names of Megatron's namespace, however its command line spells them."""
    table = ArgumentTable()
    for column, text in cells.items():
        table.put(column, _value(text, column))
    return table.values


def _value(text: str, name: str) -> Any:
    """A cell as Megatron's argument parser would leave it."""
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
_ENGINES = {"GPT-NeoX": Engine.DEEPSPEED, "torchtitan": Engine.TORCH}


def _choice(kind: Any, text: str) -> Any:
    try:
        return kind(text)
    except ValueError as err:
        known = ", ".join(choice.value for choice in kind)
        raise ConfigError(f"{text!r} is not known; choose from {known}") from err
