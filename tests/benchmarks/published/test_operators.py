"""Canonical shapes against rates that the sources publish beside their times, and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pandas as pd
import pytest

from forerun.benchmarks.published.operators_ett import read_optimizers
from forerun.benchmarks.published.readers import read_published

Golden = Callable[[str], tuple[pd.DataFrame, pd.DataFrame]]

ETT_SHAPES = {
    "baddbmm": ("batched_product", lambda r: (r.bh, r.l, r.c, r.l)),
    "bmm": ("batched_product", lambda r: (r.bh, r.l, r.l, r.c)),
    "fillmask": ("mask", lambda r: (r.bh * r.l, r.l)),
    "flash_atten": (
        "flash_attention",
        lambda r: (r.micro_batch, r.heads / r.tp, r.heads / r.tp, r.l, r.c, r.c),
    ),
    "RoPE": ("rotary", lambda r: (r.l, r.micro_batch, r.heads / r.tp, r.c)),
    "gelu": ("activation", lambda r: (r.tokens, 4 * r.hidden / r.tp, 4 * r.hidden / r.tp)),
    "layernorm": ("norm", lambda r: (r.tokens, r.hidden)),
    "embedding": ("embedding", lambda r: (r.tokens, r.hidden, 12672)),
    "linear_final": ("logits", lambda r: (r.tokens, r.hidden, 12672)),
    "parallel_cross_entropy_128": ("loss", lambda r: (r.tokens, 12672)),
}
"""Literature of the source: b, l, h, d and tp to sizes; V = 50257 padded to 128 tp is 50688."""


def flop_rates(rows: pd.DataFrame, factor: float) -> list[float]:
    """``factor`` times the product of the sizes over the time, in TFLOP/s."""
    sizes = rows["shape"].str.split("x").map(lambda s: math.prod(map(int, s)))
    return (factor * sizes / rows["time_s"] / 1e12).tolist()


def test_linears_of_the_paper_have_the_published_rate(golden: Golden) -> None:
    frame, rows = golden("ops_ett_fwd_bwd")
    linears = frame[frame["fwd_tflops_derived"].notna()].set_index("op")
    for op, published in linears["fwd_tflops_derived"].items():
        row = rows[(rows["group"] == op) & (rows["phase"] == "forward")]
        assert flop_rates(row, 2) == pytest.approx([published], rel=1e-3)


@pytest.mark.parametrize("op", ETT_SHAPES)
def test_other_operators_of_the_paper_have_their_sizes(golden: Golden, op: str) -> None:
    frame, rows = golden("ops_ett_fwd_bwd")
    source = frame[frame["op"] == op].iloc[0].copy()
    source["l"] = source["seq_len"]
    source["tokens"] = source["micro_batch"] * source["seq_len"]
    source["bh"] = source["micro_batch"] * source["heads"] / source["tp"]
    source["c"] = source["hidden"] / source["heads"]
    kind, sizes = ETT_SHAPES[op]
    both = rows[rows["group"] == op]
    assert both["phase"].tolist() == ["forward", "backward"]
    assert set(both["kind"]) == {kind}
    assert set(both["shape"]) == {"x".join(str(int(size)) for size in sizes(source))}
    assert both["time_s"].tolist() == pytest.approx(
        [source["fwd_time_us"] * 1e-6, source["bwd_time_us"] * 1e-6]
    )


def test_all_18_operators_of_the_paper_are_read(golden: Golden) -> None:
    frame, rows = golden("ops_ett_fwd_bwd")
    assert set(rows["group"]) == set(frame["op"]) and len(set(frame["op"])) == 18
    assert (rows["flag"] == "").all()


def test_optimizers_without_tp_are_flagged_and_with_it_estimated(golden: Golden) -> None:
    frame, rows = golden("ops_ett_optimizer")
    flags = rows.set_index("group")["flag"]
    assert flags["optimizer"] == "" and all(flags.drop("optimizer") != "")
    with_tp = read_optimizers(frame.assign(tp=2.0)).set_index("group")
    assert (with_tp["flag"] == "").all()
    hidden, layers, vocab = 2048, 4, 50432 / 2
    layer = 12 * hidden**2 // 2 + 13 * hidden
    assert with_tp.loc["middleStage_optimizer", "shape"] == str(layers * layer)
    assert with_tp.loc["lastStage_optimizer", "shape"] == str(
        layers * layer + int(vocab) * hidden + 2 * hidden
    )


def test_causal_attention_has_the_published_rate(golden: Golden) -> None:
    frame, rows = golden("ops_aic_attention_prefill_bf16")
    sizes = rows["shape"].str.split("x", expand=True).astype(float)
    batch, heads, kv, seq, qk, v = (sizes[c] for c in range(6))
    rate = batch * heads * seq**2 * (qk + v) / rows["time_s"] / 1e12
    assert rate.tolist() == pytest.approx(frame["causal_fwd_tflops_derived"].tolist(), rel=1e-2)
    assert kv.tolist() == frame["kv_heads"].tolist()


def test_collectors_are_groups_and_fp8_has_one_byte(golden: Golden) -> None:
    rows = golden("ops_aic_gemm_bf16")[1]
    assert {"gemm (vllm-0.24.0)", "gemm (sglang-0.5.10)"} <= set(rows["group"])
    assert set(rows["element_nbytes"]) == {2}
    assert set(golden("ops_aic_gemm_fp8")[1]["element_nbytes"]) == {1}


def test_experts_are_the_part_of_one_rank(golden: Golden) -> None:
    frame, rows = golden("ops_aic_moe_bf16")
    for source, shape in zip(frame.itertuples(), rows["shape"], strict=True):
        tokens, hidden, ffn, topk, here, total = map(int, shape.split("x"))
        assert (tokens, hidden, topk) == (source.num_tokens, source.hidden_size, source.topk)
        assert ffn * source.moe_tp_size == source.inter_size
        assert here * source.moe_ep_size == total == source.num_experts


def test_vidur_takes_the_gate_from_the_up_projection(golden: Golden) -> None:
    rows = golden("ops_vidur_mlp")[1]
    acts = rows[rows["group"] == "mlp_act"]["shape"].tolist()
    assert acts == ["2048x14336x7168", "1024x10240x10240"]
    (qkv,) = rows[rows["group"] == "attn_rope"]["shape"]
    (product,) = rows[rows["group"] == "attn_pre_proj"]["shape"]
    assert qkv.split("x")[1] == product.split("x")[2]


def test_vidur_without_product_sizes_gives_the_same_shapes(golden: Golden) -> None:
    frame, rows = golden("ops_vidur_mlp")
    llama = frame["model"].str.contains("llama")
    bare = frame[llama].assign(gemm_m=math.nan, gemm_k=math.nan, gemm_n=math.nan)
    shapes = read_published(bare, "bare")["shape"].tolist()
    assert sorted(shapes) == sorted(rows[~rows["shape"].str.startswith("1024x")]["shape"])


def test_neusight_traces_keep_what_is_an_operator(golden: Golden) -> None:
    frame, rows = golden("ops_neusight_training_traces")
    assert set(rows["device"]) == {"NVIDIA_H100_80GB_HBM3"}
    series = rows.groupby("group")["shape"].agg(set)
    assert "32x2048x64x2048" in series["bmm"]
    assert {"2048x2048x50272", "2048x2048x8192", "1024x1280x3840"} <= series["linear"]
    assert series["softmax"] == {"65536x2048"}
    assert series["layer_norm"] == {"2048x2048"}
    # The dropout of 32 x 2048 x 2048 has no backward in the trace: its rate is 0.
    assert series["dropout"] == {"2048x2048"}
    backward = rows[rows["phase"] == "backward"]
    assert "add" not in set(backward["group"])
    head = backward[backward["shape"] == "2048x2048x50272"]["time_s"].tolist()
    published = frame.loc[frame["target"] == "lm_head", "bwd_time_us"] * 1e-6
    assert head == pytest.approx(published.tolist())


def test_aceso_flags_what_cannot_be_compared(golden: Golden) -> None:
    frame, rows = golden("ops_aceso_fwd_bwd")
    decoder = rows[rows["group"].str.startswith("dec")]
    assert len(decoder) and (decoder["flag"] != "").all()
    copied = rows[rows["group"] == "enc-1st-layernorm algo 1 (fp16)"]
    assert copied["flag"].tolist() == ["same_value_as_algo0"] * 2
    weighted = rows[rows["group"] == "enc-attention-qkv (fp32)"].set_index("phase")["flag"]
    assert weighted["forward"] == "" and "weight_grad" in weighted["backward"]
    assert len(rows) == 2 * len(frame)


def test_aceso_products_hold_the_published_weights(golden: Golden) -> None:
    frame, rows = golden("ops_aceso_fwd_bwd")
    products = rows[rows["kind"].isin(["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])]
    products = products[products["phase"] == "forward"]
    assert len(products) >= 7
    sizes = products["shape"].str.split("x", expand=True).astype(float)
    mib = sizes[1] * sizes[2] * products["element_nbytes"] / 2**20
    weighted = frame[frame["op_name"].str.contains("qkv|dense|GEMM")]
    assert sorted(mib) == pytest.approx(sorted(weighted["weights_mib"]), rel=1e-3)


def test_sailor_layers_without_a_sequence_are_flagged(golden: Golden) -> None:
    frame, rows = golden("ops_sailor_layer_profiles")
    assert len(rows) == 2 * len(frame)
    layers, others = rows[rows["group"] == "layer"], rows[rows["group"] != "layer"]
    assert len(layers) == 2 * (frame["layer_kind"] == "layer").sum()
    assert ((layers["flag"] != "").groupby(layers["phase"]).sum() == 1).all()
    assert (others["flag"] != "").all()
    assert set(rows["element_nbytes"]) == {4}


def test_simumax_passes_are_those_of_one_layer(golden: Golden) -> None:
    frame, rows = golden("ops_simumax_gemm_attention")
    assert set(rows["phase"]) == {"forward", "backward", "input_gradient", "weight_gradient"}
    products = rows[rows["kind"].isin(["linear", "grouped_linear"])]
    sizes = products["shape"].str.split("x", expand=True).astype(float)
    is_grouped = products["kind"] == "grouped_linear"
    volume = (sizes[1] * sizes[2]).where(is_grouped, sizes[0] * sizes[1]) * sizes[3].where(
        is_grouped, sizes[2]
    )
    rate = 2 * volume / products["time_s"]
    published = frame["published_efficiency"] * frame["peak_tflops_used"] * 1e12
    published = published[frame["op"].str.contains("matmul")]
    assert sorted(rate) == pytest.approx(sorted(published), rel=1e-6)
