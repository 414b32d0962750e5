"""Plans of models with experts, and of runs whose pipelines cannot be interleaved."""

from __future__ import annotations

from forerun.calib.advice.enumeration import enumerate_layouts
from forerun.calib.workload.config import Batch, Experts, ModelShape, Parallelism, RunConfig

MODEL = ModelShape(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=16,
    seq_length=64,
    vocab_size=256,
    experts=Experts(num_experts=4, ffn_hidden_size=96),
)


def test_experts_over_tp_get_sequence_parallelism() -> None:
    own = RunConfig(
        model=MODEL,
        parallelism=Parallelism(dp=8),
        batch=Batch(micro_batch_size=1, global_batch_size=16),
    )
    found = {
        (config.parallelism.tp, config.parallelism.is_sequence_parallel)
        for config in enumerate_layouts(own, 8)
    }
    assert found == {(1, False), (2, True), (4, True)}


def test_two_stages_are_interleaved_only_where_messages_overlap() -> None:
    own = RunConfig(
        model=MODEL,
        parallelism=Parallelism(pp=4, dp=2, overlaps_p2p=False),
        batch=Batch(micro_batch_size=1, global_batch_size=16),
    )
    layouts = [config.parallelism for config in enumerate_layouts(own, 8)]
    assert {par.vp for par in layouts if par.pp == 2} == {1}
