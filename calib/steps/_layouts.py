"""Step times of layouts as a function of the constants and of the effects on layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..fit.estimates import Source
from ..layers.blocks import EXPERT_KINDS, LAYER_KINDS
from ..layers.launches import launched_frac, recomputed_launch_frac, replayed_frac
from ..timeline.block_times import BlockTimes
from ..timeline.compiled import Compiled, compile_layouts
from ..timeline.evaluation import GroupTimes, Run, evaluate, simulate_long, step_times
from ..timeline.items import Floats
from ..timeline.simulation import Simulation
from ..timeline.terms import Term, term_times
from ..workload.collectives import Placement
from ..workload.config import RunConfig
from ..workload.layout_table import LayoutTable
from ._priced_items import KNOWN_FRAC, Constant, PricedItems, priced_items, weighted_sums
from ._scales import (
    BOOST,
    CONTENTION,
    EFFECT_SIGMA_LOG,
    EXPERT_LAUNCHES,
    FLOOR,
    FLOOR_RATIO,
    GROWTH,
    RELEASE_SIGMA_LOG,
    Effect,
    Release,
    effects_of,
    floor_s,
    releases_of,
)
from .base_times import BaseTimes

_SHARPNESS = 8.0
"""Power of the smooth maximum of launches and work; chosen on public step times, like
``_CALL_S``."""
_RUN = partial(simulate_long, start=4, period=4)
"""Pipelines longer than eight groups of micro-batches are extrapolated at their pace."""
_LEAST_S = 1e-12
"""Keeps shares finite; no pass is this short."""
_CALL_S = 40e-6
"""Host time to launch one collective."""
_PASSES = (Placement.FORWARD, Placement.BACKWARD, Placement.RECOMPUTE)
_TABLED_FRAC = 0.5
"""Share of the effects that remains for operators that device tables time alone."""
Simulate = Callable[[Sequence[Run]], list[Simulation]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TermSlopes:
    """The terms of one layout's step, with their derivatives."""

    terms: tuple[Term, ...]
    time_s: Floats
    """Shape (terms,)."""
    slopes_s: Floats
    """Seconds per unit of a constant, shape (terms, constants)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layouts:
    """Layouts ready to be timed with any constants.

    Constants are logs relative to their centres: the machine's scales, one for each family of
    models whose estimates have a deviation, and the effects on layers.
    """

    compiled: Compiled
    priced: PricedItems
    effects: tuple[Effect, ...]
    block_effects: Floats
    """Power of each effect in the time of each block, shape (blocks, effects)."""
    has_effect: Floats
    """1 for the effects that each layout has, shape (layouts, effects)."""
    calls_s: Mapping[Placement, Floats]
    """Host seconds to launch the collectives of each block, by pass, shape (blocks, 1)."""
    launched_frac: Floats
    """Share of a layer's kernels that the host launches for each block, shape (blocks, 1)."""
    recomputed_frac: Floats
    """Share of those kernels that recompute repeats, shape (blocks, 1)."""
    checkpoints: Floats
    """Number of checkpointed modules that are restarted, shape (blocks, 1)."""
    keeps_lead: NDArray[np.bool_]
    """True for blocks whose host launches a pass while the device still works on the one before it,
    shape (blocks, 1): pipelines wait for each message, and routers for the numbers of rows."""
    has_experts: NDArray[np.bool_]
    """True for blocks that launch the kernels of experts, shape (blocks, 1)."""
    releases: tuple[Release, ...]
    has_release: Floats
    """1 for the releases that each layout runs on, shape (layouts, releases)."""
    doublings: Floats
    """Doublings of the number of nodes from one, shape (layouts, 1)."""
    idle_frac: Floats
    """Share of the step that a stage waits in the bubble, shape (layouts, 1)."""

    @property
    def constants(self) -> tuple[Constant, ...]:
        """Names of the constants, in the order of all vectors of constants."""
        return (*self.priced.constants, *self.effects, *self.releases)

    @property
    def sigma_log(self) -> Floats:
        """Prior deviations of the constants."""
        return np.array(
            [
                *(scale.log_sigma for scale in self.priced.scales),
                *(1.0 for _ in self.priced.families),
                *(EFFECT_SIGMA_LOG[effect[0]] for effect in self.effects),
                *(RELEASE_SIGMA_LOG[release[0]] for release in self.releases),
            ]
        )

    def log_time(self, theta: Floats) -> Floats:
        """Return log step times, shape (layouts, columns), for constants of shape (constants,
        columns)."""
        log_times = np.log(step_times(self.compiled, self.timed(theta)))
        return log_times + self.growth_log(theta)

    def growth_log(self, theta: Floats) -> Floats:
        """Return the sum that nodes and a release add to each log step time and waiting subtracts,
        shape (layouts, columns)."""
        growth = self.doublings * self._named(theta, GROWTH)
        growth = growth + weighted_sums(
            self.has_release, theta[self._num_global + len(self.effects) :]
        )
        return growth - self.idle_frac * self._named(theta, BOOST)

    def timed(self, theta: Floats, run: Simulate = _RUN) -> list[GroupTimes]:
        """Return the steps of all groups of layouts."""
        return self._timed(theta, weighted_sums(self.block_effects, self._effects(theta)), run)

    def slopes(
        self, theta: Floats, step: float, *, global_steps: Floats | None = None
    ) -> tuple[list[GroupTimes], Floats]:
        """Return the steps at ``theta``, first alternative, and the derivatives of their logs.

        The derivatives have shape (layouts, constants). Effects on the same layers share one. Each
        constant is moved by ``step``, or those of the machine and of families by ``global_steps``.
        """
        steps = self._steps(step, global_steps)
        groups, columns = self._moved(theta, steps)
        logs = np.log(step_times(self.compiled, groups)) + self.growth_log(columns)
        slopes = self._by_constant(logs, steps, self.has_effect)
        return groups, np.hstack([slopes, self.has_release])

    def term_slopes(
        self, theta: Floats, step: float, *, global_steps: Floats | None = None
    ) -> list[TermSlopes]:
        """Return each layout's step by terms with their derivatives; steps and the sums of
        derivatives equal those of ``slopes``."""
        steps = self._steps(step, global_steps)
        groups, columns = self._moved(theta, steps)
        growth, items_s = np.exp(self.growth_log(columns)), self.priced.time_s(columns)
        out: dict[int, TermSlopes] = {}
        for group in groups:
            for row, place in enumerate(group.group.members.tolist()):
                times_s = term_times(self.compiled, group, items_s, row)
                times_s[Term.NODES] = group.total_s[row] * (growth[place] - 1.0)
                values = np.stack(list(times_s.values()))
                grown_s = float(group.total_s[row, 0] * growth[place, 0])
                releases = np.array([[term is Term.NODES] for term in times_s]) * grown_s
                slopes = self._by_constant(_as_logs(values), steps, self.has_effect[place])
                out[place] = TermSlopes(
                    terms=tuple(times_s),
                    time_s=values[:, 0],
                    slopes_s=np.hstack([slopes, releases * self.has_release[place]]),
                )
        return [out[place] for place in range(len(out))]

    def _steps(self, step: float, global_steps: Floats | None) -> Floats:
        """Return the change of each constant of the machine and of families, then of all
        effects."""
        steps = np.full(self._num_global + 1, step)
        if global_steps is not None:
            steps[:-1] = global_steps[: self._num_global]
        return steps

    def _moved(self, theta: Floats, steps: Floats) -> tuple[list[GroupTimes], Floats]:
        """Return the steps at ``theta``, with each constant and with all effects moved, and the
        constants. ``steps`` has one for each constant and one for the effects."""
        number = self._num_global
        columns = np.repeat(theta[:, np.newaxis], number + 2, axis=1)
        columns[:number, 1:-1] += np.diag(steps[:-1])
        work = np.repeat(
            weighted_sums(self.block_effects, self._effects(theta))[:, np.newaxis], number + 2, 1
        )
        work[:, -1] += steps[-1] * self.block_effects.max(axis=1, initial=0.0)
        return self._timed(columns, work, _RUN), columns

    def _by_constant(self, values: Floats, steps: Floats, has_effect: Floats) -> Floats:
        """Return the derivatives by all constants but the releases, shape (rows, constants), of
        values with each constant moved, shape (rows, alternatives)."""
        slopes = (values[:, 1:] - values[:, :1]) / steps
        return np.hstack([slopes[:, :-1], slopes[:, -1:] * has_effect])

    def items_s(self, theta: Floats) -> Floats:
        """Return the seconds of each item, shape (items,), for one vector of constants."""
        return self.priced.time_s(theta[:, np.newaxis])[:, 0]

    @property
    def _num_global(self) -> int:
        return len(self.priced.constants)

    def _effects(self, theta: Floats) -> Floats:
        return theta[self._num_global : self._num_global + len(self.effects)]

    def _named(self, theta: Floats, name: str) -> Floats:
        return self.priced.named(theta, name)

    def _timed(self, theta: Floats, work_log: Floats, run: Simulate) -> list[GroupTimes]:
        work = np.exp(work_log)
        of_experts_s = self.has_experts * self._named(theta, EXPERT_LAUNCHES)
        floor_s = self.launched_frac * (self._named(theta, FLOOR) + of_experts_s)
        forward_s = floor_s + self.calls_s[Placement.FORWARD]
        backward_s = floor_s * self._named(theta, FLOOR_RATIO) + self.calls_s[Placement.BACKWARD]
        # Each restarted module takes the host as long as a dense layer of fused kernels:
        # random-number states are saved and restored, and autograd is entered once more.
        restarts_s = self.checkpoints * self._named(theta, FLOOR)
        recompute_s = (
            self.recomputed_frac * floor_s + restarts_s + self.calls_s[Placement.RECOMPUTE]
        )

        def adjust(blocks: BlockTimes) -> BlockTimes:
            # Recompute and backward launch into one queue, so that one's work hides the other's
            # launches.
            both_s = blocks.backward_s + blocks.recompute_s
            waits_s = (
                smooth_maximum(blocks.forward_s, forward_s) - blocks.forward_s,
                smooth_maximum(both_s, backward_s + recompute_s) - both_s,
            )
            work_s = blocks.forward_s + both_s
            cycle_s = smooth_maximum(work_s, forward_s + backward_s + recompute_s) - work_s
            wait_frac = np.minimum(1.0, cycle_s / np.maximum(sum(waits_s), _LEAST_S))
            wait_frac = np.where(self.keeps_lead, wait_frac, 1.0)
            slower = 1.0 + wait_frac * waits_s[1] / np.maximum(both_s, _LEAST_S)
            return replace(
                blocks,
                waits_s=work * wait_frac * sum(waits_s),
                forward_s=work * (blocks.forward_s + wait_frac * waits_s[0]),
                backward_s=work * slower * blocks.backward_s,
                recompute_s=work * slower * blocks.recompute_s,
            )

        contention = 1.0 + self._named(theta, CONTENTION)
        items_s = self.priced.time_s(theta)
        return evaluate(self.compiled, items_s, contention=contention, adjust=adjust, run=run)


def layouts_of(configs: Sequence[RunConfig] | LayoutTable, base: BaseTimes) -> Layouts:
    """Build the layouts over base times, with the effects that they have."""
    known, compiled = base.conditions, compile_layouts(configs)
    table = compiled.table
    of_layouts = table.coded(effects_of, _EFFECTS)
    effects = tuple(sorted({effect for some in of_layouts.values for effect in some}))
    releases, has_release = releases_in(table)
    priced = priced_items(compiled, base)
    sampled_frac = np.array([_sampled_frac(source, known.is_in_situ) for source in priced.sources])
    # The deviation of an operator at other rows is its own, see ``Calibration``.
    sampled_frac[priced.is_rescaled] = 1.0 - KNOWN_FRAC
    launched = np.array([[launched_frac(c, b.kind)] for b, c in compiled.block_pairs])
    is_called = np.array([[replayed_frac(c, b.kind) < 1.0] for b, c in compiled.block_pairs])
    open_frac = known.launched_frac
    return Layouts(
        compiled=compiled,
        priced=priced,
        effects=effects,
        block_effects=_block_effects(compiled, effects, priced.base_s, sampled_frac),
        has_effect=_has_effect(of_layouts.values, effects)[of_layouts.codes],
        # Samples of training include its launches as far as it waited for them; a replayed graph
        # has none, nor those of its collectives if the whole layer is captured.
        calls_s={p: _calls_s(compiled, p) * open_frac * is_called for p in _PASSES},
        launched_frac=open_frac * launched,
        recomputed_frac=np.array([[recomputed_launch_frac(b)] for b in compiled.blocks]),
        checkpoints=open_frac
        * (floor_s(is_attention_fused=True) / floor_s(is_attention_fused=known.is_attention_fused))
        * np.array([[float(b.num_checkpoints)] for b in compiled.blocks]),
        releases=releases,
        has_release=has_release,
        doublings=doublings(table),
        idle_frac=idle_frac(table),
        has_experts=np.array([[b.kind in EXPERT_KINDS] for b in compiled.blocks]),
        keeps_lead=np.array(
            [
                [c.parallelism.pp == 1 and b.kind not in EXPERT_KINDS]
                for b, c in compiled.block_pairs
            ]
        ),
    )


_EFFECTS = ("model", "tp", "ep", "micro_batch_size")
_RELEASES = ("framework", "engine", "device", "is_compiled", "unmodelled")


def _as_logs(values_s: Floats) -> Floats:
    """Return terms of a step, shape (terms, alternatives), whose changes from the first alternative
    add up to that of the log of their sum, times the sum: large changes are less in logs."""
    sums_s = values_s.sum(axis=0)
    grown = np.log(sums_s / sums_s[0])
    shrink = np.where(np.abs(grown) > _LEAST_S, grown / np.where(grown, np.expm1(grown), 1.0), 1.0)
    return values_s[:, :1] + shrink * (values_s - values_s[:, :1])


def smooth_maximum(one: Floats, other: Floats) -> Floats:
    """Return a smooth maximum, at most 9 % above the larger.

    >>> smooth_maximum(np.array([1.0, 1.0]), np.array([0.0, 1.0])).round(3).tolist()
    [1.0, 1.091]
    """
    scale = np.maximum(np.maximum(one, other), 1e-12)
    return scale * ((one / scale) ** _SHARPNESS + (other / scale) ** _SHARPNESS) ** (1 / _SHARPNESS)


def releases_in(table: LayoutTable) -> tuple[tuple[Release, ...], Floats]:
    """Return the releases of layouts, and a 0/1 matrix of which each has, shape (layouts,
    releases)."""
    of_layouts = table.coded(releases_of, _RELEASES)
    releases = tuple(sorted({release for some in of_layouts.values for release in some}))
    rows = [[float(release in some) for release in releases] for some in of_layouts.values]
    has_release = np.array(rows).reshape(len(rows), len(releases))
    return releases, has_release[of_layouts.codes]


def doublings(table: LayoutTable) -> Floats:
    """Return the doublings of nodes from one, shape (layouts, 1); 0 on CPUs and if the ranks per
    node are unknown."""
    if table.base.device == "cpu":
        return np.zeros((len(table), 1))
    ranks = np.prod([table.numbers(name) for name in ("tp", "cp", "dp", "pp")], axis=0)
    per_node = table.numbers("ranks_per_node")
    nodes = np.where(per_node > 0, ranks / np.maximum(per_node, 1), 1.0)
    return np.log2(np.maximum(1.0, nodes))[:, np.newaxis]


def idle_frac(table: LayoutTable) -> Floats:
    """Return the share of the step in the bubble, shape (layouts, 1); 0 on CPUs, whose clocks do
    not rise while they wait."""
    if table.base.device == "cpu":
        return np.zeros((len(table), 1))
    bubbles = (table.numbers("pp") - 1) / (table.numbers("vp") * table.num_microbatches)
    return (bubbles / (1.0 + bubbles))[:, np.newaxis]


def _sampled_frac(source: Source, is_in_situ: bool) -> float:
    """Return the share of the effects on layers that an operator's samples already include."""
    if is_in_situ:
        return 1.0 - KNOWN_FRAC if source in (Source.MEASURED, Source.PROBED) else 0.0
    return 0.0 if source is Source.PRIOR else 1.0 - _TABLED_FRAC


def _block_effects(
    compiled: Compiled, effects: Sequence[Effect], base_s: Floats, sampled_frac: Floats
) -> Floats:
    """Return the powers of the effects in the work of each block, shape (blocks, effects).

    Effects are reduced for sampled work, by ``sampled_frac`` for each item.
    """
    times_s = np.stack([base_s * sampled_frac, base_s], axis=1)
    sums = compiled.sums
    sampled_s, all_s = (
        sums.forward @ times_s + sums.backward @ times_s + sums.recompute @ times_s
    ).T
    open_frac = 1.0 - sampled_s / np.maximum(all_s, 1e-12)
    of_blocks = [
        effects_of(config) if block.kind in LAYER_KINDS else ()
        for block, config in compiled.block_pairs
    ]
    return _has_effect(of_blocks, effects) * open_frac[:, np.newaxis]


def _has_effect(of_all: Sequence[Sequence[Effect]], effects: Sequence[Effect]) -> Floats:
    places = {effect: place for place, effect in enumerate(effects)}
    out = np.zeros((len(of_all), len(effects)))
    rows = np.repeat(np.arange(len(of_all)), [len(row_effects) for row_effects in of_all])
    out[rows, [places[effect] for row_effects in of_all for effect in row_effects]] = 1.0
    return out


def _calls_s(compiled: Compiled, placement: Placement) -> Floats:
    counts = [
        sum(use.count for use in block.uses if use.placement is placement)
        for block in compiled.blocks
    ]
    return _CALL_S * np.array(counts, dtype=np.float64)[:, np.newaxis]
