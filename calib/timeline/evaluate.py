"""Step times of compiled layouts from the times of their items: the one place that adds them up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .block_times import BlockTimes, beyond
from .compiled import Compiled, LayoutGroup, Transfers
from .items import PASS_PARTS, Floats, Part
from .costs import PipelineCosts, pipeline_costs
from .simulate import Simulation, simulate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupTimes:
    """Seconds of the layouts of a group; arrays end in (layouts, alternatives)."""

    group: LayoutGroup
    costs: PipelineCosts
    pipeline: Simulation
    """Columns are layouts x alternatives."""
    ready_s: Floats
    """When each stage has its gradients, shape (stages, layouts, alternatives)."""
    total_s: Floats
    """Step time, shape (layouts, alternatives)."""
    blocks: BlockTimes
    reduce_s: Floats
    """Exposed time of the gradient reduction, shape (stages, layouts, alternatives)."""
    gather_s: Floats
    finish_s: Floats
    embedding_s: Floats
    optimizer_s: Floats
    host_s: tuple[Floats, Floats, Floats]
    """Of a forward pass, a backward pass and a step, shape (alternatives,)."""

    def critical_stage(self, layout: int) -> int:
        """The stage whose gradients are ready last."""
        return int(np.argmax(self.ready_s[:, layout, 0]))

    def parts_s(self, layout: int) -> dict[Part, float]:
        """Seconds of the critical stage by part, first alternative; they add up to the step."""
        stage = self.critical_stage(layout)
        pipeline, m = self.group.pipeline, self.group.pipeline.num_microbatches
        chunks = slice(stage, None, pipeline.num_stages)
        held = self.group.counts[chunks].sum(axis=0)
        places = self.group.blocks[layout]

        def blocks(values: Floats) -> float:
            return m * float(held @ values[places, 0])

        column = layout * self.total_s.shape[1]
        forward, backward, step = (float(host[0]) for host in self.host_s)
        parts = {
            Part.FORWARD: blocks(self.blocks.forward_s),
            Part.BACKWARD: blocks(self.blocks.backward_s),
            Part.RECOMPUTE: blocks(self.blocks.recompute_s),
            **{part: blocks(self.blocks.part_s(part)) for part in PASS_PARTS},
            Part.PP: float(self.pipeline.transfer_s[stage, column]),
            Part.DP: float(
                (self.reduce_s + self.gather_s)[stage, layout, 0] + self.embedding_s[layout, 0]
            ),
            Part.OPTIMIZER: float(self.optimizer_s[stage, layout, 0]),
            Part.HOST: m * pipeline.num_virtual_stages * (forward + backward) + step,
        }
        parts[Part.TP] += float(self.finish_s[stage, layout, 0])
        parts[Part.BUBBLE] = max(0.0, float(self.total_s[layout, 0]) - sum(parts.values()))
        return parts


def evaluate(
    compiled: Compiled,
    times_s: Floats,
    *,
    contention: float | Floats,
    adjust: Callable[[BlockTimes], BlockTimes] | None = None,
) -> list[GroupTimes]:
    """The steps of every group of layouts.

    ``times_s`` holds the seconds of each item in each alternative, shape (items, alternatives);
    ``adjust`` may change the times of the blocks before they are added up.
    """
    blocks = compiled.sums.times(times_s, contention=contention, is_host_only=compiled.is_host_only)
    if adjust is not None:
        blocks = adjust(blocks)
    return [_evaluate(compiled, group, blocks, times_s, contention) for group in compiled.groups]


def step_times(compiled: Compiled, groups: list[GroupTimes]) -> Floats:
    """Step times in the order of the layouts, shape (layouts, alternatives)."""
    out = np.empty((len(compiled.configs), groups[0].total_s.shape[1]))
    for found in groups:
        out[found.group.members] = found.total_s
    return out


def _evaluate(
    compiled: Compiled,
    group: LayoutGroup,
    blocks: BlockTimes,
    times_s: Floats,
    contention: float | Floats,
) -> GroupTimes:
    num_layouts, num_columns = len(group.members), times_s.shape[1]
    num_stages = group.pipeline.num_stages
    hosts = tuple(
        times_s[place]
        for place in (compiled.host_forward, compiled.host_backward, compiled.host_step)
    )

    def chunks(values: Floats) -> Floats:
        """(chunks, layouts, alternatives) from (blocks, alternatives)."""
        return np.einsum("cj,rjk->crk", group.counts, values[group.blocks])

    def stages(values: Floats) -> Floats:
        """(stages, layouts, alternatives) from rows of layouts x stages."""
        return values.reshape(num_layouts, num_stages, num_columns).transpose(1, 0, 2)

    def by_stage(values: Floats) -> Floats:
        """Sums over the chunks of each stage."""
        return values.reshape(-1, num_stages, num_layouts, num_columns).sum(axis=0)

    forward = chunks(blocks.forward_pass_s) + hosts[0]
    backward = chunks(blocks.backward_pass_s) + hosts[1]
    reduce_s = stages(_exposed(group.reduces, times_s, by_stage(backward), contention))
    gather_s = stages(_exposed(group.gathers, times_s, by_stage(forward), contention))
    costs = _costs(compiled, group, forward, backward, chunks(blocks.weight_s), times_s, gather_s)
    pipeline = simulate(costs, group.pipeline)
    finish_s = stages(group.finishes @ times_s)
    embedding_s = group.embedding @ times_s
    end_s = pipeline.end_s.reshape(num_stages, num_layouts, num_columns)
    ready_s = end_s + reduce_s + finish_s
    if embedding_s.any():
        ends = [0, num_stages - 1]
        ready_s[ends] = ready_s[ends].max(axis=0) + embedding_s
    optimizer_s = times_s[group.optimizer].transpose(1, 0, 2)
    tails = optimizer_s + hosts[2] + (0.0 if group.gathers_ahead else gather_s)
    return GroupTimes(
        group=group,
        costs=costs,
        pipeline=pipeline,
        ready_s=ready_s,
        # The gradient norm is summed over all stages: no optimizer starts before the last is ready.
        total_s=ready_s.max(axis=0) + tails.max(axis=0),
        blocks=blocks,
        reduce_s=reduce_s,
        gather_s=gather_s,
        finish_s=finish_s,
        embedding_s=embedding_s,
        optimizer_s=optimizer_s,
        host_s=hosts,
    )


def _costs(
    compiled: Compiled,
    group: LayoutGroup,
    forward: Floats,
    backward: Floats,
    weight: Floats,
    times_s: Floats,
    gather_s: Floats,
) -> PipelineCosts:
    def flat(values: Floats) -> Floats:
        return values.reshape(values.shape[0], values.shape[1] * values.shape[2])

    hops = flat(times_s[group.hops].transpose(1, 0, 2))
    starts = gather_s if group.gathers_ahead else 0 * gather_s
    return pipeline_costs(
        flat(forward),
        flat(backward),
        weight_gradient_s=flat(weight),
        activation_s=hops,
        gradient_s=hops,
        # Where the cores copy, two directions at once take the time of both.
        both_s=hops * (2 if compiled.is_host_only else 1),
        start_s=flat(starts),
        num_virtual_stages=group.pipeline.num_virtual_stages,
    )


def exposed_time(
    total_s: Floats, last_s: Floats, number: Floats, pass_s: Floats, contention: float | Floats
) -> Floats:
    """Exposed part of transfers that are issued one after another while a pass goes on.

    All but the last run beside the part of the pass that is still to come, (1 - 1/n) of it; the
    last one begins when the pass ends.  The bucket that the backward phase fills last is the one
    that the forward phase needs first: in both directions nothing hides it.
    """
    return last_s + beyond(total_s - last_s, pass_s * (1 - 1 / number), contention)


def _exposed(
    transfers: Transfers, times_s: Floats, pass_s: Floats, contention: float | Floats
) -> Floats:
    """Exposed time per row of layouts x stages; ``pass_s`` has (stages, layouts, alternatives)."""
    total = transfers.total @ times_s
    if not transfers.is_overlapped:
        return total
    window = pass_s.transpose(1, 0, 2).reshape(total.shape)
    number = transfers.number[:, np.newaxis]
    return exposed_time(total, transfers.last @ times_s, number, window, contention)
