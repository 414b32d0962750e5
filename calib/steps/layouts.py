"""Step times of layouts as a function of the constants and of what each cell of layers adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..samples.step_rows import StepRow
from ..timeline.block_times import BlockTimes
from ..timeline.compiled import Compiled, compile_layouts
from ..timeline.evaluate import evaluate, step_times
from ..timeline.items import Floats, Ints
from ..timeline.steady import simulate_long
from ..timeline.step import CONTENTION
from ..workload.blocks import BlockKind
from ..workload.collectives import CollectiveCall, GroupRole, Placement
from .base_times import BaseTimes
from .scales import (
    EXPERT_LAUNCHES,
    FLOOR,
    FLOOR_RATIO,
    HOP,
    HOST_MICROBATCH,
    HOST_STEP,
    Scale,
    scales,
    weights,
)
from .traffic import base_times_s

_SHARPNESS = 8.0
"""Power of the smooth maximum of launches and work; chosen on public step times, as ``_CALL_S``."""
_RUN = partial(simulate_long, start=4, period=4)
"""Pipelines longer than eight groups of micro-batches continue at their pace."""
_CALL_S = 40e-6
"""What the host takes to launch one collective."""
_LAUNCH = "launch"
Effect = tuple[str, int, int, int, int]
"""What layers of some rows share: its name, hidden size, sequence length, tp and micro-batch."""
EFFECTS = {_LAUNCH: 0.08, "width": 0.08, "tp": 0.05, "micro_batch": 0.03, "cell": 0.04}
"""How far layers lie from the global constants, in logs: launches by tp and micro-batch, their
work by hidden size and sequence, by tp, by micro-batch and by all of them.  Chosen on the public
tables; the same for all."""
_PASSES = (Placement.FORWARD, Placement.BACKWARD, Placement.RECOMPUTE)


def effects_of(row: StepRow) -> tuple[Effect, ...]:
    """The effects on a row's layers; another width has others."""
    model, tp = row.config.model, row.config.parallelism.tp
    micro = row.config.batch.micro_batch_size
    width = (model.hidden_size, model.seq_length)
    return (
        (_LAUNCH, *width, tp, micro),
        ("width", *width, 0, 0),
        ("tp", *width, tp, 0),
        ("micro_batch", *width, 0, micro),
        ("cell", *width, tp, micro),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layouts:
    """Rows ready to be timed with any constants."""

    compiled: Compiled
    base_s: Floats
    weights: Floats
    scales: tuple[Scale, ...]
    effects: tuple[Effect, ...]
    launch_effects: Floats
    """Which effects the launches of each block have, shape (blocks, effects)."""
    work_effects: Floats
    """The same of all that a block takes."""
    hops: Ints
    """Items that are messages between stages."""
    calls_s: Mapping[Placement, Floats]
    """What the host takes to launch the collectives of each block, shape (blocks, 1)."""
    is_launched: Floats
    """1 for blocks of as many kernels as a layer has, shape (blocks, 1)."""
    has_experts: NDArray[np.bool_]
    """Which blocks launch the kernels of experts, shape (blocks, 1)."""

    def log_time(self, theta: Floats) -> Floats:
        """Log step time, shape (rows, columns), of constants of shape (constants, columns)."""
        number = len(self.scales)
        named = {scale.name: theta[i] for i, scale in enumerate(self.scales)}
        times_s = self.base_s[:, np.newaxis] * np.exp(self.weights @ theta[:number])
        times_s[self.hops] += np.exp(named[HOP])
        times_s[self.compiled.host_forward] = 0.5 * np.exp(named[HOST_MICROBATCH])
        times_s[self.compiled.host_backward] = 0.5 * np.exp(named[HOST_MICROBATCH])
        times_s[self.compiled.host_step] = np.exp(named[HOST_STEP])
        launch = self.is_launched * np.exp(self.launch_effects @ theta[number:])
        launch = np.where(self.has_experts, launch * np.exp(named[EXPERT_LAUNCHES]), launch)
        work = np.exp(self.work_effects @ theta[number:])
        floor_s = launch * np.exp(named[FLOOR])
        forward_s = floor_s + self.calls_s[Placement.FORWARD]
        backward_s = floor_s * np.exp(named[FLOOR_RATIO]) + self.calls_s[Placement.BACKWARD]
        again_s = floor_s + self.calls_s[Placement.RECOMPUTE]

        def adjust(blocks: BlockTimes) -> BlockTimes:
            # Selective recomputation launches too little to wait for.
            is_whole = blocks.recompute_s > 0.5 * blocks.forward_s
            return replace(
                blocks,
                forward_s=work * larger(blocks.forward_s, forward_s),
                backward_s=work * larger(blocks.backward_s, backward_s),
                recompute_s=work * larger(blocks.recompute_s, is_whole * again_s),
            )

        found = evaluate(self.compiled, times_s, contention=CONTENTION, adjust=adjust, run=_RUN)
        return np.log(step_times(self.compiled, found))


def layouts_of(rows: Sequence[StepRow], base: BaseTimes, effects: Sequence[Effect]) -> Layouts:
    """The rows as layouts, with constants for the given effects, which hold all of the rows'."""
    compiled = compile_layouts([row.config for row in rows])
    chosen = scales(is_attention_fused=base.is_attention_fused, log_centers=base.log_centers)
    places = {effect: place for place, effect in enumerate(effects)}
    of_config = {id(row.config): effects_of(row) for row in rows}
    found = np.zeros((len(compiled.blocks), len(effects)))
    for place, (block, config) in enumerate(
        zip(compiled.blocks, compiled.block_configs, strict=True)
    ):
        if block.kind in (BlockKind.LAYER, BlockKind.EXPERT_LAYER):
            found[place, [places[effect] for effect in of_config[id(config)]]] = 1.0
    is_launch = np.array([effect[0] == _LAUNCH for effect in effects], dtype=np.float64)
    is_launched = [block.kind is not BlockKind.EMBEDDING for block in compiled.blocks]
    return Layouts(
        compiled=compiled,
        base_s=base_times_s(compiled, base),
        weights=weights(compiled.items, chosen),
        scales=chosen,
        effects=tuple(effects),
        launch_effects=found * is_launch,
        work_effects=found * (1 - is_launch),
        hops=np.flatnonzero(
            [isinstance(i, CollectiveCall) and i.role is GroupRole.PP for i in compiled.items]
        ),
        calls_s={place: _calls_s(compiled, place) for place in _PASSES},
        is_launched=np.array(is_launched, dtype=np.float64)[:, np.newaxis],
        has_experts=np.array([[b.kind is BlockKind.EXPERT_LAYER] for b in compiled.blocks]),
    )


def larger(one: Floats, other: Floats) -> Floats:
    """Smooth maximum, at most 9 % above the larger.

    >>> larger(np.array([1.0, 1.0]), np.array([0.0, 1.0])).round(3).tolist()
    [1.0, 1.091]
    """
    scale = np.maximum(np.maximum(one, other), 1e-12)
    return scale * ((one / scale) ** _SHARPNESS + (other / scale) ** _SHARPNESS) ** (1 / _SHARPNESS)


def _calls_s(compiled: Compiled, placement: Placement) -> Floats:
    counts = [
        sum(use.count for use in block.uses if use.placement is placement)
        for block in compiled.blocks
    ]
    return _CALL_S * np.array(counts, dtype=np.float64)[:, np.newaxis]
