"""The step model of a run, from its sample table and from what is known of other runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..arguments import ASIDE, LEFT_OUT_FACTOR
from ..fit import calibrate, carried_over, is_processor, on_device
from ..forecast import PredictedStep, at_batch_size, batch_size_at, full_batch_size
from ..network import network_prior
from ..records import Cluster, StatedNodes
from ..regressors import Z_90
from ..samples import SampleTable
from ..steps import (
    BaseTimes,
    FittedSteps,
    KnownStep,
    StepEstimate,
    fit_steps,
    live_times,
    same_layout,
)
from ..workload import RunConfig
from .routing import routed_s, with_measured_routing
from .run_measurements import (
    Overhead,
    mean_waiting_s,
    measured_overhead,
    measured_sigma_log,
    measured_step_s,
    perturbation_s,
)

SESSION_SIGMA_LOG, CPU_SESSION_SIGMA_LOG = 0.015, 0.1
"""How far the level of one layout lies apart between two runs on the same machine: clocks and
neighbours.  Processors of a shared host move within minutes: 180 runs of 33 layouts differed by
0.07 (median) to 0.13 (root mean square) from their like (benchmarks/RESULTS.md)."""


def running_config(table: SampleTable) -> RunConfig:
    """The layout of the newest run at the batch size of its last recorded step, with experts as
    tokens were routed to them.

    A ramp may have gone on since the run described itself.
    """
    config = with_measured_routing(table.config(), table)
    if table.steps.empty:
        return config
    return at_batch_size(config, batch_size_at(config, int(table.steps["step"].max()) + 1))


def remaining_layout(config: RunConfig) -> RunConfig:
    """The layout of a run for what is left of it: at the batch size behind its ramp, where its
    micro-batches divide that."""
    full = full_batch_size(config)
    has_whole = full % (config.batch.micro_batch_size * config.parallelism.dp) == 0
    return at_batch_size(config, full) if has_whole else config


def known_step(table: SampleTable) -> KnownStep:
    """The newest run's layout and its measured step."""
    return KnownStep(
        config=running_config(table),
        time_s=measured_step_s(table),
        sigma_log=measured_sigma_log(table),
    )


def passing_sigma_log(config: RunConfig) -> float:
    """How far steps that were measured just now are from those of the next hour, all alike."""
    return CPU_SESSION_SIGMA_LOG if config.device == "cpu" else 0.0


def known_elsewhere(table: SampleTable, target: RunConfig) -> KnownStep:
    """The same as evidence for another run: another session, maybe another release."""
    step = known_step(table)
    session = CPU_SESSION_SIGMA_LOG if step.config.device == "cpu" else SESSION_SIGMA_LOG
    return replace(
        step,
        sigma_log=math.hypot(step.sigma_log, session),
        site="" if step.config.framework == target.framework else step.config.framework,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunFit:
    """The step models of a run, and its step as the one that has not seen it says it."""

    blind: FittedSteps
    """The model without the steps of the running layout."""
    unseen: StepEstimate
    """Its estimate of the running layout."""
    steps: FittedSteps
    modelled_step: PredictedStep
    """That estimate with ``waiting_s`` and less ``perturbation_s``, which are no operator's."""
    overhead: Overhead | None
    waiting_s: float
    """Waiting of ranks for each other in a step, mean over ranks, seconds."""
    perturbation_s: float
    """Seconds by which hooks slow a step down, beyond the time inside them."""


def fit_run(
    table: SampleTable, base: BaseTimes, known: Sequence[KnownStep], config: RunConfig
) -> RunFit:
    """The step models of the newest run, whose layout is ``config``; ``known`` are steps of others.

    The verbs and the live answer share this fit.
    """
    measured, layout = known_step(table), same_layout(config)
    blind = fit_run_steps(base, [one for one in known if same_layout(one.config) != layout], config)
    overhead = measured_overhead(table)
    waiting_s = mean_waiting_s(table, routed_s(blind, config))
    perturbed_s = perturbation_s(table, overhead)
    unseen, rest_s = blind.estimate(config), waiting_s - perturbed_s
    modelled = PredictedStep(
        time_s=unseen.time_s + rest_s, low_s=unseen.low_s + rest_s, high_s=unseen.high_s + rest_s
    )
    steps = fit_run_steps(base, with_measured_step(known, measured), config)
    return RunFit(
        blind=blind,
        unseen=unseen,
        steps=replace(
            steps,
            misfit_log=_misfit_log(measured, modelled),
            unrun_log=math.log(LEFT_OUT_FACTOR) if {*config.unmodelled} - ASIDE else 0.0,
        ),
        modelled_step=modelled,
        overhead=overhead,
        waiting_s=waiting_s,
        perturbation_s=perturbed_s,
    )


def _misfit_log(measured: KnownStep, modelled: PredictedStep) -> float:
    """Measured over modelled step, log; 0 where the errors of both, and how far the machine's level
    moves meanwhile, allow it with 90 %."""
    if min(modelled.low_s, modelled.time_s) <= 0:
        return 0.0
    off_log = math.log(measured.time_s / modelled.time_s)
    measured_log = Z_90 * math.hypot(measured.sigma_log, passing_sigma_log(measured.config))
    allowed_log = math.hypot(math.log(modelled.high_s / modelled.low_s) / 2, measured_log)
    return off_log if abs(off_log) > allowed_log else 0.0


def run_steps(
    table: SampleTable, known: Sequence[KnownStep] = (), *, like: SampleTable | None = None
) -> FittedSteps:
    """The step model of the newest run, with steps of other runs on its kind of device.

    ``like`` is a run of another machine, whose operators are carried over and corrected by this
    run's.  Where a machine was probed and nothing trained, it stands on the operators alone.
    Raises ``CalibrationError`` where no operator was sampled.
    """
    config = table.config()
    calibration = calibrate(table, device=config.device)
    if like is not None:
        calibration = carried_over(calibration, calibrate(like, device=like.config().device))
    base = live_times(calibration, config)
    if table.steps.empty:
        return fit_steps(base, known)
    return fit_run(table, base, known, running_config(table)).steps


def fit_run_steps(base: BaseTimes, known: Sequence[KnownStep], config: RunConfig) -> FittedSteps:
    """The step model of a run: what its layouts have in common moves from hour to hour."""
    return fit_steps(base, known, passing_sigma_log=passing_sigma_log(config))


def steps_on(table: SampleTable, device: str, stated: StatedNodes | None = None) -> FittedSteps:
    """The step model of a device that nothing was measured on, by a run of another one.

    ``stated`` is said of the nodes of that device.  Raises ``CalibrationError`` where one of the
    two is a CPU and the other is none.
    """
    config = table.config()
    cluster = Cluster(stated=stated or StatedNodes())
    calibration = on_device(calibrate(table, device=config.device), device, cluster)
    return fit_steps(live_times(calibration, config_on(table, device, stated)))


def config_on(table: SampleTable, device: str, stated: StatedNodes | None = None) -> RunConfig:
    """The run's layout on another device, on nodes of as many GPUs as are said or were here; a CPU
    run has none, and those that are usual for the device count."""
    config, nodes = table.config(), stated or StatedNodes()
    if is_processor(config.device) is is_processor(device):
        here = table.cluster().node.num_local_ranks or config.parallelism.ranks_per_node
    else:
        links = network_prior(device).links
        here = links.topology.num_gpus if links is not None else 0
    layout = replace(config.parallelism, ranks_per_node=nodes.num_gpus or here)
    layout = Cluster(stated=nodes).joined(layout, device)
    return replace(config, device=device, parallelism=layout)


def with_measured_step(known: Sequence[KnownStep], measured: KnownStep) -> list[KnownStep]:
    """What is known, with a run's own step in place of what earlier runs took in its layout."""
    layout = same_layout(measured.config)
    others = (one for one in known if one.site or same_layout(one.config) != layout)
    return [*others, measured]
