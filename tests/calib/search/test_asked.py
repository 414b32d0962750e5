"""Layouts that are asked for are counted as they are told apart, one by one."""

from __future__ import annotations

import pytest
from every_layout import every_layout
from tiny_shape import of_width, run_of

from forerun.calib.arguments.short_names import LayoutConstraint
from forerun.calib.search.cells import cells_of, choices_of, num_variants
from forerun.calib.workload.config import Experts, Precision

EXPERTS = Experts(num_experts=4, top_k=2, ffn_hidden_size=512, is_grouped=True)

CONSTRAINTS = (
    *("recompute=none", "recompute=mlp", "recompute=full,tp=2", "sharding=none", "sp=on"),
    *("instances=2", "instances=1,sharding=optimizer", "dp=2|4,recompute=core_attn", "ep=1,etp=1"),
)


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "experts"),
    [(8, 8, None), (8, 2, None), (6, 2, None), (4, 2, EXPERTS)],
)
def test_every_layout_that_is_allowed_counts_once(
    num_ranks: int, ranks_per_node: int, experts: Experts | None
) -> None:
    config = run_of(
        of_width(1024, num_layers=6, experts=experts),
        dp=num_ranks,
        micro=1,
        samples=2 * num_ranks,
        par={"is_optimizer_distributed": True, "ranks_per_node": ranks_per_node},
        precision=Precision.BF16,
        device="NVIDIA H100 80GB HBM3",
    )
    every = every_layout(config, num_ranks)
    for text in CONSTRAINTS:
        keep = LayoutConstraint.parse(text)
        number = num_variants(choices_of(cells_of(config, num_ranks, keep), keep))
        assert number == sum(map(keep.allows, every)), text
