"""Step tables of Megatron-Bridge: shapes by name, switches by recipe, cards switch by switch."""

from __future__ import annotations

import pytest
from published_steps import golden, modified_row, only

from forerun.benchmarks.scoring.step_pairs import (
    is_near,
    is_right_in_sign,
    pairs_text,
    score_pairs,
)
from forerun.calib.workload.config import Dispatcher, Fp8Recipe, Recompute
from forerun.calib.workload.routing import RoutingSource, routing_source


def test_bridge_takes_shapes_by_name() -> None:
    rows = {row.row_id: row for row in golden("e2e_megatron_bridge").rows}
    large = rows["mb_171"].config
    assert large.model.num_layers == 126 and sum(large.chunk_layers) == 126
    assert (large.chunk_layers[0], large.chunk_layers[1], large.chunk_layers[-1]) == (3, 4, 3)
    assert large.fp8 is Fp8Recipe.NVFP4 and large.parallelism.ranks_per_node == 64
    experts = rows["mb_194"].config
    assert experts.parallelism.expert_tp == 1 and experts.parallelism.ep == 32
    assert experts.parallelism.expert_dp == 1
    assert rows["mb_168"].config.parallelism.shards_weights and not rows["mb_168"].flag
    assert not large.parallelism.shards_weights
    reasons = [skip.reason for skip in golden("e2e_megatron_bridge").skipped]
    assert "Mamba" in reasons[0]
    unknown = modified_row("e2e_megatron_bridge", model="FooBar 9B")
    assert "FooBar 9B" in unknown.skipped[0].reason and "llama3-8b" in unknown.skipped[0].reason


@pytest.mark.parametrize(
    "label", ["LLAMA31 8B", "Kimi_K2", "Qwen3_30B_a3B (tokendrop)", "Nemotron4 340b", "Grok-1"]
)
def test_other_models_of_the_recipes_are_known(label: str) -> None:
    cells = {"model": label, "precision": "BF16", "fsdp": 0, "tp": 1, "pp": 1, "ep": 1, "vp": None}
    assert not only(modified_row("e2e_megatron_bridge", **cells)).flag


def test_bridge_rows_have_the_switches_of_the_recipe_with_their_degrees() -> None:
    """Read off v0.3.1 of Megatron-Bridge by hand."""
    rows = {row.row_id: row for row in golden("e2e_megatron_bridge").rows}
    config = rows["mb_194"].config
    experts = config.model.experts
    assert experts is not None and not config.unmodelled
    assert experts.dispatcher is Dispatcher.FLEX and experts.is_balance_forced
    assert experts.overlaps_exchange and experts.delays_weight_gradients
    other = only(
        modified_row("e2e_megatron_bridge", model="Qwen3_235B_a22B", ep=16, tp=1, pp=4, vp=None)
    )
    assert other.config.unmodelled


def test_where_no_recipe_has_the_degrees_their_common_switches_hold() -> None:
    """The one recipe of Qwen3 30B for H100 in FP8 of v0.3.1 says flex, without a graph."""
    cells = {"model": "Qwen3_30B_a3B", "precision": "FP8", "release": "26.02.01", "gpus": 16}
    row = only(
        modified_row("e2e_megatron_bridge", **cells, tp=1, pp=2, vp=12, ep=8, system="DGX-H100")
    )
    experts = row.config.model.experts
    assert experts is not None and experts.dispatcher is Dispatcher.FLEX
    assert row.config.unmodelled == ("recompute of the recipe",) and not row.flag
    assert not row.config.uses_cuda_graphs


@pytest.mark.parametrize("release", ["25.09", "26.08"])
def test_a_release_without_recipes_has_the_switches_of_the_nearest(release: str) -> None:
    """Unstated is not off: recipes of DeepSeek V3 on GB200 replay graphs and exchange by flex."""
    cells = {"model": "DeepSeek V3", "system": "DGX-GB200", "precision": "BF16", "gpus": 256}
    degrees = {"tp": 1, "pp": 4, "cp": 1, "vp": 4, "ep": 64, "micro_batch": 1, "fsdp": 0}
    row = only(modified_row("e2e_megatron_bridge", **cells, **degrees, release=release))
    stated = only(modified_row("e2e_megatron_bridge", **cells, **degrees, release="25.11"))
    experts = row.config.model.experts
    assert experts is not None and experts.dispatcher is Dispatcher.FLEX
    assert row.config.uses_cuda_graphs
    assert row.config.unmodelled == ("switches of the recipe, from another release",)
    assert not stated.config.unmodelled and stated.config.model.experts == experts


def test_cards_say_every_switch() -> None:
    table = golden("e2e_bridge_cards")
    rows = {row.row_id: row.config for row in table.rows}
    of_rows = {row_id: config.model.experts for row_id, config in rows.items()}
    experts = {row_id: one for row_id, one in of_rows.items() if one is not None}
    assert rows["mbc_076"].is_step_replayed and experts["mbc_076"].is_balance_forced
    assert rows["mbc_069"].cuda_graph_scope == ("moe_router", "moe_preprocess")
    assert not experts["mbc_069"].is_balance_forced
    ep = rows["mbc_069"].parallelism.ep
    assert routing_source(experts["mbc_069"], ep) is RoutingSource.ASSUMED
    assert not experts["mbc_142"].overlaps_exchange and experts["mbc_143"].overlaps_exchange
    assert rows["mbc_101"].recompute is Recompute.NONE
    assert rows["mbc_106"].recompute_modules == ("layernorm", "moe_act")
    flags = {row.row_id: row.flag for row in table.rows}
    assert flags["mbc_032"] == "resumed run; functional run" and "LoRA" in flags["mbc_036"]
    assert flags["mbc_069"] == "functional run" and not flags["mbc_076"]
    reasons = [skip.reason for skip in table.skipped]
    assert any("Mamba" in reason for reason in reasons)
    assert any("seq_len not stated" in reason for reason in reasons)


def test_switches_of_cards_move_the_step_as_measured() -> None:
    """Rows that differ in one switch: the log of their ratio, right in sign and within 0.05."""
    pairs = score_pairs(golden("e2e_bridge_cards").rows)
    assert len(pairs) == 22
    assert all(is_right_in_sign(pair) and is_near(pair) for pair in pairs)
    text = pairs_text(pairs)
    assert "| moe_overlap_qwen3_30b_16h100 | 1 | 1 | 1 |" in text


def test_dense_recipes_split_their_products_beside_transfers() -> None:
    """``tp_comm_overlap`` of the recipes: not without tp, and not in layers of experts."""
    rows = [*golden("e2e_dgxc_scaling").rows, *golden("e2e_megatron_bridge").rows]
    for row in rows:
        par, is_dense = row.config.parallelism, row.config.model.experts is None
        assert par.overlaps_tp == (par.tp > 1 and is_dense), row.row_id
    assert {row.config.parallelism.overlaps_tp for row in rows} == {True, False}


def test_a_pipeline_of_the_recipes_without_its_vp_is_left_out() -> None:
    """Llama 3 70B on GB300 in MXFP8: the recipe has pp 4 with vp 5 and micro-batch 1, no other."""
    cells = {"model": "LLAMA3_70B", "precision": "MXFP8", "fsdp": 0, "tp": 1, "micro_batch": 2}
    cells |= {"gpus": 64, "global_batch": 256, "cp": 1, "ep": None}
    assert only(modified_row("e2e_megatron_bridge", **cells, pp=4, vp=None)).flag == "vp not stated"
    assert not only(modified_row("e2e_megatron_bridge", **cells, pp=4, vp=5)).flag
    assert not only(modified_row("e2e_megatron_bridge", **cells, pp=1, vp=None)).flag
