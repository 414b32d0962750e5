"""Advice to restart, through the code path of live runs, on published layouts.

    python benchmarks/decisions.py DATA_DIR [--replays 6] [--only TEXT]

A replayed run trains in the layout of one published row; the other rows of its machine, model,
number of GPUs and global batch are the layouts it could change to.  Its steps are that row's time,
scaled by a stretch of a published series (MLPerf training logs).  At two windows the step model
behind ``forerun predict`` knows the steps of that window and no other row; ``compare`` derives the
ratios and their intervals, as for a plan, and ``decide`` the advice.  The measured rows are the
truth, used only for scoring.  All rows were run, so all fit in memory.

A stop loses if the chosen layout takes longer, cost included, than going on.  Regret is the time of
the action taken over that of an oracle, which knows all rows, in shares of the remaining time. The
baseline believes the plan and stops whenever its best layout seems to save more than it costs.
Replays of one row and cost, a cell, differ in their noise alone: the number of cells that stop
shows how much evidence a share rests on.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.published.readers import model_over, steps_of
from forerun.calib.advice.decision import Decision, decide
from forerun.calib.advice.planning import Candidate, Plan, compare
from forerun.calib.answers.measured_steps import fit_run_steps
from forerun.calib.forecast.forecast_record import Forecast
from forerun.calib.forecast.forecasts import DRIFT_FRAC, forecast, mean_estimate
from forerun.calib.records.iso_times import Action
from forerun.calib.records.step_rows import StepRow
from forerun.calib.search.results import MemoryBudget
from forerun.calib.steps.base_times import BaseTimes
from forerun.calib.steps.known_steps import KnownStep, same_layout
from forerun.calib.workload.run_options import Goals

SERIES = "e2e_mlperf_steps"
COSTS = (0.015, 0.06, 0.12)
"""Costs of a restart, in shares of the remaining time at the second window."""
NUM_STEPS = 2000
WINDOWS = ((3, 23), (500, 510))
"""First step and end of each window, with default options."""
MOST_LOSING_FRAC = 0.05
PLANTED_REGRET_FRAC = 0.0106
"""Regret over 5,400 replays with planted ratios and errors, 2026-11-22."""
_ALL_FIT_NBYTES = 2**60

SETS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "SimuMax": ("e2e_simumax_b200_8gpu", ("ops_simumax_gemm_attention",)),
    "vTrain multi node": ("e2e_vtrain_multi_node", ()),
    "tables of papers": ("e2e_small_tables", ()),
    "Sailor": ("e2e_sailor", ("ops_sailor_layer_profiles",)),
    "Megatron-Bridge": ("e2e_megatron_bridge", ()),
}
"""Table of steps of each set, and the tables of operators that its model is built on."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A row that trains, and the rows that it could change to."""

    running: StepRow
    others: tuple[StepRow, ...]
    base: BaseTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One replay.  Shares are of the time remaining at the second window."""

    row_id: str
    cost_frac: float
    best_gain_frac: float
    """Gain of the oracle; 0 if no layout gains."""
    is_stop: bool
    gain_frac: float
    """Gain of the action taken; negative if a stop loses."""
    simple_is_stop: bool
    simple_gain_frac: float


def series_of(path: Path) -> list[Floats]:
    """Return step times of each published run over their median, without its first two values."""
    table = pd.read_csv(path)
    keys = ["round", "submitter", "system", "benchmark", "result"]
    step_times_s = [rows["train_step_time_s"].to_numpy()[2:] for _, rows in table.groupby(keys)]
    return [times / np.median(times) for times in step_times_s if len(times) >= 50]


def runs_of(title: str, data: Path) -> Iterator[Run]:
    """Yield every row of a set that has another layout of the same work: groups of fine-tuning
    contain several sequence lengths."""
    table, operators = SETS[title]
    rows = steps_of(data, table).usable
    model = model_over(data, operators)
    for running in rows:
        others = tuple(
            row
            for row in rows
            if (row.machine, row.group) == (running.machine, running.group)
            and row.config.does_work_of(running.config)
            and same_layout(row.config) != same_layout(running.config)
        )
        if others:
            yield Run(running=running, others=others, base=model.base(running))


def replay(run: Run, relative: Floats) -> list[Outcome]:
    """Replay one run with steps ``relative`` times its row's; return the advice at each cost."""
    times_s = run.running.measured_s * relative
    seen = [(_forecast(times_s, end), plan_of(run, times_s[begin:end])) for begin, end in WINDOWS]
    remaining_s = float(times_s[WINDOWS[-1][1] :].sum())
    return [_outcome(run, cost_frac, cost_frac * remaining_s, seen) for cost_frac in COSTS]


def plan_of(run: Run, window_s: Floats) -> Plan:
    """Return the plan as known once the window has been measured."""
    level = mean_estimate(window_s)
    known = KnownStep(
        config=run.running.config,
        time_s=float(np.median(window_s)),
        sigma_log=float(np.hypot(level.standard_error / level.mean, DRIFT_FRAC)),
    )
    running, *others = compare(
        run.running.config,
        [run.running.config, *(row.config for row in run.others)],
        fit_run_steps(run.base, [known], run.running.config),
        budget=MemoryBudget(capacity_nbytes=_ALL_FIT_NBYTES, offset_nbytes=0),
    )
    return Plan(
        running=running,
        measured_step_time_s=known.time_s,
        memory_capacity_nbytes=_ALL_FIT_NBYTES,
        candidates=tuple(sorted(others, key=lambda c: (c.step_time_s, c.label))),
    )


def _forecast(times_s: Floats, done: int) -> Forecast:
    return forecast(
        now_unix_s=0.0,
        steps_done=done,
        steps_total=NUM_STEPS,
        elapsed_s=float(times_s[:done].sum()),
        step_times_s=times_s[:done],
        drift_frac=DRIFT_FRAC,
    )


def _outcome(
    run: Run, cost_frac: float, cost_s: float, seen: Sequence[tuple[Forecast, Plan]]
) -> Outcome:
    decision: Decision | None = None
    for known, plan in seen:
        decision = decide(
            Goals(restart_cost_s=cost_s),
            forecast=known,
            plan=plan,
            coverage_frac=1.0,
            previously_met=decision.rules_met if decision else frozenset(),
        )
    assert decision is not None
    plan = seen[-1][1]

    def gain(candidate: Candidate | None) -> float:
        if candidate is None:
            return 0.0
        # Rows of one layout differ by factors outside the layout; the expected time is their mean.
        same = [row.measured_s for row in run.others if row.config == candidate.config]
        return 1.0 - float(np.mean(same)) / run.running.measured_s - cost_frac

    is_stop = decision.action is Action.STOP
    simple = plan.best
    simple_is_stop = simple is not None and -simple.time_frac > cost_frac
    return Outcome(
        row_id=run.running.row_id,
        cost_frac=cost_frac,
        best_gain_frac=max(0.0, *(gain(candidate) for candidate in plan.candidates)),
        is_stop=is_stop,
        gain_frac=gain(decision.candidate) if is_stop else 0.0,
        simple_is_stop=simple_is_stop,
        simple_gain_frac=gain(simple) if simple_is_stop else 0.0,
    )


def summary(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return counts and shares over replays; ``*_frac`` are mean shares of the remaining time."""
    stops = [o for o in outcomes if o.is_stop]
    simple = [o for o in outcomes if o.simple_is_stop]
    worth = [o for o in outcomes if o.best_gain_frac > 0]
    missed = [o for o in worth if not o.is_stop]
    return {
        "num_rows": len({o.row_id for o in outcomes}),
        "num_replays": len(outcomes),
        "num_stops": len(stops),
        "num_stop_cells": len({(o.row_id, o.cost_frac) for o in stops}),
        "num_losing_cells": len({(o.row_id, o.cost_frac) for o in stops if o.gain_frac < 0}),
        "losing_of_stops_frac": _mean([o.gain_frac < 0 for o in stops]),
        "num_worthwhile": len(worth),
        "missed_of_worthwhile_frac": _mean([not o.is_stop for o in worth]),
        "missed_gain_frac": _mean([o.best_gain_frac for o in missed]),
        "regret_frac": _mean([o.best_gain_frac - o.gain_frac for o in outcomes]),
        "never_regret_frac": _mean([o.best_gain_frac for o in outcomes]),
        "simple_regret_frac": _mean([o.best_gain_frac - o.simple_gain_frac for o in outcomes]),
        "simple_losing_of_stops_frac": _mean([o.simple_gain_frac < 0 for o in simple]),
    }


def _mean(values: Sequence[float | bool]) -> float:
    return float(np.mean(values)) if values else 0.0


def _stretch(series: Sequence[Floats], random: np.random.Generator) -> Floats:
    values = series[int(random.integers(len(series)))]
    start = int(random.integers(len(values)))
    return np.resize(np.roll(values, -start), NUM_STEPS)


def _table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    head = ["set", "rows", "replays", "stops", "of these lose (cells)", "worthwhile"]
    head += ["of these missed", "gain missed", "regret", "never stopping", "believing the plan"]
    head += ["believer's stops that lose"]
    rows = [
        [
            title,
            *(f"{one[name]:.0f}" for name in ("num_rows", "num_replays", "num_stops")),
            f"{one['losing_of_stops_frac']:.1%} ({one['num_losing_cells']:.0f} of "
            f"{one['num_stop_cells']:.0f})",
            f"{one['num_worthwhile']:.0f}",
            f"{one['missed_of_worthwhile_frac']:.0%}",
            f"{one['missed_gain_frac']:.1%}",
            *(f"{one[f'{name}regret_frac']:.2%}" for name in ("", "never_", "simple_")),
            f"{one['simple_losing_of_stops_frac']:.0%}",
        ]
        for title, one in summaries.items()
    ]
    return markdown_table(head, rows)


def main() -> None:
    """Print a line for each set and one for all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, metavar="DATA_DIR", help="public tables, CSV")
    parser.add_argument("--replays", type=int, default=6, help="of each row (6)")
    parser.add_argument("--only", default="", metavar="TEXT", help="sets whose title has this text")
    args = parser.parse_args()
    series = series_of(next(args.data.glob(f"{SERIES}.*")))
    outcomes: dict[str, list[Outcome]] = {}
    with threadpool_limits(1):
        for title in SETS:
            if args.only.lower() not in title.lower():
                continue
            random = np.random.default_rng(zlib.crc32(title.encode()))
            outcomes[title] = [
                outcome
                for run in runs_of(title, args.data)
                for _ in range(args.replays)
                for outcome in replay(run, _stretch(series, random))
            ]
    summaries = {title: summary(members) for title, members in outcomes.items() if members}
    summaries["all"] = summary([o for members in outcomes.values() for o in members])
    print(_table(summaries))
    losing, regret = summaries["all"]["losing_of_stops_frac"], summaries["all"]["regret_frac"]
    print(
        f"\nStops that lose: {losing:.1%} (bar {MOST_LOSING_FRAC:.0%}: "
        f"{'met' if losing <= MOST_LOSING_FRAC else 'not met'}); regret {regret:.2%} of the time "
        f"left, with planted ratios {PLANTED_REGRET_FRAC:.2%}"
    )


if __name__ == "__main__":
    main()
