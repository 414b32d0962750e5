"""Which probes a run asks for: what other layouts need and it lacks, the same list on all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.calib.advice.probe_sizes import CollectiveProbe, OperatorProbe, fingerprint
from forerun.calib.advice.probes import group_roles, probe_plan
from forerun.calib.layers.stage_work import stage_operators, step_collectives
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.calib.workload.config import (
    Batch,
    Experts,
    Fp8Recipe,
    ModelShape,
    Parallelism,
    Precision,
    RunConfig,
)
from forerun.calib.workload.operators import OperatorKind

MODEL = ModelShape(
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=1024,
    num_attention_heads=8,
    num_query_groups=8,
    kv_channels=32,
    seq_length=256,
    vocab_size=1024,
)


def config(**degrees: int) -> RunConfig:
    return RunConfig(
        model=MODEL,
        parallelism=Parallelism(**degrees),
        batch=Batch(micro_batch_size=2, global_batch_size=16),
    )


DP2 = config(dp=2, ranks_per_node=2)


def test_a_data_parallel_run_asks_for_what_two_tensor_parallel_ranks_would_do() -> None:
    probes = probe_plan(DP2, budget_s=100.0)
    tp2 = config(tp=2, ranks_per_node=2)
    wanted = {o for o, _ in stage_operators(tp2, 0).forward if o.shape}
    present = {o for o, _ in stage_operators(DP2, 0).forward}
    probed = {(p.kind, p.shape) for p in probes if isinstance(p, OperatorProbe)}
    assert {(o.kind, o.shape) for o in wanted - present} <= probed
    calls = {p.call for p in probes if isinstance(p, CollectiveProbe)}
    needed = {call for call, _ in step_collectives(tp2, stage=0)}
    assert needed <= calls
    assert any(call.collective is Collective.SEND for call in calls)
    assert {p.over for p in probes if isinstance(p, CollectiveProbe)} == {GroupRole.DP}


def test_what_the_run_has_is_probed_as_a_control_only() -> None:
    probes = [p for p in probe_plan(DP2, budget_s=100.0) if isinstance(p, OperatorProbe)]
    done = stage_operators(DP2, 0)
    present = {(o.kind, o.shape) for o, _ in (*done.forward, *done.step)}
    assert all(((p.kind, p.shape) in present) == p.is_control for p in probes)
    kinds = [p.kind for p in probes]
    controlled = [p.kind for p in probes if p.is_control]
    assert len(controlled) == len(set(controlled))
    assert all(probes[kinds.index(kind)].is_control for kind in controlled)


def test_the_largest_transfer_of_the_run_is_the_control_of_its_kind() -> None:
    """Gradients over the replicas; nothing is sent in the run, so sends have none."""
    probes = [p for p in probe_plan(DP2, budget_s=100.0) if isinstance(p, CollectiveProbe)]
    present = [call for call, _ in step_collectives(DP2, stage=0) if call.num_ranks == 2]
    (control,) = [p for p in probes if p.is_control]
    assert control.call.nbytes == max(call.nbytes for call in present)
    kinds = [p.call.collective for p in probes]
    assert probes[kinds.index(Collective.ALL_REDUCE)] is control
    assert not {p.call for p in probes if not p.is_control} & set(present)


@pytest.mark.parametrize("budget_s", [0.0, 0.3, 2.0])
def test_the_expected_cost_is_within_the_budget(budget_s: float) -> None:
    probes = probe_plan(DP2, budget_s=budget_s)
    assert sum(p.cost_s for p in probes) <= budget_s
    values = [p.value for p in probes if not p.is_control]
    assert values == sorted(values, reverse=True)


def test_equal_runs_have_equal_lists_and_others_have_not() -> None:
    twin = RunConfig.from_json(DP2.to_json())
    assert probe_plan(twin, budget_s=5.0) == probe_plan(DP2, budget_s=5.0)
    other = replace(DP2, model=replace(MODEL, hidden_size=512, kv_channels=64))
    names = {fingerprint(probe_plan(c, budget_s=5.0)) for c in (DP2, twin, other)}
    assert len(names) == 2


def test_only_groups_of_the_same_ranks_and_nodes_carry() -> None:
    across = config(dp=2, ranks_per_node=1)
    assert group_roles(across) == {(2, 2): GroupRole.DP}
    assert group_roles(config(tp=2, dp=4, ranks_per_node=2)) == {
        (2, 1): GroupRole.TP,
        (4, 4): GroupRole.DP,
    }
    assert not [p for p in probe_plan(config(), budget_s=9.0) if isinstance(p, CollectiveProbe)]


def test_an_accelerator_has_two_controls_where_the_run_has_two_shapes() -> None:
    """The dense layers' products and the experts', and reductions of activations and gradients."""
    experts = Experts(num_experts=4, ffn_hidden_size=512, layer_pattern=(False, True, True, True))
    run = replace(DP2, model=replace(MODEL, experts=experts))
    for device, number in (("cpu", 1), ("NVIDIA H100 80GB HBM3", 2)):
        probes = probe_plan(replace(run, device=device), budget_s=1000.0)
        controls = [p for p in probes if isinstance(p, OperatorProbe) and p.is_control]
        shapes = [p.shape for p in controls if p.kind is OperatorKind.LINEAR_FC1]
        assert len(set(shapes)) == len(shapes) == number
        assert len([p for p in controls if p.kind is OperatorKind.LINEAR_QKV]) == 1
        both = probe_plan(replace(config(tp=2, dp=2), device=device), budget_s=1000.0)
        calls = [p.call for p in both if isinstance(p, CollectiveProbe) and p.is_control]
        sizes = [c.nbytes for c in calls if c.collective is Collective.ALL_REDUCE]
        assert len(set(sizes)) == len(sizes) == number


def test_products_of_8_bits_are_not_asked_for() -> None:
    run = replace(DP2, device="NVIDIA H100 80GB HBM3", precision=Precision.BF16)
    narrow = replace(run, fp8=Fp8Recipe.DELAYED)
    kinds, probed = (
        {p.kind for p in probe_plan(one, budget_s=1000.0) if isinstance(p, OperatorProbe)}
        for one in (run, narrow)
    )
    assert kinds - probed == {kind for kind in kinds if kind.is_linear} - {OperatorKind.LOGITS}
