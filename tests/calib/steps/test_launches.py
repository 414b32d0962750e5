"""Effects of graphs, recompute, overlap and routing on a step of experts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_shape import of_width

from forerun.calib.layers.blocks import BlockKind, block
from forerun.calib.layers.launches import launched_frac, recomputed_launch_frac, replayed_frac
from forerun.calib.steps._scales import HOST_MICROBATCH, HOST_STEP
from forerun.calib.steps.base_times import prior_times
from forerun.calib.steps.known_steps import KnownStep
from forerun.calib.steps.model import FittedSteps, fit_steps
from forerun.calib.timeline.compiled import compile_layouts
from forerun.calib.timeline.evaluation import evaluate
from forerun.calib.timeline.items import Item, Part
from forerun.calib.workload.collectives import CollectiveCall, GroupRole
from forerun.calib.workload.config import (
    Batch,
    Dispatcher,
    Experts,
    Parallelism,
    PositionEmbedding,
    Precision,
    Recompute,
    RunConfig,
)
from forerun.calib.workload.operators import OperatorKind, Phase

BASE = prior_times("H100", is_attention_fused=True)
EXPERTS = Experts(
    num_experts=32,
    top_k=4,
    ffn_hidden_size=512,
    dispatcher=Dispatcher.FLEX,
    is_grouped=True,
    is_balance_forced=True,
)


def config(
    *, hidden: int = 1024, m: int = 4, pp: int = 1, experts: Experts | None = EXPERTS
) -> RunConfig:
    rope = PositionEmbedding.ROPE
    model = of_width(hidden, num_layers=8, position_embedding=rope, experts=experts)
    return RunConfig(
        model=model,
        parallelism=Parallelism(dp=16, pp=pp, ep=16 if experts else 1, etp=1, ranks_per_node=8),
        batch=Batch(micro_batch_size=1, global_batch_size=16 * m),
        precision=Precision.BF16,
        device="H100",
    )


def routed(base: RunConfig, **changed: Any) -> RunConfig:
    model = base.model
    assert model.experts is not None
    return replace(base, model=replace(model, experts=replace(model.experts, **changed)))


def seconds(layout: RunConfig) -> float:
    return float(FittedSteps(base=BASE).median_times([layout])[0])


def test_wider_graphs_are_never_slower_and_a_whole_one_leaves_the_work() -> None:
    plain = config()
    scopes = [("moe_router",), ("moe_router", "moe_preprocess")]
    scopes += [("attn", "moe_router", "moe_preprocess"), (), ("full_iteration",)]
    graphs = [replace(plain, uses_cuda_graphs=True, cuda_graph_scope=scope) for scope in scopes]
    times = [seconds(one) for one in (plain, *graphs)]
    assert all(after < before for before, after in itertools.pairwise(times))
    # Nothing of the host is left: a host of any speed gives the same.
    whole = graphs[-1]
    estimate = FittedSteps(base=BASE).estimate(whole)
    assert estimate.parts_s[Part.HOST] == 0.0
    names = {f"scale {name}" for name in (HOST_MICROBATCH, HOST_STEP, "floor")}
    assert all(abs(estimate.error_log.get(name, 0.0)) < 1e-6 for name in names)


def test_what_a_graph_replays() -> None:
    dense, scoped = config(experts=None), replace(config(), uses_cuda_graphs=True)
    assert replayed_frac(config(), BlockKind.EXPERT_LAYER) == 0.0
    assert replayed_frac(scoped, BlockKind.EXPERT_LAYER) == 1.0
    assert replayed_frac(scoped, BlockKind.HEAD) == 0.0
    both = replace(dense, uses_cuda_graphs=True, cuda_graph_scope=("attn", "mlp"))
    assert replayed_frac(both, BlockKind.LAYER) == 1.0
    padded = routed(config(), capacity_factor=1.0, is_padded_to_capacity=True)
    assert launched_frac(padded, BlockKind.EXPERT_LAYER) == 1.0
    assert launched_frac(config(), BlockKind.EXPERT_LAYER) > 1.0
    assert launched_frac(dense, BlockKind.LAYER) == 1.0


def test_buffers_of_a_stated_size_spare_the_host_its_wait() -> None:
    static = routed(config(), rank_capacity_factor=1.5)
    assert launched_frac(static, BlockKind.EXPERT_LAYER) == 1.0
    assert seconds(static) < seconds(config())


def test_a_grace_host_is_slower_where_launches_bound_a_layer_and_nowhere_else() -> None:
    """One layer's launches last longer by one factor; work that hides them, or a graph, by none."""
    x86 = FittedSteps(base=prior_times("B200", is_attention_fused=True))
    slower = []
    for hidden in (1024, 8192):
        steps = [config(hidden=hidden, experts=None)]
        steps.append(replace(steps[0], uses_cuda_graphs=True, cuda_graph_scope=("full_iteration",)))
        x86_s, grace_s = (
            np.array([x86.median_times([replace(one, device=name)])[0] for one in steps])
            for name in ("B200", "GB200")
        )
        slower.append((grace_s / x86_s).tolist())
    assert 1.1 < slower[0][0] < 1.3
    assert slower[1][0] < 1.02
    assert [one[1] for one in slower] == pytest.approx([1.0, 1.0], rel=1e-9)


@pytest.mark.parametrize("is_launch_bound", [True, False])
def test_recomputed_modules_cost_in_their_order(is_launch_bound: bool) -> None:
    small = config(hidden=256 if is_launch_bound else 4096)
    modules = [("moe_act",), ("layernorm", "moe_act"), ("layernorm", "moe")]
    recomputed = [
        replace(small, recompute=Recompute.SELECTIVE, recompute_modules=names) for names in modules
    ]
    whole = replace(small, recompute=Recompute.FULL)
    times = [seconds(one) for one in (small, *recomputed, whole)]
    assert all(after > before for before, after in itertools.pairwise(times))
    fracs = [
        recomputed_launch_frac(block(one, BlockKind.EXPERT_LAYER)) for one in (small, *recomputed)
    ]
    assert fracs[0] == 0.0 and all(np.diff(fracs) > 0)
    assert recomputed_launch_frac(block(whole, BlockKind.EXPERT_LAYER, is_recomputed=True)) == 1.0


@pytest.mark.parametrize(("transfer_s", "delays"), [(1e-3, True), (9e-3, True), (9e-3, False)])
def test_an_exchange_beside_another_micro_batch_hides_behind_half_of_both_passes(
    transfer_s: float, delays: bool
) -> None:
    """By hand: each product 1 ms a pass and direction, everything else nothing."""
    overlapped = routed(config(), overlaps_exchange=True, delays_weight_gradients=delays)
    compiled = compile_layouts([overlapped])

    def time_s(item: Item) -> float:
        if isinstance(item, CollectiveCall):
            return transfer_s if item.role is GroupRole.EXPERT_TP_EP else 0.0
        if item.kind is not OperatorKind.GROUPED_LINEAR:
            return 0.0
        return 2e-3 if item.phase is Phase.BACKWARD else 1e-3

    times_s = np.array([[time_s(item)] for item in compiled.items])
    (group_times,) = evaluate(compiled, times_s, contention=1.0)
    # A layer has two products: 2 ms forwards and 4 ms backwards, half of that weights' gradients.
    window_s = 0.5 * (2e-3 + (4e-3 if delays else 2e-3))
    # There and back in each pass.
    exposed_s = 2 * max(0.0, 2 * transfer_s - window_s)
    layers, m = overlapped.model.num_layers, overlapped.num_microbatches
    assert group_times.parts_s(0)[Part.EP] == pytest.approx(layers * m * exposed_s)


def test_imbalance_costs_products_and_exchange() -> None:
    even = config(hidden=4096)
    chosen = routed(even, is_balance_forced=False)
    times = [seconds(routed(chosen, imbalance=imbalance)) for imbalance in (1.0, 1.5, 2.0)]
    assert times[0] < times[1] < times[2] < 2 * times[0]
    # Imbalance that was not counted is less certain.
    first, second = (
        FittedSteps(base=BASE).estimate(routed(even, is_balance_forced=is_forced)).sigma_log
        for is_forced in (True, False)
    )
    assert second > first


def test_a_release_moves_its_own_level_and_an_unseen_one_is_wider() -> None:
    """Planted: the second release is 1.15 times slower in every layout."""
    layouts = [config(m=m, hidden=hidden) for m in (4, 8) for hidden in (1024, 2048, 4096)]
    old, new = ([replace(c, framework=name) for c in layouts] for name in ("core 1", "core 2"))
    known = [KnownStep(config=c, time_s=seconds(c)) for c in old]
    known += [KnownStep(config=c, time_s=1.15 * seconds(c)) for c in new[:4]]
    fitted = fit_steps(BASE, known)
    unseen = config(m=16, hidden=2048)
    one, two, three = fitted.estimates(
        [replace(unseen, framework=name) for name in ("core 1", "core 2", "core 3")]
    )
    assert math.log(two.time_s / one.time_s) == pytest.approx(math.log(1.15), abs=0.05)
    assert one.time_s < three.time_s < two.time_s
    assert three.sigma_log > max(one.sigma_log, two.sigma_log)


def test_messages_between_nodes_that_nobody_sampled_are_wider() -> None:
    shape = config(m=8, experts=None)

    def layout(pp: int, ranks_per_node: int) -> RunConfig:
        par = Parallelism(dp=16 // pp, pp=pp, ranks_per_node=ranks_per_node)
        return replace(shape, parallelism=par)

    def width(known: list[RunConfig], target: RunConfig) -> float:
        steps = [KnownStep(config=one, time_s=seconds(one)) for one in known]
        return fit_steps(BASE, steps).estimate(target).sigma_log

    target = layout(4, 4)
    inside, across = layout(2, 16), layout(2, 8)
    name = "pp across nodes, never sampled"
    estimate = fit_steps(BASE, [KnownStep(config=inside, time_s=seconds(inside))]).estimate(target)
    assert estimate.error_log[name] > 0
    assert width([inside], target) > width([across], target)
    assert width([inside], inside) < width([inside], target)
