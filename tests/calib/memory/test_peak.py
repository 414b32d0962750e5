from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from event_driven_pipeline import passes, peak_in_flight
from one_layer import LayerActivations, layer_activations
from stage_tensors import parameters

from forerun.calib.layers.blocks import BlockKind, block
from forerun.calib.memory._stage_memory import in_flight
from forerun.calib.memory.activations import (
    attention_working_nbytes,
    layer_tensors,
    mlp_working_nbytes,
    routed_tokens,
)
from forerun.calib.memory.peak import (
    fit_probability,
    memory,
    memory_offset,
    memory_with_offset,
    stage_memories,
)
from forerun.calib.memory.pipelines import COMMUNICATOR_NBYTES, CONTEXT_NBYTES
from forerun.calib.regressors.robust import Z_90
from forerun.calib.timeline.programs import Pipeline, TaskKind
from forerun.calib.timeline.schedules import stage_program
from forerun.calib.workload.config import (
    Attention,
    Experts,
    Fp8Recipe,
    LatentAttention,
    Normalization,
    Precision,
    Recompute,
    RunConfig,
)

Layout = Callable[..., RunConfig]
WIDE = {"ffn_hidden_size": 4 * 64}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "device": "H100"}
NORMS = 2 * 8
S, B, H, A = 32, 2, 64, 4
SBH = S * B * H


def layer(config: RunConfig) -> LayerActivations:
    return layer_activations(config, BlockKind.LAYER)


def num_in_flight(config: RunConfig, stage: int) -> int:
    par = config.parallelism
    result = in_flight(
        num_stages=par.pp,
        num_virtual_stages=par.vp,
        num_microbatches=config.num_microbatches,
        group_size=par.microbatch_group_size or par.pp,
        stage=stage,
    )
    return result.most


def statistics(config: RunConfig) -> float:
    """Norm and softmax statistics, which the paper leaves out: 8 bytes per token and norm."""
    par = config.parallelism
    share = par.tp if par.is_sequence_parallel else 1
    return S * B * (NORMS / share + (4 * A / par.tp if config.is_attention_fused else 0))


@pytest.mark.parametrize(
    ("tp", "is_sequence_parallel", "is_fused", "factor"),
    [
        (1, False, False, 34 + 5 * A * S / H),
        (1, False, True, 34),
        (2, False, False, 10 + 24 / 2 + 5 * A * S / (H * 2)),
        (2, True, False, (34 + 5 * A * S / H) / 2),
        (2, True, True, 34 / 2),
    ],
)
def test_activations_of_a_layer_are_those_of_korthikanti(
    layout: Layout, tp: int, is_sequence_parallel: bool, is_fused: bool, factor: float
) -> None:
    """Table 2 of arXiv:2205.05198, two-byte elements and ffn = 4 h."""
    config = layout(
        tp=tp,
        model=WIDE,
        precision=Precision.BF16,
        par={"is_sequence_parallel": is_sequence_parallel},
        attention=Attention.FUSED if is_fused else Attention.UNFUSED,
        **DROPOUT,
    )
    assert layer(config).saved_nbytes == pytest.approx(SBH * factor + statistics(config))


def test_selective_recompute_drops_the_scores(layout: Layout) -> None:
    plain = layout(model=WIDE, precision=Precision.BF16, attention=Attention.UNFUSED, **DROPOUT)
    selective = replace(plain, recompute=Recompute.SELECTIVE)
    assert layer(selective).saved_nbytes == pytest.approx(34 * SBH + statistics(selective))
    scores = 5 * A * S * S * B
    attention, mlp = attention_working_nbytes(plain), mlp_working_nbytes(plain, has_experts=False)
    freed = sum(t.nbytes for t in layer_tensors(plain, BlockKind.LAYER) if t.part == "mlp")
    assert layer(selective).working_nbytes == max(mlp, attention - freed + scores)


def test_full_recompute_keeps_inputs_and_one_layer_at_work(layout: Layout) -> None:
    plain = layout(pp=4, model={**WIDE, "num_layers": 8}, precision=Precision.BF16)
    full = replace(plain, recompute=Recompute.FULL)
    stage = 1
    num_saved = num_in_flight(full, stage)
    working = layer(full).recompute_working_nbytes
    number = stage_memories(full)[stage].activations_nbytes
    assert number == pytest.approx(num_saved * 2 * 2 * SBH + working)
    assert working > layer(plain).saved_nbytes - 2 * SBH
    some = replace(full, recompute_num_layers=1)
    assert number < stage_memories(some)[stage].activations_nbytes
    assert (
        stage_memories(some)[stage].activations_nbytes
        < stage_memories(plain)[stage].activations_nbytes
    )


def test_layers_recomputed_together_keep_one_input_and_are_all_present(layout: Layout) -> None:
    plain = layout(pp=4, model={**WIDE, "num_layers": 16}, precision=Precision.BF16)
    alone = replace(plain, recompute=Recompute.FULL)
    peaks = [
        stage_memories(replace(alone, recompute_span=span))[1].activations_nbytes
        for span in (1, 2, 4, 9)
    ]
    num_passes, more = num_in_flight(alone, 1), layer(plain).saved_nbytes
    for place, (num_inputs, num_others) in enumerate(((4, 0), (2, 1), (1, 3), (1, 3))):
        inputs = num_passes * num_inputs * 2 * SBH
        expected = inputs + num_others * more + layer(alone).recompute_working_nbytes
        assert peaks[place] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("precision", "dp", "is_distributed", "nbytes"),
    [
        (Precision.BF16, 4, False, 18),
        (Precision.BF16, 4, True, 6 + 12 / 4),
        (Precision.FP32, 4, False, 16),
        (Precision.FP32, 4, True, 8 + 8 / 4),
    ],
)
def test_state_per_parameter(
    layout: Layout, precision: Precision, dp: int, is_distributed: bool, nbytes: float
) -> None:
    config = layout(dp=dp, precision=precision, par={"is_optimizer_distributed": is_distributed})
    result = memory(config)
    state = result.weights_nbytes + result.grads_nbytes + result.optimizer_nbytes
    assert state == pytest.approx(nbytes * parameters(config, 0), rel=1e-6)


def test_stages_hold_fewer_microbatches_further_down(layout: Layout) -> None:
    config = layout(pp=4)
    assert [num_in_flight(config, s) for s in range(4)] == [4, 3, 2, 1]
    assert num_in_flight(layout(pp=4, samples=4), 0) == 2


def test_the_fullest_stage_is_the_answer(layout: Layout) -> None:
    config = layout(pp=4)
    totals = [one.total_nbytes for one in stage_memories(config)]
    assert memory(config).total_nbytes == max(totals)
    assert memory(config).stage == totals.index(max(totals))


@pytest.mark.parametrize(("pp", "m"), [(2, 2), (4, 3), (4, 16), (8, 11)])
def test_what_is_held_follows_the_order_of_the_schedule(pp: int, m: int) -> None:
    pipeline = Pipeline(num_stages=pp, num_microbatches=m)
    for stage in range(pp):
        stage_in_flight = in_flight(
            num_stages=pp,
            num_virtual_stages=1,
            num_microbatches=m,
            group_size=pp,
            stage=stage,
        )
        assert stage_in_flight.most == peak_in_flight(pipeline, stage)


@pytest.mark.parametrize(
    ("pp", "vp", "m", "group"),
    [(2, 2, 2, 2), (2, 2, 12, 2), (4, 3, 8, 4), (4, 2, 48, 6), (4, 5, 24, 8), (8, 4, 64, 8)],
)
def test_interleaved_chunks_are_held_as_megatron_runs_them(
    pp: int, vp: int, m: int, group: int
) -> None:
    pipeline = Pipeline(
        num_stages=pp, num_microbatches=m, num_virtual_stages=vp, microbatch_group_size=group
    )
    for stage in range(pp):
        stage_in_flight = in_flight(
            num_stages=pp,
            num_virtual_stages=vp,
            num_microbatches=m,
            group_size=group,
            stage=stage,
        )
        counts, seen = [0] * vp, set()
        for task in passes(stage_program(pipeline, stage)):
            counts[task.chunk // pp] += 1 if task.kind is TaskKind.FORWARD else -1
            seen.add(tuple(counts))
        assert set(stage_in_flight.peaks) <= seen
        for one in seen:
            assert any(
                all(a <= b for a, b in zip(one, peak, strict=True))
                for peak in stage_in_flight.peaks
            )
        assert stage_in_flight.most == peak_in_flight(pipeline, stage)


def test_shards_of_dense_and_expert_parameters(layout: Layout) -> None:
    """18 bytes per parameter less 12 that are split: over dp x cp, and over replicas of experts."""
    experts = Experts(num_experts=8, ffn_hidden_size=32, is_grouped=True)
    config = layout(
        dp=8,
        samples=16,
        model={"experts": experts, "is_gated": True},
        par={"ep": 4, "cp": 2, "is_optimizer_distributed": True},
        precision=Precision.BF16,
    )
    one_expert = 32 * (64 + 1) * 2 + 64 * (32 + 1)
    expert = 4 * 2 * one_expert
    dense = 256 * 64 + 32 * 64 + 2 * 64 + 4 * (4 * 64 * 65 + 4 * 64 + 8 * (64 + 1))
    result = memory(config)
    assert result.weights_nbytes == 2 * (dense + expert)
    assert result.grads_nbytes == 4 * (dense + expert)
    assert result.optimizer_nbytes == 12 * dense // 16 + 12 * expert // 4
    copies = replace(config.parallelism, num_optimizer_instances=2)
    twice = memory(replace(config, parallelism=copies)).optimizer_nbytes
    assert twice == 2 * result.optimizer_nbytes
    halved = memory(replace(config, reduces_grads_in_bf16=True)).grads_nbytes
    assert halved == result.grads_nbytes // 2


def test_latent_attention_has_the_parameters_of_megatrons_own_count(layout: Layout) -> None:
    """``compute_weight_and_optimizer_memory`` of Megatron-LM, which has no biases."""
    latent = LatentAttention(
        q_lora_rank=24, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=12
    )
    experts = Experts(num_experts=8, ffn_hidden_size=32, shared_ffn_hidden_size=48)
    shape = {
        "has_bias": False,
        "is_gated": True,
        "latent_attention": latent,
        "has_qk_norm": True,
        "experts": experts,
        "normalization": Normalization.RMS_NORM,
    }
    h, a = 64, 4
    attention = 24 * (h + a * 12 + 1) + 16 * (h + a * 20 + 1) + h * 4 + a * 12 * h
    numel = block(layout(model=shape), BlockKind.EXPERT_LAYER).numel
    mlp = 3 * h * (32 * 8 + 48)
    router = 8 * h
    assert numel.dense + numel.expert == attention + mlp + 2 * h + router
    assert numel.expert == 0  # one expert-parallel rank: Megatron shards them like the rest
    split = block(layout(dp=2, model=shape, par={"ep": 2}), BlockKind.EXPERT_LAYER).numel
    assert split.expert == 3 * h * 32 * 4


def test_padding_to_capacity_rounds_up_each_expert(layout: Layout) -> None:
    experts = Experts(
        num_experts=6, top_k=2, ffn_hidden_size=32, capacity_factor=1.0, is_padded_to_capacity=True
    )
    config = layout(model={"experts": experts}, precision=Precision.BF16)
    assert routed_tokens(config) == 6 * 22  # 64 tokens x 2 / 6 = 21.3
    even = replace(
        config.model, experts=replace(experts, capacity_factor=0.0, is_padded_to_capacity=False)
    )
    assert routed_tokens(replace(config, model=even)) == 128


def test_eight_bit_products_keep_one_byte_and_two_copies_of_weights(layout: Layout) -> None:
    plain = layout(pp=2, precision=Precision.BF16, device="H100", model={"has_bias": False})
    eight = replace(plain, fp8=Fp8Recipe.TENSORWISE)
    by_name = {t.name: t.nbytes for t in layer_tensors(plain, BlockKind.LAYER)}
    by_name8 = {t.name: t.nbytes for t in layer_tensors(eight, BlockKind.LAYER)}
    for name in ("input norm output", "mlp norm output", "activation output"):
        assert by_name8[name] == by_name[name] / 2
    assert by_name8["query, key, value"] == by_name["query, key, value"]
    products = 2 * (4 * 64 * 64 + 2 * 64 * 128)
    extra = stage_memories(eight)[0].weights_nbytes - stage_memories(plain)[0].weights_nbytes
    assert extra == 2 * products
    blocks = {
        t.name: t.nbytes
        for t in layer_tensors(replace(plain, fp8=Fp8Recipe.BLOCKWISE), BlockKind.LAYER)
    }
    # A scale in fp32 for each 128 elements.
    assert blocks["activation output"] == by_name8["activation output"] * (1 + 4 / 128)
    preserved = replace(eight, keeps_fp8_params=True)
    assert stage_memories(preserved)[0].weights_nbytes == stage_memories(plain)[0].weights_nbytes


def test_the_context_and_communicators_are_no_part_of_a_measured_peak(layout: Layout) -> None:
    config = layout(tp=2, dp=2, device="H100")
    result = memory(config)
    assert result.overhead_nbytes == CONTEXT_NBYTES + 2 * COMMUNICATOR_NBYTES
    assert memory(layout(tp=2)).overhead_nbytes == 0
    # Ranks that share an instance of the optimizer, and those that hold the same part of each.
    par = {"is_optimizer_distributed": True, "num_optimizer_instances": 2}
    copies = memory(layout(dp=8, device="H100", par=par)).overhead_nbytes
    assert copies == CONTEXT_NBYTES + 3 * COMMUNICATOR_NBYTES
    offset = memory_offset(config, result.allocated_nbytes + 7)
    assert memory(config, offset_nbytes=offset).allocated_nbytes == result.allocated_nbytes + 7


def test_an_offset_makes_the_own_layout_exact(layout: Layout) -> None:
    config = layout(dp=2)
    peak = memory(config).total_nbytes + 12345
    assert memory(config, offset_nbytes=memory_offset(config, peak)).total_nbytes == peak


def test_a_cast_of_eight_bit_weights_takes_a_copy_in_sixteen(layout: Layout) -> None:
    wide = {"hidden_size": 4096, "ffn_hidden_size": 16384, "has_bias": False}
    common = {"precision": Precision.BF16, "device": "H100", "recompute": Recompute.FULL}
    par = {"is_optimizer_distributed": True}
    config = layout(dp=2, model=wide, par=par, fp8=Fp8Recipe.BLOCKWISE, **common)
    config = replace(config, keeps_fp8_params=True)
    plain, cast = memory(replace(config, fp8=Fp8Recipe.MXFP8)), memory(config)
    states = 12 // 2 * parameters(config, 0)
    assert plain.optimizer_nbytes == states
    passing = cast.activations_nbytes + cast.logits_nbytes
    assert cast.optimizer_nbytes == states + parameters(config, 0) - passing


def test_a_factor_of_two_is_the_interval_of_memory_that_is_not_modelled(layout: Layout) -> None:
    config = layout(dp=2, device="H100", has_open_memory=True)
    for one in (memory(config), memory_with_offset(config, config, 0)):
        doubled = one.allocated_nbytes * math.exp(Z_90 * one.open_nbytes / one.allocated_nbytes)
        assert doubled == pytest.approx(2 * one.allocated_nbytes, rel=1e-3)


@pytest.mark.parametrize("offset", [-20_000, 20_000])
def test_an_offset_of_another_layout_is_not_taken_over_whole(layout: Layout, offset: int) -> None:
    """It may be a constant or a share: what the two readings differ by is a deviation."""
    measured = layout(dp=2, device="H100")
    assert memory_with_offset(measured, measured, offset).open_nbytes == 0
    other = layout(dp=2, device="H100", model={"num_layers": 16})
    small, large = (memory(one).allocated_nbytes for one in (measured, other))
    result = memory_with_offset(other, measured, offset)
    assert result.allocated_nbytes == large + offset
    as_share = round(large * (1 + offset / small))
    assert result.open_nbytes == pytest.approx(abs(as_share - result.allocated_nbytes), abs=1)
    sure, unsure = (
        fit_probability(one, int(1.1 * result.device_nbytes), is_calibrated=True)
        for one in (replace(result, open_nbytes=0), result)
    )
    assert 0.5 < unsure < sure


@pytest.mark.parametrize(("limit", "waiting"), [(0, 8), (3, 3), (20, 8)])
def test_deferred_gradients_wait_with_their_input_on_the_last_stage(
    layout: Layout, limit: int, waiting: int
) -> None:
    plain = layout(pp=2, precision=Precision.BF16, device="H100")
    deferred = replace(plain, defers_head_gradients=True, head_deferral_limit=limit)
    before, now = stage_memories(plain), stage_memories(deferred)
    assert now[0] == before[0] and plain.num_microbatches == 8
    each = 2 * S * B * (H + plain.model.vocab_size)
    assert now[1].allocated_nbytes - before[1].allocated_nbytes == waiting * each
