"""The step model of a run, from its sample table and from measured steps of other runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..arguments.megatron_options import ASIDE, UNMODELLED_FACTOR, moves
from ..fit.calibration import calibrate, calibration_for_device, combine_with_other
from ..fit.measured_rows import measured_operators
from ..fit.priors import is_processor
from ..forecast.batch_ratios import PredictedStep
from ..forecast.modelled import at_batch_size, batch_size_at, full_batch_size
from ..network.systems import network_prior
from ..records.cluster import Cluster, StatedNodes
from ..regressors.robust import Z_90
from ..samples.table import SampleTable
from ..steps.base_times import BaseTimes
from ..steps.estimate import StepEstimate
from ..steps.known_steps import KnownStep, same_layout
from ..steps.launches import launch_times
from ..steps.live import live_times
from ..steps.model import FittedSteps, fit_steps
from ..workload.config import RunConfig
from .routing import routed_s, with_measured_routing
from .run_measurements import (
    Overhead,
    mean_waiting_s,
    measured_overhead,
    measured_sigma_log,
    measured_step_s,
    perturbed_frac,
)

SESSION_SIGMA_LOG, CPU_SESSION_SIGMA_LOG = 0.015, 0.1
"""Standard deviation (log) of a layout's step time between two runs on the same machine, due to
clocks and neighbours.  CPUs of a shared host change within minutes: 180 runs of 33 layouts differed
by 0.07 (median) to 0.13 (root mean square) from runs of the same layout (benchmarks/RESULTS.md)."""


def running_config(table: SampleTable) -> RunConfig:
    """Return the newest run's layout at the batch size of its last step, with measured routing.

    A batch-size ramp may have advanced since the run recorded its layout.
    """
    config = with_measured_routing(table.config(), table)
    if table.steps.empty:
        return config
    return at_batch_size(config, batch_size_at(config, int(table.steps["step"].max()) + 1))


def remaining_layout(config: RunConfig) -> RunConfig:
    """Return the layout for the remaining run: at the batch size after the ramp if whole
    micro-batches divide that, else unchanged."""
    full = full_batch_size(config)
    has_whole = full % (config.batch.micro_batch_size * config.parallelism.dp) == 0
    return at_batch_size(config, full) if has_whole else config


def known_step(table: SampleTable) -> KnownStep:
    """Return the newest run's layout and its measured step."""
    return KnownStep(
        config=running_config(table),
        time_s=measured_step_s(table),
        sigma_log=measured_sigma_log(table),
    )


def passing_sigma_log(config: RunConfig) -> float:
    """Return the standard deviation (log) of the level of steps between now and the next hour."""
    return CPU_SESSION_SIGMA_LOG if config.device == "cpu" else 0.0


def known_elsewhere(table: SampleTable, target: RunConfig) -> KnownStep:
    """Return ``known_step`` as evidence for a run of another session, maybe another release."""
    step = replace(known_step(table), launches=launch_times(measured_operators(table)))
    session = CPU_SESSION_SIGMA_LOG if step.config.device == "cpu" else SESSION_SIGMA_LOG
    return replace(
        step,
        sigma_log=math.hypot(step.sigma_log, session),
        site="" if step.config.framework == target.framework else step.config.framework,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunFit:
    """Step models of a run, and its step as predicted by the model that was not fitted on it."""

    blind: FittedSteps
    """Model fitted without steps of the running layout."""
    unseen: StepEstimate
    """Estimate of the running layout by ``blind``."""
    steps: FittedSteps
    modelled_step: PredictedStep
    """``unseen`` plus ``waiting_s``, without the share that hooks add to a hooked step."""
    overhead: Overhead | None
    waiting_s: float
    """Seconds per step that ranks wait for each other, mean over ranks."""
    perturbation_s: float
    """That share, seconds, apart from the time inside the hooks."""


def fit_run(
    table: SampleTable, base: BaseTimes, known: Sequence[KnownStep], config: RunConfig
) -> RunFit:
    """Return the step models of the newest run, with layout ``config``.

    ``known`` are steps of other runs.  The commands and the live answer share this fit.
    """
    measured, layout = known_step(table), same_layout(config)
    blind = fit_run_steps(base, [one for one in known if same_layout(one.config) != layout], config)
    overhead = measured_overhead(table)
    waiting_s = mean_waiting_s(table, routed_s(blind, config))
    unseen, added_frac = blind.estimate(config), perturbed_frac(table, overhead)
    modelled = PredictedStep(
        time_s=(1.0 - added_frac) * (unseen.time_s + waiting_s),
        low_s=(1.0 - added_frac) * (unseen.low_s + waiting_s),
        high_s=(1.0 - added_frac) * (unseen.high_s + waiting_s),
    )
    steps = fit_run_steps(base, with_measured_step(known, measured), config)
    return RunFit(
        blind=blind,
        unseen=unseen,
        steps=replace(
            steps,
            misfit_log=_misfit_log(measured, modelled),
            unrun_log=math.log(UNMODELLED_FACTOR)
            if any(moves(name, "time") for name in {*config.unmodelled} - ASIDE)
            else 0.0,
        ),
        modelled_step=modelled,
        overhead=overhead,
        waiting_s=waiting_s,
        perturbation_s=added_frac * (unseen.time_s + waiting_s),
    )


def _misfit_log(measured: KnownStep, modelled: PredictedStep) -> float:
    """Return the log of measured over modelled step; 0 if within the 90 % interval of both errors
    and of the drift of the machine's level."""
    off_log = math.log(measured.time_s / modelled.time_s)
    measured_log = Z_90 * math.hypot(measured.sigma_log, passing_sigma_log(measured.config))
    allowed_log = math.hypot(math.log(modelled.high_s / modelled.low_s) / 2, measured_log)
    return off_log if abs(off_log) > allowed_log else 0.0


def run_steps(
    table: SampleTable, known: Sequence[KnownStep] = (), *, like: SampleTable | None = None
) -> FittedSteps:
    """Return the step model of the newest run, with steps of other runs on its kind of device.

    ``like`` is a run of another machine, whose operators are transferred and corrected by this
    run's.  If the machine was only probed, without training, the model rests on operators alone.
    Raises ``CalibrationError`` if no operator was sampled.
    """
    config = table.config()
    calibration = calibrate(table, device=config.device)
    if like is not None:
        calibration = combine_with_other(calibration, calibrate(like, device=like.config().device))
    base = live_times(calibration, config, known)
    if table.steps.empty:
        return fit_steps(base, known)
    return fit_run(table, base, known, running_config(table)).steps


def fit_run_steps(base: BaseTimes, known: Sequence[KnownStep], config: RunConfig) -> FittedSteps:
    """Return the step model of a run; the level common to its layouts drifts from hour to hour."""
    return fit_steps(base, known, passing_sigma_log=passing_sigma_log(config))


def steps_on(table: SampleTable, device: str, stated: StatedNodes | None = None) -> FittedSteps:
    """Return the step model of an unmeasured device, based on a run on another device.

    ``stated`` describes the nodes of the unmeasured device.  Raises ``CalibrationError`` if exactly
    one of the two devices is a CPU.
    """
    config = table.config()
    cluster = Cluster(stated=stated or StatedNodes())
    calibration = calibration_for_device(calibrate(table, device=config.device), device, cluster)
    return fit_steps(live_times(calibration, config_on(table, device, stated)))


def config_on(table: SampleTable, device: str, stated: StatedNodes | None = None) -> RunConfig:
    """Return the run's layout on another device, with GPUs per node as stated, else as here.

    A CPU run has no GPUs; the number usual for the device is used then.
    """
    config, nodes = table.config(), stated or StatedNodes()
    if is_processor(config.device) is is_processor(device):
        here = table.cluster().node.num_local_ranks or config.parallelism.ranks_per_node
    else:
        links = network_prior(device).links
        here = links.topology.num_gpus if links is not None else 0
    layout = replace(config.parallelism, ranks_per_node=nodes.num_gpus or here)
    layout = Cluster(stated=nodes).with_domain_nodes(layout, device)
    return replace(config, device=device, parallelism=layout)


def with_measured_step(known: Sequence[KnownStep], measured: KnownStep) -> list[KnownStep]:
    """Return known steps, with a run's measured step in place of earlier steps of its layout."""
    layout = same_layout(measured.config)
    others = (one for one in known if one.site or same_layout(one.config) != layout)
    return [*others, measured]
