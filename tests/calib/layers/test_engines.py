"""Transfers of one layer under both engines, and with parallel branches."""

from __future__ import annotations

from collections.abc import Callable

from forerun.calib.layers.blocks import BlockKind, block
from forerun.calib.workload.collectives import GroupRole, Placement
from forerun.calib.workload.config import Engine, RunConfig

Layout = Callable[..., RunConfig]


def test_pytorch_hides_no_transfer_behind_a_product(layout: Layout) -> None:
    hidden = {}
    for engine in Engine:
        config = layout(tp=2, pp=2, dp=2, par={"engine": engine})
        hidden[engine] = [u for u in block(config, BlockKind.LAYER).uses if u.is_overlapped]
    assert hidden[Engine.MEGATRON] and not hidden[Engine.TORCH]


def test_parallel_branches_share_the_sum_of_the_forward_pass(layout: Layout) -> None:
    """GPT-NeoX: one all-reduce forwards where a plain layer has two, two backwards in both."""
    counts = []
    for is_parallel in (False, True):
        config = layout(tp=2, model={"is_residual_parallel": is_parallel})
        uses = [u for u in block(config, BlockKind.LAYER).uses if u.call.role is GroupRole.TP]
        by_pass = {
            placement: sum(u.count for u in uses if u.placement is placement)
            for placement in (Placement.FORWARD, Placement.BACKWARD)
        }
        counts.append((by_pass[Placement.FORWARD], by_pass[Placement.BACKWARD]))
    assert counts == [(2, 2), (1, 2)]
