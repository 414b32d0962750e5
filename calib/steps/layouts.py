"""Step times of some layouts as a function of the scales and of what each cell of layers adds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..samples.step_rows import StepRow
from ..timeline.block_times import BlockTimes
from ..timeline.compiled import Compiled, compile_layouts
from ..timeline.evaluate import evaluate, step_times
from ..timeline.items import PASS_PARTS, Floats, Ints
from ..workload.blocks import BlockKind
from ..workload.collectives import CollectiveCall, GroupRole, Placement
from ..workload.config import PositionEmbedding
from ..workload.operators import Operator, OperatorKind, Phase
from .base_times import BaseTimes
from .scales import (
    FLOOR,
    FLOOR_RATIO,
    HOP,
    HOST_MICROBATCH,
    HOST_STEP,
    Scale,
    weights,
)

_SHARPNESS = 6.0
"""Power of the smooth maximum of launches and work."""
_CONTENTION = 1.3
_CALL_S = 40e-6
_HIDES = False
Effect = tuple[str, int, int, int, int]
"""What layers of some rows share: its name, hidden size, sequence length, tp and micro-batch."""
EFFECTS = {"launch": 0.1, "tp": 0.05, "micro_batch": 0.03, "cell": 0.04}
"""How far layers lie from the global constants by tp, by micro-batch and by both; logs."""


def effects_of(row: StepRow) -> tuple[Effect, ...]:
    """The effects on a row's layers; another width has others."""
    model, tp = row.config.model, row.config.parallelism.tp
    micro = row.config.batch.micro_batch_size
    width = (model.hidden_size, model.seq_length)
    return (
        ("launch", *width, tp, micro),
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
    block_effects: Floats
    """Which effects each block has, shape (blocks, effects)."""
    hops: Ints
    calls: dict[Placement, Floats]
    """Collectives that each block launches in a pass, shape (blocks,)."""

    @property
    def num_constants(self) -> int:
        """Scales and effects together."""
        return len(self.scales) + len(self.effects)

    def log_time(self, theta: Floats) -> Floats:
        """Log step time, shape (rows, columns), of constants of shape (constants, columns)."""
        number = len(self.scales)
        named = {scale.name: theta[i] for i, scale in enumerate(self.scales)}
        times_s = self.base_s[:, np.newaxis] * np.exp(self.weights @ theta[:number])
        times_s[self.hops] += np.exp(named[HOP])
        times_s[self.compiled.host_forward] = 0.5 * np.exp(named[HOST_MICROBATCH])
        times_s[self.compiled.host_backward] = 0.5 * np.exp(named[HOST_MICROBATCH])
        times_s[self.compiled.host_step] = np.exp(named[HOST_STEP])
        is_launch = np.array([effect[0] == "launch" for effect in self.effects], dtype=float)
        factor = np.exp((self.block_effects * (1 - is_launch)) @ theta[number:])
        launch = np.exp((self.block_effects * is_launch) @ theta[number:])
        is_launched = np.array(
            [b.kind is not BlockKind.EMBEDDING for b in self.compiled.blocks]
        )[:, np.newaxis]

        def adjust(blocks: BlockTimes) -> BlockTimes:
            floors = {
                Placement.FORWARD: np.exp(named[FLOOR]),
                Placement.BACKWARD: np.exp(named[FLOOR] + named[FLOOR_RATIO]),
                Placement.RECOMPUTE: np.exp(named[FLOOR]),
            }
            def launched(place, work_s):
                host = launch * floors[place] + _CALL_S * self.calls[place][:, np.newaxis]
                host = np.where(is_launched, host, 0.0)
                if place is Placement.RECOMPUTE:
                    host = np.where(work_s > 0.5 * blocks.forward_s, host, 0.0)
                if _HIDES:
                    sent = sum(blocks.transfer_s[place, part] for part in PASS_PARTS)
                    return factor * (_larger(work_s + sent, host) - sent)
                return factor * _larger(work_s, host)
            return replace(
                blocks,
                forward_s=launched(Placement.FORWARD, blocks.forward_s),
                backward_s=launched(Placement.BACKWARD, blocks.backward_s),
                recompute_s=launched(Placement.RECOMPUTE, blocks.recompute_s),
            )

        found = evaluate(self.compiled, times_s, contention=_CONTENTION, adjust=adjust)
        return np.log(step_times(self.compiled, found))


def layouts_of(
    rows: Sequence[StepRow], base: BaseTimes, chosen: Sequence[Scale], effects: Sequence[Effect]
) -> Layouts:
    """The rows as layouts, with constants for the given effects."""
    compiled = compile_layouts([row.config for row in rows])
    places = {effect: place for place, effect in enumerate(effects)}
    of_config = {id(row.config): effects_of(row) for row in rows}
    found = np.zeros((len(compiled.blocks), len(effects)))
    for place, (block, config) in enumerate(
        zip(compiled.blocks, compiled.block_configs, strict=True)
    ):
        if block.kind in (BlockKind.LAYER, BlockKind.EXPERT_LAYER):
            found[place, [places[effect] for effect in of_config[id(config)]]] = 1.0
    return Layouts(
        compiled=compiled,
        base_s=_base_times_s(compiled, base),
        hops=np.array([p for p, i in enumerate(compiled.items) if isinstance(i, CollectiveCall) and i.role is GroupRole.PP], dtype=np.int64),
        calls={place: _calls(compiled, place) for place in (Placement.FORWARD, Placement.BACKWARD, Placement.RECOMPUTE)},
        weights=weights(compiled.items, chosen),
        scales=tuple(chosen),
        effects=tuple(effects),
        block_effects=found,
    )


def _larger(one: Floats, other: Floats) -> Floats:
    """Smooth maximum."""
    scale = np.maximum(np.maximum(one, other), 1e-12)
    return scale * ((one / scale) ** _SHARPNESS + (other / scale) ** _SHARPNESS) ** (1 / _SHARPNESS)


_OPTIMIZER_NBYTES = 40.0
"""Traffic of mixed-precision Adam for one parameter.

Read and write of weight, two moments (24) and the half-precision copy (6), gradient copied,
unscaled and normed (20), zeroed (4).
"""


def _base_times_s(compiled: Compiled, base: BaseTimes) -> Floats:
    """Base times, with what the operators' laws take for another thing."""
    out = base.times_s(compiled.items)
    bytes_per_s = base.machine.prior.ceilings.bytes_per_s
    splits = _splits(compiled)
    for place, item in enumerate(compiled.items):
        if not isinstance(item, Operator):
            continue
        if item.kind is OperatorKind.OPTIMIZER and "optimizer/step" not in base.machine.pools:
            out[place] = item.shape[0] * _OPTIMIZER_NBYTES / bytes_per_s
        elif item in splits:
            is_joined = item.phase is Phase.BACKWARD
            out[place] = 2 * is_joined * math.prod(item.shape) * item.element_nbytes / bytes_per_s
    return out


def _splits(compiled: Compiled) -> set[Operator]:
    """Operators between the product of queries, keys, values and attention that rotate nothing.

    Forwards they are views; backwards one copy joins the three gradients.
    """
    return {
        operator
        for block, config in zip(compiled.blocks, compiled.block_configs, strict=True)
        if config.model.position_embedding is not PositionEmbedding.ROPE
        for operator, _ in block.operators
        if operator.kind is OperatorKind.POSITION
    }


def _calls(compiled: Compiled, placement: Placement) -> Floats:
    return np.array([float(sum(use.count for use in block.uses if use.placement is placement)) for block in compiled.blocks])
