"""Layouts that are asked for are counted as they are told apart, one by one."""

from __future__ import annotations

import pytest
from every_layout import every_layout

from forerun.calib.arguments.keep import Keep
from forerun.calib.search.asked import num_variants
from forerun.calib.search.cells import cells_of
from forerun.calib.workload.config import (
    Batch,
    Experts,
    ModelShape,
    Parallelism,
    Precision,
    RunConfig,
)

EXPERTS = Experts(num_experts=4, top_k=2, ffn_hidden_size=512, is_grouped=True)

ASKED = (
    *("recompute=none", "recompute=mlp", "recompute=full,tp=2", "sharding=none", "sp=on"),
    *("instances=2", "instances=1,sharding=optimizer", "dp=2|4,recompute=core_attn", "ep=1,etp=1"),
)


def some_run(num_ranks: int, ranks_per_node: int, experts: Experts | None) -> RunConfig:
    model = ModelShape(
        num_layers=6,
        hidden_size=1024,
        ffn_hidden_size=4096,
        num_attention_heads=8,
        num_query_groups=8,
        kv_channels=128,
        seq_length=1024,
        vocab_size=32000,
        experts=experts,
    )
    return RunConfig(
        model=model,
        parallelism=Parallelism(
            dp=num_ranks, is_optimizer_distributed=True, ranks_per_node=ranks_per_node
        ),
        batch=Batch(micro_batch_size=1, global_batch_size=2 * num_ranks),
        precision=Precision.BF16,
        device="NVIDIA H100 80GB HBM3",
    )


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "experts"),
    [(8, 8, None), (8, 2, None), (6, 2, None), (4, 2, EXPERTS)],
)
def test_every_layout_that_is_allowed_counts_once(
    num_ranks: int, ranks_per_node: int, experts: Experts | None
) -> None:
    config = some_run(num_ranks, ranks_per_node, experts)
    every = list(every_layout(config, num_ranks))
    for text in ASKED:
        keep = Keep.parse(text)
        found = num_variants(cells_of(config, num_ranks, keep), keep)
        assert found == sum(map(keep.allows, every)), text
