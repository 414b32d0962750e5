from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stage_tensors import parameters

from forerun.calib.errors import ConfigError
from forerun.calib.layers.blocks import recomputed_layers
from forerun.calib.layers.stage_work import stage_operators, updated_parameters
from forerun.calib.workload.config import Recompute, RunConfig
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

Layout = Callable[..., RunConfig]


def linear_flop(operators: Iterable[tuple[Operator, int]]) -> int:
    total = 0
    for operator, count in operators:
        if operator.kind.is_linear:
            tokens, width, out = operator.shape
            total += count * 2 * tokens * width * out
    return total


def shapes(operators: Iterable[tuple[Operator, int]], kind: OperatorKind) -> list[tuple[int, ...]]:
    return [operator.shape for operator, _ in operators if operator.kind is kind]


def test_linear_flop_of_all_ranks_is_two_per_weight_and_token(layout: Layout) -> None:
    """Two FLOP for each weight of a product and each token: 12 h^2 per layer and the vocabulary."""
    config = layout(tp=2, pp=2, model={"ffn_hidden_size": 4 * 64})
    per_rank = sum(linear_flop(stage_operators(config, s).forward) for s in range(2))
    weights = 4 * 12 * 64 * 64 + 256 * 64
    tokens = 2 * 32
    assert per_rank * config.parallelism.tp == 2 * weights * tokens


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 4]), micro=st.sampled_from([1, 4]))
def test_a_layout_splits_the_products_without_loss(
    layout: Layout, tp: int, pp: int, micro: int
) -> None:
    config = layout(tp=tp, pp=pp, micro=micro)
    whole = linear_flop(stage_operators(layout(micro=micro), 0).forward)
    split = tp * sum(linear_flop(stage_operators(config, s).forward) for s in range(pp))
    assert split == whole


def test_backward_holds_the_same_work_as_forward(layout: Layout) -> None:
    result = stage_operators(layout(tp=2, pp=2), 1)
    forward = [(operator.kind, operator.shape, count) for operator, count in result.forward]
    backward = [(operator.kind, operator.shape, count) for operator, count in result.backward]
    assert forward == backward
    assert {operator.phase for operator, _ in result.backward} == {Phase.BACKWARD}


def test_full_recompute_repeats_the_covered_layers(layout: Layout) -> None:
    config = layout(pp=2, recompute=Recompute.FULL, recompute_num_layers=1)
    result = stage_operators(config, 0)
    assert recomputed_layers(config) == 1
    once = linear_flop(stage_operators(layout(pp=2), 0).forward)
    assert linear_flop(result.recompute) * 2 == once
    kinds = {operator.kind for operator, _ in result.recompute}
    assert OperatorKind.EMBEDDING not in kinds
    assert {operator.phase for operator, _ in result.recompute} == {Phase.RECOMPUTE}


def test_selective_recompute_is_attention_alone(layout: Layout) -> None:
    result = stage_operators(layout(recompute=Recompute.SELECTIVE), 0)
    assert [(o.kind, count) for o, count in result.recompute] == [(OperatorKind.CORE_ATTENTION, 4)]
    assert recomputed_layers(layout(recompute=Recompute.SELECTIVE)) == 0


def test_shapes_are_local_to_the_rank(layout: Layout) -> None:
    config = layout(
        tp=2, par={"is_sequence_parallel": True}, model={"num_query_groups": 2, "is_gated": True}
    )
    forward = stage_operators(config, 0).forward
    assert shapes(forward, OperatorKind.LINEAR_QKV) == [(64, 64, 2 * 16 + 2 * 1 * 16)]
    assert shapes(forward, OperatorKind.POSITION) == [(64, 64)]
    assert shapes(forward, OperatorKind.CORE_ATTENTION) == [(2, 2, 1, 32, 16)]
    assert shapes(forward, OperatorKind.LINEAR_PROJ) == [(64, 32, 64)]
    assert shapes(forward, OperatorKind.NORM) == [(32, 64)]
    assert shapes(forward, OperatorKind.RESIDUAL) == [(32, 64)]
    assert shapes(forward, OperatorKind.LINEAR_FC1) == [(64, 64, 128)]
    assert shapes(forward, OperatorKind.ACTIVATION) == [(64, 128, 64)]
    assert shapes(forward, OperatorKind.LINEAR_FC2) == [(64, 64, 64)]
    assert shapes(forward, OperatorKind.EMBEDDING) == [(64, 64, 128)]
    assert shapes(forward, OperatorKind.LOGITS) == [(64, 64, 128)]
    assert shapes(forward, OperatorKind.LOSS) == [(64, 128)]


def test_norms_are_two_a_layer_and_one_at_the_end(layout: Layout) -> None:
    counts = [
        sum(c for o, c in stage_operators(layout(pp=2), s).forward if o.kind is OperatorKind.NORM)
        for s in range(2)
    ]
    assert counts == [4, 5]


def test_the_optimizer_updates_a_share_when_distributed(layout: Layout) -> None:
    config = layout(dp=4, par={"is_optimizer_distributed": True})
    (operator, count), _ = stage_operators(config, 0).step
    assert count == 1
    assert operator.shape == (updated_parameters(config, 0),)
    assert 0 <= 4 * operator.shape[0] - parameters(config, 0) < 4


def test_an_unknown_stage_is_named(layout: Layout) -> None:
    with pytest.raises(ConfigError, match="stage 2 is not in pp 2; choose from 0 to 1"):
        stage_operators(layout(pp=2), 2)
