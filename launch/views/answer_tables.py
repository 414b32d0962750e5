"""Tables of a report, defined once for the terminal, HTML and W&B."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ...calib.advice.planning import Candidate, Plan, exclusion_reason
from ...calib.advice.scaling import TRUSTED_FACTOR, Growth, ScalePoint, Scaling
from ...calib.fit.estimates import Source
from ...calib.forecast.evaluation import Coverage, Evaluation
from ...calib.forecast.rates import RemainingRun
from ...calib.forecast.whole import WholeRun
from ...calib.memory.peak import Verdict
from ...calib.shell import printable
from ...calib.timeline.terms import PART_TEXTS
from ...calib.units import TERA, format_count, format_frac, format_time
from .table import (
    Cell,
    ReportTable,
    bytes_cell,
    count_cell,
    frac_cell,
    span_cell,
    table_of,
    time_cell,
    typed_rows,
    whole_cell,
)

if TYPE_CHECKING:
    from ...calib.answers.answer import Answer, Modelled
    from ...calib.answers.run_measurements import Measurements
    from ...calib.drift.stragglers import Clock, WaitingReport
    from ...calib.regressors.estimate import Estimate


NEGLIGIBLE_S = 1e-6
"""Shorter parts of a step are not listed."""
NUM_WORKS = 20
"""Maximum number of operators and collectives listed, the longest first."""
NUM_RANKS = 64
"""Maximum number of ranks listed: those that wait longest."""
NUM_FORECASTS = 12
"""Maximum number of forecasts listed, evenly spaced, and the last one."""
PPM = 1e6
MODEL_ERROR = "Model error: "
"""Beginning of the note on the modelled step against the measured one."""


def tables_of(answer: Answer) -> list[ReportTable]:
    """Return all tables that have rows."""
    modelled = answer.modelled
    if modelled is None:
        tables = [*_measured(answer), _decided(answer)]
    else:
        tables = [
            _throughput(answer, modelled),
            *_parts_and_work(modelled, answer.measured.step_s),
            *_models(answer.measured),
            layouts_table(modelled.plan, remaining_run=answer.remaining_run),
            *_waits(answer.measured),
            *_stragglers(answer.measured.waiting),
            _decided(answer),
        ]
    return [table for table in tables if table.rows]


def forecast_tables(track: Evaluation | None) -> list[ReportTable]:
    """Return tables of the forecasts of a finished run against its end."""
    if track is None:
        return []
    every = max(1, math.ceil(len(track.errors) / NUM_FORECASTS))
    errors = table_of(
        "forecasts",
        "Forecasts of the finish against the end of the run",
        [*track.errors[:-1:every], *track.errors[-1:]],
        {
            "made after step": lambda error: whole_cell(error.iteration),
            "error": lambda error: Cell(f"{error.error_s:+.1f} s", {" (s)": error.error_s}),
            "of the whole run": lambda error: _signed(error.of_total_frac),
            "of what was left": lambda error: _signed(error.of_left_frac),
            "in 90 %": lambda error: "yes" if error.is_inside else "no",
        },
    )
    coverage = table_of(
        "coverage",
        "Share of intervals that held",
        [
            pair
            for pair in zip(track.finish_coverage, track.step_coverage, strict=True)
            if pair[0].num + pair[1].num
        ],
        {
            "nominal": lambda pair: frac_cell(pair[0].nominal_frac),
            "finish": lambda pair: _coverage_text(pair[0]),
            "single steps": lambda pair: _coverage_text(pair[1]),
        },
    )
    return [table for table in (errors, coverage) if table.rows]


def _coverage_text(row: Coverage) -> str:
    return f"{format_frac(row.observed_frac)} of {row.num}" if row.num else ""


def notes_of(answer: Answer) -> list[str]:
    """Return the notes below the tables, one sentence each."""
    model_notes = [] if answer.modelled is None else _notes(answer, answer.modelled)
    problems = (f"Problem: {problem}" for problem in answer.problems)
    return [printable(note) for note in (*model_notes, *problems)]


def wandb_tables(tables: Sequence[ReportTable]) -> dict[str, list[dict[str, Any]]]:
    """Return report tables as rows for sinks, by key, with numbers instead of text."""
    return {table.key: typed_rows(table) for table in tables}


def _decided(answer: Answer) -> ReportTable:
    return table_of(
        "reasons",
        "The decision, rule by rule",
        answer.decision.reasons,
        {
            "rule": lambda reason: reason.rule.value,
            "probability": lambda reason: frac_cell(reason.probability),
            "calls for a stop": lambda reason: "yes" if reason.is_met else "no",
            "why": lambda reason: reason.text,
        },
    )


def summary_values(answer: Answer) -> dict[str, float | str]:
    """Return values for sinks at the end: the decision, and throughput of the measured step."""
    return {**answer.decision_texts, **answer.rates}


def _measured(answer: Answer) -> Iterator[ReportTable]:
    """Yield step, remaining parts and groups of a run with an unknown layout."""
    ahead = answer.forecast
    ends = f"{format_time(ahead.single_low_s)} to {format_time(ahead.single_high_s)}"
    rows = [("step", format_time(answer.measured.step_s)), ("90 % of single steps", ends)]
    for name, value in answer.rates.items():
        unit, _, of_one = name.partition("_per_s")
        rows.append((f"{unit}/s" + " per rank" * bool(of_one), format_count(value)))
    if (overhead := answer.measured.overhead) is not None:
        rows.append(("hooked steps longer by", overhead.text))
    yield _pairs("measured_step", "The measured step", ("figure", "value"), rows)
    yield table_of(
        "left",
        "Rest of the run" if answer.end.steps_total else "Rest of this pass",
        ahead.breakdown if answer.end.horizon else (),
        {
            "part": lambda part: part.name,
            "how many": lambda part: count_cell(part.num_left),
            "time": lambda part: time_cell(part.time_s),
            "source": lambda part: part.provenance,
        },
    )
    yield table_of(
        "groups",
        "Groups of ranks, and their transfers per rank and step",
        answer.measured.groups,
        {
            "group": lambda group: group.role,
            "ranks": lambda group: whole_cell(group.num_ranks),
            "transfer": lambda group: group.collective or "not measured",
            "calls": lambda group: count_cell(group.calls) if group.calls else "",
            "bytes": lambda group: bytes_cell(group.nbytes) if group.calls else "",
            "time": lambda group: (
                f"{'at most ' * group.is_bound}{format_time(group.time_s)}" if group.calls else ""
            ),
        },
    )


def _pairs(
    key: str, title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]
) -> ReportTable:
    return ReportTable(key=key, title=title, columns=columns, rows=tuple(rows))


def _throughput(answer: Answer, modelled: Modelled) -> ReportTable:
    throughput = modelled.throughput(answer.measured.step_s)
    one = "rank" if answer.measured.device == "cpu" else "GPU"
    rows = [
        ("tokens/s", count_cell(throughput.tokens_per_s)),
        (f"tokens/s per {one}", count_cell(throughput.tokens_per_s_per_gpu)),
        (f"model TFLOP/s per {one}", count_cell(throughput.flop_per_s_per_gpu / TERA)),
    ]
    if throughput.mfu_frac is not None and throughput.hfu_frac is not None:
        rows.append(("MFU", frac_cell(throughput.mfu_frac)))
        rows.append(("HFU (counts recomputed work)", frac_cell(throughput.hfu_frac)))
    title = f"Throughput of the measured step ({format_time(answer.measured.step_s)})"
    return _pairs("throughput", title, ("rate", "value"), rows)


def _parts_and_work(answer: Modelled, measured_s: float) -> Iterator[ReportTable]:
    running, total_s = answer.model_forecast.running_estimate, answer.step.time_s
    parts = [(part.value, time_s) for part, time_s in running.parts_s.items()]
    parts.append(("waiting for later ranks", answer.waiting_s))
    parts.append(("cost of hooks, subtracted", -answer.perturbation_s))
    yield table_of(
        "step_parts",
        f"Modelled step, {format_time(total_s)}, by part (stage {running.critical_stage}); "
        f"measured: {format_time(measured_s)}",
        [part for part in parts if abs(part[1]) > NEGLIGIBLE_S],
        {
            "part": lambda part: part[0],
            "time": lambda part: time_cell(part[1]),
            "of the modelled step": lambda part: frac_cell(part[1] / total_s),
        },
    )
    yield table_of(
        "work",
        f"Work of the critical stage, in a simulated step of {format_time(running.time_s)}, before "
        "waiting for other ranks",
        sorted(running.contributions, key=lambda work: -work.time_s)[:NUM_WORKS],
        {
            "work": lambda work: work.name,
            "phase": lambda work: work.phase,
            "size": lambda work: bytes_cell(work.nbytes) if work.nbytes else "",
            "times per step": lambda work: whole_cell(round(work.calls)),
            "time per step": lambda work: time_cell(work.time_s),
            "of the simulated step": lambda work: frac_cell(work.time_s / running.time_s),
            "source": lambda work: work.source.value,
        },
    )


def _models(measured: Measurements) -> Iterator[ReportTable]:
    summary = measured.calibration.summary()
    yield table_of(
        "operators",
        "Operator models",
        summary["operators"],
        {
            "operator": lambda row: f"{row['kind']} {row['phase']}",
            "rows": lambda row: whole_cell(row["num_rows"]),
            "shapes": lambda row: whole_cell(row["num_shapes"]),
            "model": lambda row: row["model"],
            "law / measured": lambda row: frac_cell(row.get("efficiency_frac")),
            "held-out error": lambda row: frac_cell(row.get("left_out_error_frac")),
        },
    )
    yield table_of(
        "collectives",
        "Collective models",
        summary["collectives"],
        {
            "collective": lambda row: f"{row['collective']} {row['role']} x{row['num_ranks']}",
            "rows": lambda row: whole_cell(row["num_rows"]),
            "sizes": lambda row: whole_cell(row["num_sizes"]),
            "alpha": lambda row: time_cell(row["alpha_s"]),
            "bandwidth": lambda row: bytes_cell(row["bytes_per_s"], "/s"),
        },
    )


def _waits(measured: Measurements) -> Iterator[ReportTable]:
    step_s, waits, last = measured.step_s, measured.skew_s, measured.waiting.last_frac
    yield table_of(
        "waiting",
        "Waiting per rank and step, by group",
        measured.waiting.roles,
        {
            "group": lambda role: role.role,
            "for the transfer": lambda role: time_cell(role.transfer_s),
            "for later ranks": lambda role: time_cell(role.wait_s),
            "of the measured step": lambda role: frac_cell(
                (role.transfer_s + role.wait_s) / step_s
            ),
        },
    )
    yield table_of(
        "skew",
        "Waiting for later ranks, per step",
        sorted(sorted(waits, key=lambda rank: -waits[rank])[:NUM_RANKS]),
        {
            "rank": whole_cell,
            "waits": lambda rank: time_cell(waits[rank]),
            "arrives last": lambda rank: frac_cell(last.get(rank)),
        },
    )


def _stragglers(waiting: WaitingReport) -> Iterator[ReportTable]:
    step_s = waiting.step_s
    yield table_of(
        "slow_ranks",
        "Waiting: stragglers, which hold up the others",
        waiting.slow.slow,
        {
            "ranks": lambda late: ", ".join(map(str, late.ranks)),
            "stage": lambda late: whole_cell(late.stage) if late.stage >= 0 else "",
            "group": lambda late: late.role,
            "kind": lambda late: late.kind.value,
            "slower than its peers": lambda late: time_cell(late.excess_s),
            "costs": lambda late: time_cell(late.cost_s),
            "90 %": lambda late: span_cell(late.low_s, late.high_s),
            "of the measured step": lambda late: frac_cell(late.cost_s / step_s),
        },
    )

    def where_reached(text: Callable[[Clock], str], otherwise: str = "") -> Callable[[Clock], str]:
        return lambda clock: text(clock) if clock.is_reached else otherwise

    yield table_of(
        "clocks",
        "Waiting: how far clocks are ahead of the first rank's",
        waiting.clocks,
        {
            "rank": lambda clock: whole_cell(clock.rank),
            "ahead": where_reached(
                lambda clock: Cell(f"{clock.offset_s:.6f} s", {" (s)": clock.offset_s}), "not known"
            ),
            "give or take": where_reached(lambda c: time_cell((c.high_s - c.low_s) / 2)),
            "drift": where_reached(
                lambda c: Cell(f"{c.drift_frac * PPM:+.1f} ppm", {" (frac)": c.drift_frac})
            ),
        },
    )


def _notes(answer: Answer, modelled: Modelled) -> Iterator[str]:
    """Yield notes on the tables, one sentence each."""
    if reason := answer.measured.waiting.slow.reason:
        yield f"Stragglers: {reason}."
    if modelled.config.unmodelled:
        yield "Left out by the model: " + ", ".join(modelled.config.unmodelled) + "."
    first_frac = modelled.first_error_frac
    last_frac = modelled.step.error_frac(answer.measured.step_s)
    if first_frac is not None and first_frac != last_frac:
        yield (
            f"{MODEL_ERROR}{format_frac(abs(first_frac))} of the step after the first window, "
            f"{format_frac(abs(last_frac))} after the newest."
        )
    yield from measurement_hints(modelled.plan)
    if modelled.config.device == "cpu":
        yield "Measured on a CPU stand-in: for correctness and dry runs, not for speed."


def _signed(frac: float | None) -> Cell:
    return frac_cell(frac, signed=True)


NUM_LAYOUTS = 10
"""Rows that fit a page; ``--top`` shows more."""
_BAR = 32
"""Length of the bar of efficiency 1, in characters, so that a line fits in 80 columns."""
_MOST_CAUSES = 3
_WORTH_SAYING_FRAC = 0.01
"""Smallest increase that is named, as a fraction of the GPU time per token."""
TOO_FAR = "too far to trust"


TOKENS, FLOP, MFU = "tokens/s", "TFLOP/s per GPU", "MFU"
GPU_HOURS, FINISH, COST = "GPU-hours left", "finish (UTC)", "cost"
SPARE = (FLOP, FINISH, GPU_HOURS, MFU)
"""Columns to drop on a narrow screen, in order of dropping."""
_Cells = dict[str, Callable[[Candidate], str]]
STEP_CELLS: _Cells = {
    "step": lambda row: time_cell(row.step_time_s),
    "90 %": lambda row: span_cell(row.low_s, row.high_s),
}
AGAINST_CELLS: _Cells = {
    "against running": lambda row: Cell(
        row.against_text, {" (frac)": row.time_frac if row.is_comparable else None}
    )
}
FITS_CELLS: _Cells = {
    "memory": lambda row: bytes_cell(row.memory.total_nbytes),
    "fits": lambda row: row.verdict.value,
}


def layouts_table(
    plan: Plan,
    top: int = NUM_LAYOUTS,
    *,
    title: str = "Layouts",
    running_label: str = "running",
    remaining_run: RemainingRun | None = None,
) -> ReportTable:
    """Return the table of the running layout, the fastest others, and the offered one.  A narrow
    screen retains layout, step, interval and memory, and the verdict if memory is tight in any row.
    With ``remaining_run`` each row has the cost of the remainder of the run."""
    shown = {place: row for place, row in plan.rows.items() if place <= top or row is plan.best}
    rows = tuple(shown.values())
    is_memory_short = any(row.verdict in (Verdict.TIGHT, Verdict.DOES_NOT_FIT) for row in rows)
    numbers = {id(row): whole_cell(number) for number, row in shown.items()}
    return table_of(
        "layouts",
        title,
        rows,
        {
            "#": lambda row: numbers[id(row)],
            "layout": lambda row: row.label + f" ({running_label})" * (row is plan.running),
            **STEP_CELLS,
            **(AGAINST_CELLS if plan.running.is_comparable else {}),
            **throughput_cells(rows, remaining_run),
            **FITS_CELLS,
            "rests on": lambda row: _provenance(row.source_frac),
        },
    ).with_spare_columns(
        *(
            "rests on",
            *SPARE,
            *(() if is_memory_short else ("fits",)),
            TOKENS,
            COST,
            "against running",
        ),
        late=("memory", "90 %", "fits"),
        folded="layout",
    )


_HOST_WAIT_FRAC = 0.1
"""Share of waiting for the host from which a layout is named."""


def plan_notes(plan: Plan) -> list[str]:
    """Return notes on a plan, one sentence each: layouts that the program does not support, routing
    assumptions for experts, layouts to try next, and the progress of the search."""
    notes = []
    reason = exclusion_reason(plan.running.config)
    if number := sum(tried.cut.get(reason, 0) for tried in plan.tried.values() if reason):
        notes.append(f"{number:,} layout{'s' * (number != 1)} excluded: {reason}")
    routed = {one.config.parallelism.ep: one.routing for one in plan.rows.values()}
    texts = [
        f"ep {ep} {one.text.removeprefix('routing ')}"
        for ep, one in sorted(routed.items(), key=lambda pair: pair[0])
        if one is not None and ep > 1
    ]
    if texts:
        notes.append("routing: " + "; ".join(texts))
    searched = [
        f"{tried.text} on {number} GPUs" if len(plan.tried) > 1 else tried.text
        for number, tried in plan.tried.items()
    ]
    if rows := [str(row) for row, one in enumerate(plan.candidates, 1) if one.conversion]:
        notes.append(f"rows {', '.join(rows)} cannot load the run's checkpoints; --show N says why")
    notes += [*_host_notes(plan), *measurement_hints(plan)]
    return [*notes, f"searched: {'; '.join(searched)}"] if searched else notes


def _host_notes(plan: Plan) -> Iterator[str]:
    """Yield which layouts would wait for their host, by the rows of the table, and which may."""
    shown = {row: one for row, one in plan.rows.items() if row <= NUM_LAYOUTS or one is plan.best}
    sure = {row: one for row, one in shown.items() if one.host_wait_frac >= _HOST_WAIT_FRAC}
    open_ = {
        row: one
        for row, one in shown.items()
        if row not in sure and one.host_wait_high_frac >= _HOST_WAIT_FRAC
    }
    if sure:
        texts = (f"row {row} in {100 * one.host_wait_frac:.0f} %" for row, one in sure.items())
        yield (
            f"would wait for the host: {', '.join(texts)} of the step; a larger micro-batch or "
            "CUDA graphs help"
        )
    if open_:
        most = max(one.host_wait_high_frac for one in open_.values())
        yield (
            f"may wait for the host in up to {100 * most:.0f} % of the step, whose launches were "
            f"not all seen: {'row' if len(open_) == 1 else 'rows'} {', '.join(map(str, open_))}"
        )


def measurement_hints(plan: Plan) -> list[str]:
    """Return which layouts to measure to determine the fastest; empty if none."""
    labels = ", ".join(candidate.label for candidate in plan.worth_measuring)
    return [f"to find out which is fastest, measure steps of {labels}"] if labels else []


def _provenance(shares: Mapping[Source, float]) -> str:
    items = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{frac * 100:.0f} % {src.value}" for src, frac in items if frac >= 0.005)


def throughput_cells(rows: Sequence[Candidate], remaining_run: RemainingRun | None) -> _Cells:
    """Return columns of a layout table: tokens/s, TFLOP/s and MFU if the device is known, and with
    ``remaining_run`` the remainder of the run."""
    cells: _Cells = {TOKENS: lambda row: count_cell(row.throughput.tokens_per_s)}
    if any(row.throughput.mfu_frac is not None for row in rows):
        cells[FLOP] = lambda row: count_cell(row.throughput.flop_per_s_per_gpu / TERA)
        cells[MFU] = lambda row: frac_cell(row.throughput.mfu_frac)
    if remaining_run is None:
        return cells

    def rest(row: Candidate) -> RemainingRun:
        return remaining_run.in_layout(row.config, row.step_time_s)

    if remaining_run.config.device != "cpu" or remaining_run.price_per_gpu_hour is not None:
        cells[GPU_HOURS] = lambda row: count_cell(rest(row).gpu_hours, ",.4g")
    cells[FINISH] = lambda row: _moment(rest(row).finish_unix_s)
    if remaining_run.price_per_gpu_hour is not None:
        cells[COST] = lambda row: count_cell(rest(row).cost or 0.0, ",.2f")
    return cells


def rest_json(row: Candidate, remaining_run: RemainingRun | None) -> dict[str, Any] | None:
    """Return the remainder of the run in a layout, for JSON; None if unknown."""
    return (
        None
        if remaining_run is None
        else remaining_run.in_layout(row.config, row.step_time_s).to_json()
    )


def _moment(unix_s: float | None) -> str:
    if unix_s is None:
        return ""
    try:
        return datetime.fromtimestamp(unix_s, tz=timezone.utc).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return "beyond any calendar"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestLayout:
    """Fastest layout that fits on a number of GPUs of a device, and its cost per token."""

    device: str
    num_ranks: int
    candidate: Candidate | None
    """None if none fits."""
    price_per_gpu_hour: float | None
    point: ScalePoint | None = None
    """Point on the device's scaling curve, if there are several numbers of GPUs."""
    whole_run: WholeRun | None = None
    """Whole run to the requested number of tokens."""

    @property
    def gpu_hours_per_giga_token(self) -> float | None:
        """GPU-hours per 1e9 tokens; None if no layout fits."""
        candidate = self.candidate
        return None if candidate is None else candidate.throughput.gpu_hours_per_giga_token

    @property
    def cost_per_giga_token(self) -> float | None:
        """Cost per 1e9 tokens: GPU-hours times price; None without a price."""
        hours, price = self.gpu_hours_per_giga_token, self.price_per_gpu_hour
        return None if hours is None or price is None else hours * price

    def order(self, *, is_cost: bool) -> float:
        """Return the sort key of ``--objective``: cost, or hours without a price; else s/token."""
        if self.candidate is None:
            return math.inf
        if is_cost:
            return self.cost_per_giga_token or self.gpu_hours_per_giga_token or math.inf
        return 1.0 / self.candidate.throughput.tokens_per_s


def plans_table(rows: Sequence[BestLayout]) -> ReportTable:
    """Return the table of the best layout of each plan, in order of devices and GPUs."""

    def fitting(read: Callable[[Candidate], str]) -> Callable[[BestLayout], str]:
        return lambda row: read(row.candidate) if row.candidate else ""

    has_price = any(row.price_per_gpu_hour is not None for row in rows)
    cells: dict[str, Callable[[BestLayout], str]] = {
        "GPUs": lambda row: str(row.num_ranks),
        "best layout": lambda row: row.candidate.label if row.candidate else "none fits",
        **{name: fitting(read) for name, read in STEP_CELLS.items()},
        TOKENS: fitting(lambda one: count_cell(one.throughput.tokens_per_s)),
        "efficiency": lambda row: format_frac(row.point.efficiency.median) if row.point else "",
    }
    is_whole = any(row.whole_run is not None for row in rows)
    cells |= _whole_run_cells() if is_whole else _giga_token_cells()
    if not has_price:
        cells = {name: read for name, read in cells.items() if not name.startswith(COST)}
    if len({row.num_ranks for row in rows}) == 1:
        del cells["efficiency"]
    if not all(row.point.is_trusted for row in rows if row.point):
        cells["trust"] = lambda row: TOO_FAR if row.point and not row.point.is_trusted else ""
    if len({row.device for row in rows}) > 1:
        cells = {"device": lambda row: row.device, **cells}
    table = table_of("plans", "The best on each number of GPUs", rows, cells)
    return table.with_spare_columns(
        *("GPU-h for 1e9 tokens", "cost of 1e9 tokens", "GPU-hours", COST),
        late=("90 %", "efficiency", "trust", TOKENS),
        folded="best layout",
    )


def _whole_run_cells() -> dict[str, Callable[[BestLayout], str]]:
    def whole(read: Callable[[WholeRun], str]) -> Callable[[BestLayout], str]:
        return lambda row: read(row.whole_run) if row.whole_run else ""

    return {
        "time": whole(lambda run: run.days.partition(" (")[0]),
        "GPU-hours": whole(lambda run: format_count(run.gpu_hours)),
        COST: whole(lambda run: "" if run.cost is None else format_count(run.cost)),
    }


def _giga_token_cells() -> dict[str, Callable[[BestLayout], str]]:
    def figure(read: Callable[[BestLayout], float | None]) -> Callable[[BestLayout], str]:
        return lambda row: "" if read(row) is None else f"{read(row):,.4g}"

    return {
        "GPU-h for 1e9 tokens": figure(lambda row: row.gpu_hours_per_giga_token),
        "cost of 1e9 tokens": figure(lambda row: row.cost_per_giga_token),
    }


def scaling_text(curves: Sequence[Scaling]) -> str:
    """Return efficiency bars and sentences, as ``plan`` prints them below the table of plans;
    curves may be of several devices, and have a single point each."""
    parts = ["\n".join(bars(curves))] if any(one.growths for one in curves) else []
    return "\n\n".join([*parts, "\n".join(scaling_lines(curves))])


def bars(curves: Sequence[Scaling]) -> Iterator[str]:
    """Yield efficiency relative to the smallest number of GPUs as bars, one per line."""
    most = max(point.efficiency.median for one in curves for point in one.points)
    for one in curves:
        yield f"efficiency, {one.device}" if len(curves) > 1 else "efficiency"
        knee = one.knee.num_ranks
        for point in one.points:
            frac = point.efficiency
            bar = "█" * max(1, round(_BAR * frac.median / max(1.0, most)))
            ends = f" ({_points(frac.low)} to {_points(frac.high)})"
            ends = ends if point is not one.points[0] else ""
            mark = " <- knee" if point.num_ranks == knee else ""
            yield f"{point.num_ranks:>9,} {bar} {_points(frac.median)} %{ends}{mark}"


def scaling_lines(curves: Sequence[Scaling]) -> Iterator[str]:
    """Yield knee, causes and limits of trust of each curve, and comparisons of devices."""
    for one in curves:
        head = f"{one.device}: " if len(curves) > 1 else ""
        if len(one.points) > 1:
            yield head + knee_line(one)
        yield from (head + growth_line(growth) for growth in one.growths if _causes(growth))
        far = [f"{point.num_ranks:,}" for point in one.points if not point.is_trusted]
        if far:
            yield (
                f"{head}{TOO_FAR}: {', '.join(far)} GPUs, where the 90 % interval of the step "
                f"spans more than a factor of {TRUSTED_FACTOR:g}"
            )
        if one.without:
            counts = ", ".join(f"{num:,}" for num in one.without)
            yield f"{head}no layout fits on {counts} GPUs"
    for other in curves[1:]:
        yield from _device_comparison(curves[0], other)


def knee_line(scaling: Scaling) -> str:
    """Return the line on the knee, with the interval of its number of GPUs."""
    knee, last = scaling.knee, scaling.points[-1].num_ranks
    if knee.num_ranks is None:
        maybe = f"; it may be at {knee.low_num_ranks:,}" if knee.low_num_ranks else ""
        return (
            f"no knee up to {last:,} GPUs: each doubling of GPUs gives more than 1.41 times the "
            f"tokens/s{maybe}"
        )
    low, high = knee.low_num_ranks or knee.num_ranks, knee.high_num_ranks
    ends = f"90 %: {low:,} to {high:,}" if high else f"90 %: {low:,} to beyond {last:,}"
    if low == high:
        ends = "with 90 % confidence"
    return (
        f"knee at {knee.num_ranks:,} GPUs ({ends}): beyond it, doubling the GPUs gives less than "
        "1.41 times the tokens/s"
    )


def growth_line(growth: Growth) -> str:
    """Return the gain of more GPUs, and the parts that increase the GPU time per token."""
    before, after = growth.before.num_ranks, growth.after.num_ranks
    text = f"{before:,} to {after:,} GPUs give {_times_tokens(growth.tokens)}"
    causes = _causes(growth)
    return f"{text}; each token costs more GPU time in {', '.join(causes)}" if causes else text


def _causes(growth: Growth) -> list[str]:
    """Return the largest increases, in percentage points of the previous GPU time per token."""
    sums: dict[str, float] = {}
    for part, frac in growth.parts_frac.items():
        sums[PART_TEXTS[part]] = sums.get(PART_TEXTS[part], 0.0) + frac
    grown = sorted((-frac, word) for word, frac in sums.items() if frac >= _WORTH_SAYING_FRAC)
    return [f"{word} (+{_points(-frac)} %)" for frac, word in grown[:_MOST_CAUSES]]


def _device_comparison(one: Scaling, other: Scaling) -> Iterator[str]:
    """Yield another device's tokens/s relative to the first's, on the smallest and largest common
    number of GPUs."""
    theirs = {point.num_ranks: point for point in other.points}
    both = [point for point in one.points if point.num_ranks in theirs]
    for point in both[:1] + both[1:][-1:]:
        factor = _times_tokens(theirs[point.num_ranks].tokens_per_s.ratio_to(point.tokens_per_s))
        yield f"{other.device} against {one.device} on {point.num_ranks:,} GPUs: {factor}"


def _times_tokens(factor: Estimate) -> str:
    return f"{factor.median:.2f} times the tokens/s (90 %: {factor.low:.2f} to {factor.high:.2f})"


def _points(frac: float) -> str:
    return f"{frac * 100:.0f}"
