"""Choice of shapes and transfers of other layouts to measure during a run, and their cost.

A pure function of the running layout: every rank derives the same list without communication.

Times before any measurement are from data-sheet rates and the cost model of the network.

NumPy only and without a fit, so that a training process can call it between two steps.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ..fit.batches import batch_of
from ..fit.estimates import Estimates, Source
from ..fit.laws import columns
from ..fit.priors import DevicePrior, device_prior
from ..layers.recompute import RecomputeOption
from ..layers.stage_work import collective_uses, stage_operators, step_collectives
from ..network.groups import bus_factor, canonical, group_of, ring_steps
from ..network.nccl_tuner import tuner_time_s
from ..network.once_per_node import as_all_to_all
from ..search.cells import cells_of
from ..workload.collectives import Collective, CollectiveCall, GroupRole
from ..workload.config import Fp8Recipe, RunConfig
from ..workload.operators import Operator, OperatorKind, Phase
from ..workload.ranks import group, num_nodes
from .probe_sizes import (
    PROBED_COLLECTIVES,
    PROBED_KINDS,
    REPEATS,
    SMALL_NBYTES,
    TRANSFER_RUNS,
    WARMUPS,
    CollectiveProbe,
    OperatorProbe,
    Probe,
    need_of,
    probe_json,
)

TRANSFER_SIGMA_LOG = 0.5
"""Error (log) of a transfer's expected time: the scatter of public tables about NCCL's model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmeasured:
    """Expected times on a device, from its name only; implements ``fit.estimates.Estimator``."""

    device: str

    def operators(self, operators: Sequence[Operator]) -> Estimates:
        """Estimate times as the sum of launch, FLOP and bytes, at 75 % of the data sheet."""
        prior = device_prior(self.device)
        times = np.zeros(len(operators))
        groups: defaultdict[tuple[OperatorKind, Phase, int], list[int]] = defaultdict(list)
        for i, operator in enumerate(operators):
            groups[operator.kind, operator.phase, operator.element_nbytes].append(i)
        for (_, _, nbytes), rows in groups.items():
            rates = prior.ceilings_for(nbytes)
            totals = columns(batch_of([operators[i] for i in rows])).totals()
            units = (rates.launch_s, 1.0 / rates.flop_per_s, 1.0 / rates.bytes_per_s)
            times[rows] = totals @ np.array(units)
        return Estimates.alike(times, prior.error_sigma_log, Source.PRIOR)

    def collectives(self, calls: Sequence[CollectiveCall]) -> Estimates:
        """Estimate times by NCCL's cost model, or by a ring for other libraries."""
        prior = device_prior(self.device)
        times = np.array([_transfer_s(canonical(call), prior) for call in calls])
        return Estimates.alike(times, TRANSFER_SIGMA_LOG, Source.PRIOR)


def _transfer_s(call: CollectiveCall, prior: DevicePrior) -> float:
    if call.num_ranks < 2:
        return 0.0
    network, group, nbytes = prior.network, group_of(call), float(call.nbytes)
    if group.num_chosen:
        group, share = as_all_to_all(group)
        nbytes *= share
    if network.links is not None:
        return float(tuner_time_s(group, np.array([nbytes]), network.links)[0])
    wire_s = bus_factor(group.collective, group.num_ranks) * nbytes / network.bus_bytes_per_s
    return ring_steps(group.collective, group.num_ranks) * network.step_s + wire_s


MOST_LAYOUTS = 8
"""Number of best layouts of different degrees that probes are chosen for."""
# Bounds the list if the budget is large.
MOST_PROBES = 96
_MOST_BUDGET_FRAC = 0.25
"""Largest share of the budget that one probe may take."""
_Shape = tuple[OperatorKind, tuple[int, ...], int]


def probe_plan(config: RunConfig, *, budget_s: float) -> tuple[Probe, ...]:
    """Return probes for the best other layouts, most valuable first, within ``budget_s``.

    Probed are operators and transfers of those layouts that the running one does not have, ordered
    by their share of a step times its uncertainty.  For each kind of operator and transfer the
    running layout's largest comes first, as a control; on an accelerator also its smallest.
    """
    operator_sigma_log = device_prior(config.device).error_sigma_log
    running_times_s = _work_times_s(config)
    values: defaultdict[Operator | CollectiveCall, float] = defaultdict(float)
    layouts, weights = _best_layouts(config)
    for layout, weight in zip(layouts, weights, strict=True):
        times_s = _work_times_s(layout)
        whole_s = sum(times_s.values())
        for wanted, time_s in times_s.items():
            if wanted not in running_times_s:
                is_operator = isinstance(wanted, Operator)
                sigma_log = operator_sigma_log if is_operator else TRANSFER_SIGMA_LOG
                values[wanted] += weight * time_s / whole_s * sigma_log
    probes = [*_operators(values, config), *_transfers(values, config)]
    return _within(_with_controls(probes, running_times_s, config), budget_s)


def group_roles(config: RunConfig) -> dict[tuple[int, int], GroupRole]:
    """Return roles of groups that carry traffic of this layout, by their ranks and nodes."""
    par = config.parallelism
    roles = {
        use.call.role
        for stage in sorted({0, min(1, par.pp - 1), par.pp - 1})
        for use in collective_uses(config, stage=stage)
        if use.call.role is not GroupRole.EMBEDDING
    }
    role_of_group: dict[tuple[int, int], GroupRole] = {}
    for role in sorted(roles, key=lambda role: role.value):
        role_of_group.setdefault((len(group(par, role, 0)), num_nodes(par, role)), role)
    return role_of_group


def operator_probe(
    shape: _Shape, config: RunConfig, *, value: float = 0.0, is_control: bool = False
) -> OperatorProbe:
    """Return a probe with its expected cost and its memory."""
    kind, sizes, element_nbytes = shape
    expected = Unmeasured(device=config.device).operators(operators_of(*shape))
    nbytes, small_nbytes = need_of(*shape, is_fused=config.is_attention_fused)
    return OperatorProbe(
        kind=kind,
        shape=sizes,
        element_nbytes=element_nbytes,
        is_control=is_control,
        value=value,
        cost_s=(WARMUPS + REPEATS) * float(expected.time_s.sum()),
        nbytes=nbytes,
        small_nbytes=small_nbytes,
    )


def operators_of(kind: OperatorKind, shape: tuple[int, ...], element_nbytes: int) -> list[Operator]:
    """Return the operators that a probe of one shape measures."""
    is_step = kind is OperatorKind.OPTIMIZER
    return [
        Operator(kind=kind, phase=phase, shape=shape, element_nbytes=element_nbytes)
        for phase in ((Phase.STEP,) if is_step else (Phase.FORWARD, Phase.BACKWARD))
    ]


def _best_layouts(config: RunConfig) -> tuple[list[RunConfig], list[float]]:
    """Return the fastest layout of each set of degrees, also with the running micro-batch, and the
    time of the fastest of all over that of each."""
    layouts = [layout for layout in _unlike_shapes(config) if layout != config]
    order = sorted((_rough_s(layout), place) for place, layout in enumerate(layouts))
    best: dict[tuple[int, ...], dict[bool, tuple[float, RunConfig]]] = {}
    for time_s, place in order:
        par, batch = layouts[place].parallelism, layouts[place].batch
        of_degrees = best.setdefault((par.tp, par.cp, par.ep, par.pp), {})
        of_degrees.setdefault(False, (time_s, layouts[place]))
        if batch == config.batch:
            of_degrees.setdefault(True, (time_s, layouts[place]))
    timed_layouts = [
        pair for of_degrees in [*best.values()][:MOST_LAYOUTS] for pair in of_degrees.values()
    ]
    return [c for _, c in timed_layouts], [order[0][0] / time_s for time_s, _ in timed_layouts]


def _unlike_shapes(config: RunConfig) -> list[RunConfig]:
    """Return layouts with distinct operator shapes, experts and sequences split as in the run.

    Virtual stages, layers of stages and sharding change no shape.
    """
    par = config.parallelism
    plain = cells_of(config, par.num_ranks).plain
    is_split = par.is_sequence_parallel or config.model.experts is not None
    etp, tp = plain.numbers("etp"), plain.numbers("tp")
    wanted = (
        (plain.numbers("vp") == 1)
        & np.isin(plain.numbers("cp"), (1, par.cp))
        & np.isin(etp, (0, par.expert_tp))
        & ((tp == 1) | (plain.numbers("is_sequence_parallel") == is_split))
    )
    shaped = ("tp", "cp", "ep", "etp", "pp", "dp", "micro_batch_size", "is_sequence_parallel")
    some = plain.take(np.flatnonzero(wanted))
    recompute = RecomputeOption.from_config(config)
    return [recompute.applied_to(some.config(row)) for row in some.distinct(shaped)[0].tolist()]


def _rough_s(config: RunConfig) -> float:
    """Return the work of the fullest stage plus the bubble, accurate enough to choose probes."""
    passes, stages = config.num_microbatches, config.parallelism.pp
    # The bubble of 1F1B: pp - 1 passes more than micro-batches.
    return sum(_work_times_s(config).values()) * (passes + stages - 1) / passes


def _work_times_s(config: RunConfig) -> dict[Operator | CollectiveCall, float]:
    """Return each operator and transfer of a step, with its seconds on the stage with the most."""
    expected = Unmeasured(device=config.device)
    counts: dict[Operator | CollectiveCall, int] = {}
    last = config.parallelism.pp - 1
    for stage in sorted({0, min(1, last), last}):
        for wanted, count in _stage_counts(config, stage):
            counts[wanted] = max(counts.get(wanted, 0), count)
    operators = [wanted for wanted in counts if isinstance(wanted, Operator)]
    calls = [wanted for wanted in counts if isinstance(wanted, CollectiveCall)]
    times_s = [
        *expected.operators(operators).time_s.tolist(),
        *expected.collectives(calls).time_s.tolist(),
    ]
    return {w: counts[w] * t for w, t in zip([*operators, *calls], times_s, strict=True)}


def _stage_counts(config: RunConfig, stage: int) -> list[tuple[Operator | CollectiveCall, int]]:
    done = stage_operators(config, stage)
    passes = config.num_microbatches
    counts: list[tuple[Operator | CollectiveCall, int]] = [
        (operator, count * passes) for operator, count in (*done.forward, *done.backward)
    ]
    counts += done.step
    calls: defaultdict[CollectiveCall, int] = defaultdict(int)
    for call, count in step_collectives(config, stage=stage):
        calls[canonical(call)] += count
    return [*counts, *calls.items()]


def _operators(
    values: Mapping[Operator | CollectiveCall, float], config: RunConfig
) -> list[OperatorProbe]:
    shapes: defaultdict[_Shape, float] = defaultdict(float)
    for wanted, value in values.items():
        if isinstance(wanted, Operator) and is_probed(wanted.kind, config):
            shapes[wanted.kind, wanted.shape, wanted.element_nbytes] += value
    return [operator_probe(shape, config, value=value) for shape, value in shapes.items()]


def is_probed(kind: OperatorKind, config: RunConfig) -> bool:
    """Return True if a probe can run the same kernel as the model; not so for 8-bit products, whose
    scaling depends on the model's history, and for attention under a window."""
    if kind.is_quantized and config.fp8 is not Fp8Recipe.NONE:
        return False
    if kind is OperatorKind.CORE_ATTENTION and config.model.window is not None:
        return False
    # Latent attention rotates a part of each head, which is not in the shape.
    has_shape = kind is not OperatorKind.POSITION or config.model.latent_attention is None
    return kind in PROBED_KINDS and has_shape


def _transfers(
    values: Mapping[Operator | CollectiveCall, float], config: RunConfig
) -> list[CollectiveProbe]:
    """Return probes of transfers for which a group with as many ranks and nodes exists."""
    roles = group_roles(config)
    probes = []
    for call, value in values.items():
        if isinstance(call, Operator) or call.collective not in PROBED_COLLECTIVES:
            continue
        over = roles.get((call.num_ranks, call.num_nodes))
        if over is not None and call.num_ranks > 1:
            probes.append(collective_probe(call, over, config, value=value))
    return probes


def collective_probe(
    call: CollectiveCall,
    over: GroupRole,
    config: RunConfig,
    *,
    value: float = 0.0,
    is_control: bool = False,
) -> CollectiveProbe:
    """Return a probe with its expected cost."""
    expected = Unmeasured(device=config.device).collectives([call])
    num_buffers = 3 if call.collective is Collective.ALL_TO_ALL else 2
    return CollectiveProbe(
        call=call,
        over=over,
        is_control=is_control,
        value=value,
        cost_s=TRANSFER_RUNS * float(expected.time_s[0]),
        nbytes=num_buffers * call.nbytes,
        small_nbytes=num_buffers * min(call.nbytes, SMALL_NBYTES),
    )


def _with_controls(
    probes: Sequence[Probe],
    running_times_s: Mapping[Operator | CollectiveCall, float],
    config: RunConfig,
) -> list[Probe]:
    """Return the probes, most valuable first, with controls before the first of each kind."""
    shapes, calls = _running_shapes(running_times_s), _running_calls(running_times_s, config)
    ordered: list[Probe] = []
    seen: set[OperatorKind | Collective] = set()
    for probe in sorted(probes, key=lambda probe: (-probe.value, json.dumps(probe_json(probe)))):
        kind = probe.kind if isinstance(probe, OperatorProbe) else probe.call.collective
        if kind not in seen:
            seen.add(kind)
            ordered += _controls(kind, shapes, calls, config, value=probe.value)
        ordered.append(probe)
    return ordered


def _controls(
    kind: OperatorKind | Collective,
    shapes: Mapping[OperatorKind, Sequence[_Shape]],
    calls: Mapping[Collective, Sequence[CollectiveCall]],
    config: RunConfig,
    *,
    value: float,
) -> list[Probe]:
    """Return the run's largest shape of a kind; on an accelerator also the smallest, since the two
    show how the difference between the run's kernels and a probe's depends on shape."""
    if isinstance(kind, OperatorKind):
        return [
            operator_probe(shape, config, value=value, is_control=True)
            for shape in _ends(shapes.get(kind, ()), config)
        ]
    roles = group_roles(config)
    return [
        collective_probe(
            call, roles[call.num_ranks, call.num_nodes], config, value=value, is_control=True
        )
        for call in _ends(calls.get(kind, ()), config)
    ]


_One = TypeVar("_One", _Shape, CollectiveCall)


def _ends(ordered: Sequence[_One], config: RunConfig) -> Sequence[_One]:
    has_both = config.device != "cpu" and len(ordered) > 1
    return [ordered[-1], ordered[0]] if has_both else ordered[-1:]


def _running_shapes(
    running_times_s: Mapping[Operator | CollectiveCall, float],
) -> dict[OperatorKind, list[_Shape]]:
    """Return the run's shapes by kind, in ascending order of time spent."""
    times_s: defaultdict[OperatorKind, dict[_Shape, float]] = defaultdict(dict)
    for wanted, time_s in running_times_s.items():
        if isinstance(wanted, Operator):
            shape = (wanted.kind, wanted.shape, wanted.element_nbytes)
            times_s[wanted.kind][shape] = max(times_s[wanted.kind].get(shape, 0.0), time_s)
    return {
        kind: sorted(spent, key=lambda shape: (spent[shape], shape[1]))
        for kind, spent in times_s.items()
    }


def _running_calls(
    running_times_s: Mapping[Operator | CollectiveCall, float], config: RunConfig
) -> dict[Collective, list[CollectiveCall]]:
    """Return the run's transfers that can be probed by kind, in ascending order of bytes."""
    roles = group_roles(config)
    able = [
        call
        for call in running_times_s
        if isinstance(call, CollectiveCall)
        and call.collective in PROBED_COLLECTIVES
        and call.num_ranks > 1
        and (call.num_ranks, call.num_nodes) in roles
    ]
    calls: defaultdict[Collective, list[CollectiveCall]] = defaultdict(list)
    for call in sorted(able, key=lambda call: (call.nbytes, call.num_ranks, call.role.value)):
        calls[call.collective].append(call)
    return calls


def _within(ordered: Sequence[Probe], budget_s: float) -> tuple[Probe, ...]:
    """Return the first probes that fit in the budget, without any that takes too much of it."""
    taken: list[Probe] = []
    spent_s = 0.0
    for probe in ordered:
        is_small = probe.cost_s <= _MOST_BUDGET_FRAC * budget_s
        if is_small and spent_s + probe.cost_s <= budget_s and len(taken) < MOST_PROBES:
            taken.append(probe)
            spent_s += probe.cost_s
    return tuple(taken)
