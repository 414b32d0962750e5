"""Model predictions for the rest of a run, once per window and independent of the clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..memory.peak import memory
from ..regressors.estimate import Estimate
from ..steps.estimate import StepEstimate
from ..steps.model import FittedSteps
from ..timeline.items import Part
from ..workload.config import RunConfig
from .batch_ratios import BatchRatio, model_ratios
from .remaining_schedule import BatchLevel, ramp_levels, schedule_levels, step_groups

SAVE_FIXED_S = 0.3
SAVE_BYTES_PER_S = 0.5e9
"""Write rate of a rank's share of a checkpoint, until a save has been measured."""
_EVAL_SIGMA_LOG = 0.2
_SAVE_SIGMA_LOG = 1.0
"""On unknown storage: from local disks to a busy file system."""
_PASSES = (
    Part.FORWARD,
    Part.BACKWARD,
    Part.RECOMPUTE,
    Part.TP,
    Part.CP,
    Part.EP,
    Part.PP,
    Part.BUBBLE,
    Part.HOST,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForecast:
    """Model predictions for the rest of a run, with its recorded steps."""

    config: RunConfig
    running_estimate: StepEstimate
    started_unix_s: float
    recorded_s: tuple[float, ...]
    """Times of bare steps of the windows."""
    recorded_numbers: tuple[int, ...] = ()
    """Their iterations, from 1."""
    ratios: Mapping[int, BatchRatio]
    """Ratios of step times to that at ``config.batch``, by global batch size."""
    evaluation: Estimate
    """Seconds of one evaluation of ``eval_iters`` passes."""
    save: Estimate
    """Seconds of one save."""

    def ratio(self, iteration: int, to: int) -> BatchRatio:
        """Return the step of an iteration (from 1) over that of ``to``; 1 without a ramp."""
        sizes = [batch_size_at(self.config, number) for number in (iteration, to)]
        if sizes[0] == sizes[1] or not self.ratios.keys() >= set(sizes):
            return BatchRatio(median=1.0)
        return self.ratios[sizes[0]].over(self.ratios[sizes[1]])


def batch_size_at(config: RunConfig, iteration: int) -> int:
    """Return the global batch size of an iteration (from 1); the config's if there is no ramp."""
    levels = batch_levels(config)
    groups = step_groups(iteration, levels) if len(levels) > 1 else ()
    return groups[-1].global_batch_size if groups else config.batch.global_batch_size


def at_batch_size(config: RunConfig, size: int) -> RunConfig:
    """Return the config with another global batch size."""
    if size == config.batch.global_batch_size:
        return config
    return replace(config, batch=replace(config.batch, global_batch_size=size))


def batch_levels(config: RunConfig) -> tuple[BatchLevel, ...]:
    """Return the global batch sizes of a run in order."""
    cadence, batch = config.cadence, config.batch
    if cadence.step_batch_size_schedule:
        return schedule_levels(cadence.step_batch_size_schedule, seq_length=config.model.seq_length)
    return ramp_levels(
        cadence.rampup_batch_size,
        full_batch_size(config) if cadence.rampup_batch_size else batch.global_batch_size,
        micro_batch_of_all=batch.micro_batch_size * config.parallelism.dp,
    )


def model_forecast(
    config: RunConfig,
    steps: FittedSteps,
    running_estimate: StepEstimate,
    *,
    started_unix_s: float,
    recorded_s: Sequence[float] = (),
    recorded_numbers: Sequence[int] = (),
) -> ModelForecast:
    """Return predictions of steps at other batch sizes, of an evaluation and of a save."""
    full = full_batch_size(config)
    sizes = {level.global_batch_size for level in batch_levels(config)} | {full}
    estimates, ratios = model_ratios(config, steps, running_estimate, sorted(sizes))
    largest = estimates[full]
    parts = largest.parts_s
    work = [parts.get(part, 0.0) for part in (Part.FORWARD, Part.BACKWARD, Part.RECOMPUTE)]
    # Default to a third, as the backward pass has two products for each of the forward pass.
    share = work[0] / sum(work) if sum(work) > 0 else 1.0 / 3.0
    passes_s = sum(parts.get(part, 0.0) for part in _PASSES)
    peak = memory(config)
    return ModelForecast(
        config=config,
        running_estimate=running_estimate,
        started_unix_s=started_unix_s,
        recorded_s=tuple(recorded_s),
        recorded_numbers=tuple(recorded_numbers),
        ratios=ratios,
        evaluation=Estimate(
            median=config.cadence.eval_iters * passes_s * share, unshared_sigma_log=_EVAL_SIGMA_LOG
        ),
        save=Estimate(
            median=SAVE_FIXED_S + (peak.weights_nbytes + peak.optimizer_nbytes) / SAVE_BYTES_PER_S,
            unshared_sigma_log=_SAVE_SIGMA_LOG,
        ),
    )


def full_batch_size(config: RunConfig) -> int:
    """Return the global batch size after the ramp."""
    return config.cadence.full_batch_size or config.batch.global_batch_size
