"""The step model of a run, from its sample table and from measured steps of other runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..arguments.megatron_options import ASIDE, UNMODELLED_FACTOR, moves
from ..fit.calibration import calibration_for_device, combine_with_other
from ..fit.measured_rows import measured_operators
from ..fit.priors import is_processor
from ..forecast.batch_ratios import PredictedStep
from ..forecast.modelled import at_batch_size, full_batch_size
from ..network.systems import network_prior
from ..records.cluster import Cluster, StatedNodes
from ..regressors.robust import Z_90
from ..steps.base_times import BaseTimes
from ..steps.estimate import StepEstimate
from ..steps.known_steps import KnownStep, same_layout
from ..steps.launches import launch_times
from ..steps.live import live_times
from ..steps.model import FittedSteps, fit_steps
from ..workload.config import RunConfig
from .routing import routed_s
from .run_measurements import Measurements

SESSION_SIGMA_LOG, CPU_SESSION_SIGMA_LOG = 0.015, 0.1
"""Standard deviation (log) of a layout's step time between two runs on the same machine, due to
clocks and neighbours.  CPUs of a shared host change within minutes: 180 runs of 33 layouts differed
by 0.07 (median) to 0.13 (root mean square) from runs of the same layout (benchmarks/RESULTS.md)."""


def remaining_layout(config: RunConfig) -> RunConfig:
    """Return the layout for the remaining run: at the batch size after the ramp if whole
    micro-batches divide that, else unchanged."""
    full = full_batch_size(config)
    has_whole = full % (config.batch.micro_batch_size * config.parallelism.dp) == 0
    return at_batch_size(config, full) if has_whole else config


def passing_sigma_log(config: RunConfig) -> float:
    """Return the standard deviation (log) of the level of steps between now and the next hour."""
    return CPU_SESSION_SIGMA_LOG if config.device == "cpu" else 0.0


def known_elsewhere(measured: Measurements, target: RunConfig) -> KnownStep:
    """Return the run's step as evidence for one of another session, maybe another release."""
    launches = launch_times(measured_operators(measured.table))
    step = replace(measured.known_step, launches=launches)
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
    waiting_s: float
    """Seconds per step that ranks wait for each other, mean over ranks."""
    perturbation_s: float
    """That share, seconds, apart from the time inside the hooks."""


def fit_run(
    measured: Measurements, base: BaseTimes, known: Sequence[KnownStep], config: RunConfig
) -> RunFit:
    """Return the step models of the newest run, with layout ``config``.

    ``known`` are steps of other runs.  The commands and the live answer share this fit.
    """
    layout = same_layout(config)
    blind = fit_run_steps(base, [one for one in known if same_layout(one.config) != layout], config)
    waiting_s = measured.mean_waiting_s(routed_s(blind, config))
    unseen, added_frac = blind.estimate(config), measured.perturbed_frac
    modelled = PredictedStep(
        time_s=(1.0 - added_frac) * (unseen.time_s + waiting_s),
        low_s=(1.0 - added_frac) * (unseen.low_s + waiting_s),
        high_s=(1.0 - added_frac) * (unseen.high_s + waiting_s),
    )
    steps = fit_run_steps(base, with_measured_step(known, measured.known_step), config)
    return RunFit(
        blind=blind,
        unseen=unseen,
        steps=replace(
            steps,
            misfit_log=_misfit_log(measured.known_step, modelled),
            unrun_log=math.log(UNMODELLED_FACTOR)
            if any(moves(name, "time") for name in {*config.unmodelled} - ASIDE)
            else 0.0,
        ),
        modelled_step=modelled,
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
    measured: Measurements, known: Sequence[KnownStep] = (), *, like: Measurements | None = None
) -> FittedSteps:
    """Return the step model of the newest run, with steps of other runs on its kind of device.

    ``like`` is a run of another machine, whose operators are transferred and corrected by this
    run's.  If the machine was only probed, without training, the model rests on operators alone.
    Raises ``CalibrationError`` if no operator was sampled.
    """
    calibration = measured.calibration
    if like is not None:
        calibration = combine_with_other(calibration, like.calibration)
    base = live_times(calibration, measured.recorded_config, known)
    if not measured.num_steps:
        return fit_steps(base, known)
    return fit_run(measured, base, known, measured.config).steps


def fit_run_steps(base: BaseTimes, known: Sequence[KnownStep], config: RunConfig) -> FittedSteps:
    """Return the step model of a run; the level common to its layouts drifts from hour to hour."""
    return fit_steps(base, known, passing_sigma_log=passing_sigma_log(config))


def steps_on(measured: Measurements, device: str, stated: StatedNodes | None = None) -> FittedSteps:
    """Return the step model of an unmeasured device, based on a run on another device.

    ``stated`` describes the nodes of the unmeasured device.  Raises ``CalibrationError`` if exactly
    one of the two devices is a CPU.
    """
    cluster = Cluster(stated=stated or StatedNodes())
    calibration = calibration_for_device(measured.calibration, device, cluster)
    return fit_steps(live_times(calibration, config_on(measured, device, stated)))


def config_on(measured: Measurements, device: str, stated: StatedNodes | None = None) -> RunConfig:
    """Return the run's layout on another device, with GPUs per node as stated, else as here.

    A CPU run has no GPUs; the number usual for the device is used then.
    """
    config, nodes = measured.recorded_config, stated or StatedNodes()
    if is_processor(config.device) is is_processor(device):
        here = measured.table.cluster().node.num_local_ranks or config.parallelism.ranks_per_node
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
