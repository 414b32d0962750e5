"""Time hidden by prefetching, against the two-stream recurrence (Zhao et al. 2023, figure 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.timeline.compiled import compile_layouts
from forerun.calib.timeline.evaluation import evaluate, exposed_time, step_times, window_time
from forerun.calib.timeline.items import Part
from forerun.calib.timeline.overlap import ShardTimes
from forerun.calib.workload.collectives import CollectiveCall, GroupRole, Placement
from forerun.calib.workload.config import RunConfig, Sharding

Layout = Callable[..., RunConfig]
GPU = "NVIDIA H100 80GB HBM3"
SHARDED = {"is_optimizer_distributed": True, "sharding": Sharding.WEIGHTS}
OVERLAPPED = {**SHARDED, "overlaps_grad_reduce": True, "overlaps_param_gather": True}


def forward_s(num: int, gather_s: float, pass_s: float) -> float:
    """Layers compute one after another, each after its gather; a gather runs beside the layer
    before."""
    gathered = done = 0.0
    for _ in range(num):
        gathered += gather_s
        done = max(done, gathered) + pass_s
    return done


@given(
    num=st.integers(1, 12),
    gather_s=st.floats(0, 3, allow_subnormal=False),
    pass_s=st.floats(0.1, 3),
)
def test_a_forward_pass_is_that_of_two_streams(num: int, gather_s: float, pass_s: float) -> None:
    zero = np.zeros((1, 1))
    shards = ShardTimes(
        gather_s=zero + gather_s,
        backward_s=zero,
        reduce_s=zero,
        open_s={Placement.FORWARD: zero, Placement.BACKWARD: zero},
        contention=1.0,
        is_host_only=False,
    )
    compute_s = zero + pass_s
    each = compute_s + shards.exposed(Placement.FORWARD, compute_s)
    values = num * each + shards.edge(Placement.FORWARD, compute_s)
    assert values.item() == pytest.approx(forward_s(num, gather_s, pass_s), rel=1e-9)


@given(
    chunks=st.integers(1, 6),
    buckets=st.integers(1, 4),
    turn=st.integers(1, 8),
    reduce_s=st.floats(0, 30, allow_subnormal=False),
)
def test_gradients_of_chunks_hide_behind_the_turns_that_follow(
    chunks: int, buckets: int, turn: int, reduce_s: float
) -> None:
    """Against two streams: each chunk runs its turn, in whose last micro-batch its buckets fill."""
    done = sent = 0.0
    for _ in range(chunks):
        for bucket in range(buckets):
            full = done + turn - 1 + (bucket + 1) / buckets
            sent = max(sent, full) + reduce_s
        done += turn
    number, pass_s = np.array([float(chunks * buckets)]), np.array([float(chunks)])
    window_s = window_time(pass_s, number, chunks, turn)
    total_s = np.array([chunks * buckets * reduce_s])
    value = exposed_time(total_s, np.array([reduce_s]), window_s, 1.0).item()
    # Short transfers wait for the buckets to fill, which the law leaves out.
    assert value <= sent - done + 1e-9
    if reduce_s * buckets >= turn or chunks == 1 == buckets:
        assert value == pytest.approx(sent - done, rel=1e-9)


def step_s(config: RunConfig, transfer_s: float, contention: float = 1.0) -> tuple[float, float]:
    """The step with that much for each data-parallel transfer, and its data-parallel part."""
    compiled = compile_layouts([config])
    times_s = np.full((len(compiled.items), 1), 1e-3)
    for place, item in enumerate(compiled.items):
        if isinstance(item, CollectiveCall) and item.role is GroupRole.DP:
            times_s[place] = transfer_s
    groups = evaluate(compiled, times_s, contention=contention)
    return step_times(compiled, groups).item(), groups[0].parts_s(0)[Part.DP]


def test_short_transfers_hide_but_for_the_ends_and_parts_add_up(layout: Layout) -> None:
    config = layout(dp=4, device=GPU, samples=16, par=OVERLAPPED)
    free, none = step_s(config, 0.0)
    short, part = step_s(config, 1e-4)
    assert none == 0.0
    assert short - free == pytest.approx(part, rel=1e-9)
    num_layers, num = config.model.num_layers, config.num_microbatches
    # The embedding's own, which has one operator to hide behind, and one layer's in each pass.
    assert 0 < short - free < num * num_layers * 1e-4


def test_without_overlap_and_on_a_host_every_transfer_counts(layout: Layout) -> None:
    for device, par in ((GPU, SHARDED), ("cpu", OVERLAPPED)):
        config = layout(dp=4, device=device, samples=16, par=par)
        free, _ = step_s(config, 0.0)
        slow, part = step_s(config, 1e-2)
        # Layers three times; embedding and head stay gathered for the backward pass.
        num_transfers = 3 * config.model.num_layers + 2 * 2
        each = slow - free
        assert each == pytest.approx(config.num_microbatches * num_transfers * 1e-2, rel=1e-6)
        assert part == pytest.approx(each, rel=1e-9)


def test_late_gathers_have_nothing_beside_them(layout: Layout) -> None:
    """FSDP's ``BACKWARD_POST``: each layer's second gather counts, its reduction still hides."""
    early = layout(dp=4, device=GPU, samples=16, par=OVERLAPPED)
    late = layout(dp=4, device=GPU, samples=16, par={**OVERLAPPED, "prefetches_backward": False})
    (fast, _), (slow, _) = step_s(early, 1e-4), step_s(late, 1e-4)
    num_units = early.num_microbatches * early.model.num_layers
    assert slow - fast == pytest.approx(num_units * 1e-4, rel=1e-6)


@pytest.mark.parametrize("sharding", list(Sharding))
def test_a_slower_transfer_never_makes_the_step_faster(layout: Layout, sharding: Sharding) -> None:
    par: dict[str, Any] = {**OVERLAPPED, "sharding": sharding}
    config = layout(dp=4, pp=2, device=GPU, samples=32, par=par)
    steps = [step_s(config, transfer_s, 1.3)[0] for transfer_s in (0.0, 1e-4, 1e-3, 1e-2, 1e-1)]
    assert steps == sorted(steps)


def test_hybrid_sharding_takes_transfers_off_the_network(layout: Layout) -> None:
    """Shards within a node: gathers cross none, and what crosses is a shard."""
    par = {**OVERLAPPED, "ranks_per_node": 4}
    whole = layout(dp=8, device=GPU, samples=32, par=par)
    hybrid = layout(dp=8, device=GPU, samples=32, par={**par, "num_optimizer_instances": 2})

    def crossing(config: RunConfig) -> float:
        items = compile_layouts([config]).items
        return sum(i.nbytes for i in items if isinstance(i, CollectiveCall) and i.num_nodes > 1)

    assert 0 < crossing(hybrid) < crossing(whole) / 4
