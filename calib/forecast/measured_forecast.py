"""The forecast of a run whose layout nobody knows: from its steps, and what came between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..samples.table import SampleTable
from .forecast import (
    CPU_DRIFT_FRAC,
    DRIFT_FRAC,
    Extra,
    Forecast,
    forecast,
    learned_drift_frac,
)
from .run_forecast import SoFar, expected_failures, irregular_extra, seen_extra, with_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """What does not change while a run goes on."""

    started_unix_s: float
    num_ranks: int
    is_cpu: bool
    recorded_s: tuple[float, ...] = field(repr=False, default=())
    """Bare steps of the windows, oldest first: they count where fewer were told live."""

    @staticmethod
    def of(table: SampleTable) -> MeasuredRun:
        """The newest run of a table."""
        runs = table.newest("runs")
        return MeasuredRun(
            started_unix_s=float(runs["started_unix_s"].min()),
            num_ranks=int(runs["world_size"].max()),
            is_cpu=str(runs["device"].iloc[0]) == "cpu",
            recorded_s=tuple(table.step_times_s(is_hooked=False).tolist()),
        )


def measured_forecast(run: MeasuredRun, so_far: SoFar, *, steps_total: int) -> Forecast:
    """The forecast at this moment, to the end of so many steps.

    Evaluations and saves go on as often as they have come so far; where none has come, none is
    expected.  Raises ``CalibrationError`` below two measured steps.
    """
    done = so_far.last_step
    total = max(steps_total, done)
    times = max(so_far.step_times_s, run.recorded_s, key=len)
    extras = [*_extras(so_far, times, num_left=total - done)]
    mean_s = float(np.mean(times)) if times else 0.0
    save_every_s = mean_s * done / len(so_far.save_times_s) if so_far.save_times_s else 0.0
    found = forecast(
        now_unix_s=so_far.now_unix_s,
        steps_done=done,
        steps_total=total,
        elapsed_s=max(0.0, so_far.now_unix_s - run.started_unix_s),
        step_times_s=times,
        extras=extras,
        failures=expected_failures(
            so_far,
            num_ranks=run.num_ranks,
            is_cpu=run.is_cpu,
            started_unix_s=run.started_unix_s,
            save_every_s=save_every_s or mean_s * (total - done),
        ),
        drift_frac=learned_drift_frac(
            times, prior_frac=CPU_DRIFT_FRAC if run.is_cpu else DRIFT_FRAC
        ),
    )
    return with_parts(found, so_far, extras, "measured", num_ranks=run.num_ranks, is_cpu=run.is_cpu)


def _extras(so_far: SoFar, times: Sequence[float], *, num_left: int) -> Iterator[Extra]:
    """What will come between steps, each kind as often as in the steps so far."""
    seen = {"evaluations": so_far.eval_times_s, "saves": so_far.save_times_s}
    for name, each_s in seen.items():
        count = round(len(each_s) * num_left / max(1, so_far.last_step))
        if count:
            yield seen_extra(name, count, each_s, 0.0, sigma_log=0.0, provenance="")
    if so_far.irregular_times_s and len(times) and num_left:
        yield irregular_extra(so_far, times, num_left)
