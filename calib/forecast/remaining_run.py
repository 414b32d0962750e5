"""Forecast of a run: remaining steps of each batch size, and work between them.

``ModelForecast`` is computed once per window.  A forecast from it and the progress so far needs no
fit, so it can be repeated at any time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..regressors.estimate import Estimate
from ..units import HOUR_S
from ..workload.config import RunConfig
from ..workload.run_options import Goals
from ._remaining_time import Failures, learned_mtbf_s
from .batch_ratios import BatchRatio, measured_ratios
from .forecast_record import Forecast, ForecastPart
from .forecasts import (
    CPU_DRIFT_FRAC,
    DRIFT_FRAC,
    forecast,
    learned_drift_frac,
)
from .modelled import SAVE_BYTES_PER_S, ModelForecast, batch_levels
from .remaining_schedule import BatchLevel, RemainingSchedule, remaining_schedule, step_groups

FEW_SIGMA_LOG = 0.15
"""Error (log) of the next evaluations or saves as predicted by a single measured one."""
GPU_HOURS_PER_FAILURE = 50_700.0
"""419 unexpected interruptions in 54 days on 16,384 GPUs (Llama 3, 2024, section 3.3.4)."""
# With 3 % noise the mean of 8 steps has an error of 1 %, that of a ratio between sizes.
_FEW_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Progress and measurements of a run so far."""

    now_unix_s: float
    """Time of the end of the last step."""
    last_step: int = 0
    """Number of steps since the first iteration of the whole run, even if it was resumed."""
    step_times_s: tuple[float, ...] = ()
    """All unflagged bare steps so far, oldest first; if empty, those of the table are used."""
    step_numbers: tuple[int, ...] = ()
    """Iterations (from 1) of ``step_times_s``; if empty, all have the config's batch size."""
    irregular_times_s: tuple[float, ...] = ()
    """Times of steps with garbage collection, or after an evaluation or a save."""
    num_regular: int = 0
    """Number of other steps since the first of ``irregular_times_s``."""
    level_since_step: int = 0
    """Step (from 0) of the last drift; earlier ones inform the drift estimate but not the level."""
    eval_times_s: tuple[float, ...] = ()
    save_times_s: tuple[float, ...] = ()
    answer_times_s: tuple[float, ...] = ()
    """Time that each answer so far has added to the steps beside it, seconds: the companion shares
    training's processors."""
    answers_every: int = 0
    """Steps from one answer to the next; 0 if no more are due."""
    goals: Goals = field(default_factory=Goals)
    num_restarts: int = 0
    energy_used_j: float | None = None
    mean_power_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Measurements that stay constant during a run."""

    started_unix_s: float
    num_ranks: int
    is_cpu: bool
    recorded_s: tuple[float, ...] = field(repr=False, default=())
    """Bare steps of the windows, oldest first; used if fewer were reported live."""


def run_forecast(model_forecast: ModelForecast, so_far: RunProgress) -> Forecast:
    """Return the forecast at this moment; deterministic, takes a few milliseconds."""
    config, cadence = model_forecast.config, model_forecast.config.cadence
    done = so_far.last_step
    total = max(_last_step(config, done), done)
    levels = batch_levels(config)
    is_saving = cadence.is_saving or cadence.save_interval > 0
    schedule = remaining_schedule(
        cadence, levels, steps_done=done, steps_total=total, is_saving=is_saving
    )
    schedule = _with_due(schedule, config, done, total)
    seen = _by_size(model_forecast, so_far, levels, since=so_far.level_since_step + 1)
    reference = next(reversed(seen), config.batch.global_batch_size)
    ratios = measured_ratios(seen, reference, model_forecast.ratios)
    times = _series(seen, reference, ratios)
    estimate = _at(model_forecast, reference)
    mean_s = float(np.mean(times)) if times else estimate.median
    loads, words = _loads(schedule, reference, ratios)
    return _forecast(
        MeasuredRun(
            started_unix_s=model_forecast.started_unix_s,
            num_ranks=config.parallelism.num_ranks,
            is_cpu=config.device == "cpu",
        ),
        so_far,
        total,
        times=times,
        history=_series(_by_size(model_forecast, so_far, levels), reference, ratios),
        work=_modelled_work(model_forecast, so_far, schedule, mean_s / estimate.median),
        save_every_s=(cadence.save_interval or schedule.num_steps) * mean_s,
        provenance=words,
        estimate=estimate,
        loads=loads,
    )


def _modelled_work(
    model_forecast: ModelForecast, so_far: RunProgress, schedule: RemainingSchedule, slowdown: float
) -> Iterator[ForecastPart]:
    """Yield evaluations and saves; hosts and kernels that are slower than modelled by ``slowdown``
    are slower in evaluations, too."""
    evaluation = model_forecast.evaluation
    yield _seen_work(
        "evaluations",
        schedule.num_evals,
        so_far.eval_times_s,
        replace(evaluation, median=evaluation.median * slowdown),
        provenance="modelled: forward share of the step",
    )
    yield _seen_work(
        "saves",
        schedule.num_saves,
        so_far.save_times_s,
        model_forecast.save,
        provenance=f"prior: {SAVE_BYTES_PER_S / 1e9:g} GB/s per rank",
    )


def measured_forecast(
    run: MeasuredRun,
    so_far: RunProgress,
    *,
    steps_total: int,
    eval_interval: int = 0,
    save_interval: int = 0,
) -> Forecast:
    """Return the forecast at this moment to step ``steps_total``.

    Evaluations and saves come at these intervals, where 0 stands for their frequency so far; none
    are expected if there were none.  Raises ``CalibrationError`` for fewer than two measured steps.
    """
    done = so_far.last_step
    total = max(steps_total, done)
    times = max(so_far.step_times_s, run.recorded_s, key=len)
    mean_s = float(np.mean(times)) if times else 0.0
    saves_s = so_far.save_times_s
    save_every_s = mean_s * done / len(saves_s) if saves_s else 0.0
    kinds = (
        ("evaluations", so_far.eval_times_s, eval_interval),
        ("saves", saves_s, save_interval),
    )
    return _forecast(
        run,
        so_far,
        total,
        times=times,
        history=times,
        work=[
            _seen_work(name, _num_due(len(seen_s), interval, done, total), seen_s)
            for name, seen_s, interval in kinds
        ],
        save_every_s=save_every_s or mean_s * (total - done),
    )


def _num_due(num_seen: int, interval: int, done: int, total: int) -> int:
    """Return how often work between steps will come: at its interval, else as often as so far."""
    if not (interval and num_seen):
        return round(num_seen * (total - done) / max(1, done))
    # One is due after the last step if its time has come.
    return total // interval - (done // interval - (done % interval == 0))


def _forecast(
    run: MeasuredRun,
    so_far: RunProgress,
    total: int,
    *,
    times: Sequence[float],
    history: Sequence[float],
    work: Iterable[ForecastPart],
    save_every_s: float,
    provenance: str = "measured",
    estimate: Estimate | None = None,
    loads: Sequence[tuple[int, Estimate]] = (),
) -> Forecast:
    """Return the forecast to step ``total`` with breakdown, GPU-hours, cost and energy.

    ``times`` are steps of the present level, ``history`` also earlier ones; ``work`` is due between
    steps, beside irregular steps and answers; the others are as for ``forecast``.
    """
    num_steps = total - so_far.last_step
    extras = [one for one in (*work, *_further_work(so_far, times, num_steps)) if one.num_left]
    ahead = forecast(
        now_unix_s=so_far.now_unix_s,
        steps_done=so_far.last_step,
        steps_total=total,
        elapsed_s=max(0.0, so_far.now_unix_s - run.started_unix_s),
        step_times_s=times,
        estimate=estimate,
        extras=extras,
        loads=loads,
        failures=_expected_failures(run, so_far, save_every_s),
        drift_frac=learned_drift_frac(
            history, prior_frac=CPU_DRIFT_FRAC if run.is_cpu else DRIFT_FRAC
        ),
    )
    hours, price = ahead.total_s / HOUR_S * run.num_ranks, so_far.goals.price_per_gpu_hour
    energy_j = so_far.energy_used_j
    if energy_j is not None and so_far.mean_power_w is not None:
        energy_j += so_far.mean_power_w * ahead.remaining_s
    words = provenance if ahead.is_measured else "modelled"
    return replace(
        ahead,
        breakdown=tuple(_parts(ahead, so_far, extras, words)),
        gpu_hours=None if run.is_cpu and price is None else hours,
        cost=None if price is None else price * hours,
        energy_j=energy_j,
    )


def _with_due(
    schedule: RemainingSchedule, config: RunConfig, done: int, total: int
) -> RemainingSchedule:
    """Return the schedule with an evaluation or save that is due after the last step added."""
    cadence = config.cadence
    if not 0 < done < total:
        return schedule
    is_eval = cadence.eval_iters and cadence.eval_interval and not done % cadence.eval_interval
    is_save = cadence.save_interval and not done % cadence.save_interval
    return replace(
        schedule,
        num_evals=schedule.num_evals + bool(is_eval),
        num_saves=schedule.num_saves + bool(is_save),
    )


def _last_step(config: RunConfig, done: int) -> int:
    """Return the last step of this process: end of training, or an earlier ``--exit-interval``."""
    cadence = config.cadence
    if cadence.exit_interval <= 0:
        return cadence.train_iters
    next_exit = (done // cadence.exit_interval + 1) * cadence.exit_interval
    return min(cadence.train_iters, next_exit)


def _at(model_forecast: ModelForecast, size: int) -> Estimate:
    """Return the modelled step at another batch size."""
    ratio = model_forecast.ratios.get(size)
    estimate = model_forecast.running_estimate
    if ratio is None or size == model_forecast.config.batch.global_batch_size:
        return estimate
    sigma = math.hypot(estimate.sigma_log, ratio.sigma_log)
    return Estimate(median=estimate.median * ratio.median, unshared_sigma_log=sigma)


def _by_size(
    model_forecast: ModelForecast,
    so_far: RunProgress,
    levels: Sequence[BatchLevel],
    *,
    since: int = 0,
) -> dict[int, list[float]]:
    """Return bare steps from iteration ``since`` by global batch size, the newest size last."""
    batch_size = model_forecast.config.batch.global_batch_size
    times, numbers = so_far.step_times_s, so_far.step_numbers
    if len(times) < len(model_forecast.recorded_s):
        times, numbers = model_forecast.recorded_s, model_forecast.recorded_numbers
    if not numbers:
        return {batch_size: list(times)} if times else {}
    seen: dict[int, list[float]] = {}
    groups = step_groups(max(numbers), levels)
    ends = np.asarray([group.end for group in groups])
    places = np.searchsorted(ends, np.asarray(numbers) - 1, side="right")
    for place, number, time_s in zip(places.tolist(), numbers, times, strict=True):
        if number >= since:
            seen.setdefault(groups[place].global_batch_size, []).append(time_s)
    return seen


def _series(
    seen: Mapping[int, list[float]], reference: int, ratios: Mapping[int, BatchRatio]
) -> tuple[float, ...]:
    """Return steps at the reference size; if few, those of all sizes scaled to it."""
    if len(seen.get(reference, ())) >= _FEW_STEPS or len(seen) < 2:
        return tuple(seen.get(reference, ()))
    return tuple(
        time_s / (ratios[size].median if size in ratios else 1.0)
        for size, times in seen.items()
        for time_s in times
    )


def _loads(
    schedule: RemainingSchedule, reference: int, ratios: Mapping[int, BatchRatio]
) -> tuple[list[tuple[int, Estimate]], str]:
    loads: list[tuple[int, Estimate]] = []
    words = ["measured"]
    for group in schedule.groups:
        ratio = BatchRatio(median=1.0, provenance="measured")
        if group.global_batch_size != reference:
            ratio = ratios.get(group.global_batch_size, ratio)
            words.append(f"batch {group.global_batch_size} {ratio.provenance}")
        loads.append((group.num_steps, ratio))
    return loads, ", ".join(dict.fromkeys(words))


def _further_work(
    so_far: RunProgress, times: Sequence[float], num_steps: int
) -> Iterator[ForecastPart]:
    """Yield the extra time of irregular steps, and what further answers will add to the steps
    beside them."""
    irregular, answers_s = so_far.irregular_times_s, so_far.answer_times_s
    if irregular and len(times):
        share = len(irregular) / (len(irregular) + so_far.num_regular)
        excess = np.asarray(irregular) - float(np.mean(times))
        mean_s = max(0.0, float(excess.mean()))
        scatter_s = float(excess.std())
        yield ForecastPart.repeated(
            "irregular steps",
            round(share * num_steps),
            mean_s,
            # A few may agree by chance, hence at least half of their mean.
            sigma_s=max(scatter_s, 0.5 * mean_s) / math.sqrt(len(irregular)),
            scatter_s=scatter_s,
        )
    if answers_s and so_far.answers_every:
        yield _seen_work("Forerun's answers", num_steps // so_far.answers_every, answers_s)


def _seen_work(
    name: str,
    num_left: int,
    seen: Sequence[float],
    prior: Estimate | None = None,
    *,
    provenance: str = "",
) -> ForecastPart:
    """Return work between steps as measured, else as modelled, if at all; few measurements have a
    minimum error."""
    if not seen:
        each_s, sigma_s = (prior.median, prior.median * prior.sigma_log) if prior else (0.0, 0.0)
        return ForecastPart.repeated(name, num_left, each_s, sigma_s=sigma_s, provenance=provenance)
    mean_s = float(np.mean(seen))
    scatter_s = float(np.std(seen, ddof=1)) if len(seen) > 1 else 0.0
    scatter_s = math.hypot(scatter_s, FEW_SIGMA_LOG * mean_s / math.sqrt(len(seen)))
    return ForecastPart.repeated(
        name,
        num_left,
        mean_s,
        sigma_s=scatter_s / math.sqrt(len(seen)),
        scatter_s=scatter_s,
        provenance=f"measured: {len(seen)}",
    )


def _expected_failures(
    run: MeasuredRun, so_far: RunProgress, save_every_s: float
) -> Failures | None:
    """Return failures at the stated rate, else the public one; None on a CPU without restarts."""
    if so_far.goals.mtbf_hours is None and run.is_cpu and not so_far.num_restarts:
        return None
    hours = so_far.goals.mtbf_hours or GPU_HOURS_PER_FAILURE / run.num_ranks
    run_s = max(0.0, so_far.now_unix_s - run.started_unix_s)
    return Failures(
        mtbf_s=learned_mtbf_s(so_far.num_restarts, run_s, prior_mtbf_s=hours * HOUR_S),
        restart_s=so_far.goals.restart_cost_s,
        save_every_s=save_every_s,
    )


def _parts(
    base_forecast: Forecast, so_far: RunProgress, extra_parts: Sequence[ForecastPart], words: str
) -> Iterator[ForecastPart]:
    # The first component of the mixture is without failures.
    whole_s = base_forecast.remaining_time.sigmas_s[0]
    rest_s = math.sqrt(max(0.0, whole_s**2 - sum(part.sigma_s**2 for part in extra_parts)))
    yield ForecastPart(
        name="steps",
        num_left=base_forecast.steps_left,
        time_s=base_forecast.steps_s,
        sigma_s=rest_s,
        provenance=words,
    )
    yield from extra_parts
    if len(base_forecast.remaining_time.means_s) > 1:
        mean_cost_s = (
            base_forecast.remaining_time.means_s[1] - base_forecast.remaining_time.means_s[0]
        )
        num_failures = base_forecast.failures_s / mean_cost_s
        prior = "given" if so_far.goals.mtbf_hours is not None else "prior: Llama 3, 2024"
        yield ForecastPart(
            name="failures",
            num_left=num_failures,
            time_s=base_forecast.failures_s,
            sigma_s=math.sqrt(num_failures) * mean_cost_s,
            provenance=f"{prior}, {so_far.num_restarts} restarts so far",
        )
