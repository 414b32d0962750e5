"""Weights of a stage are the tensors that Megatron makes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from stage_tensors import parameters

from forerun.calib.errors import ConfigError
from forerun.calib.memory.peak import stage_memories
from forerun.calib.workload.config import (
    Experts,
    LatentAttention,
    Normalization,
    PositionEmbedding,
    RunConfig,
)

EXPERTS = Experts(
    num_experts=8,
    ffn_hidden_size=64,
    shared_ffn_hidden_size=32,
    has_shared_gate=True,
    layer_pattern=(False,) + (True,) * 7,
)
LATENT = LatentAttention(
    q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8
)
PLAIN = {"has_bias": False, "is_gated": True, "is_tied": False}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "llama": {
        **PLAIN,
        "normalization": Normalization.RMS_NORM,
        "position_embedding": PositionEmbedding.ROPE,
        "has_qk_norm": True,
    },
    "qkv bias": {**PLAIN, "has_qkv_bias": True},
    "experts": {**PLAIN, "experts": EXPERTS},
    "experts with biases": {"experts": EXPERTS},
    "latent": {**PLAIN, "experts": EXPERTS, "latent_attention": LATENT},
    "latent with norms": {**PLAIN, "latent_attention": LATENT, "has_qk_norm": True},
    "prediction": {"has_bias": False, "num_prediction_layers": 2},
    "expert prediction": {**PLAIN, "num_prediction_layers": 1, "experts": EXPERTS},
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_every_stage_are_those_of_its_tensors(
    layout: Callable[..., RunConfig], name: str
) -> None:
    model = {"num_layers": 8, "num_query_groups": 4, **MODELS[name]}
    literal = 0
    for tp, pp, vp, ep in product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 4)):
        par = {"vp": vp, "ep": ep, "is_sequence_parallel": tp > 1}
        try:
            config = layout(tp=tp, pp=pp, dp=4, samples=32, model=model, par=par)
        except ConfigError:
            continue
        for stage, memory in enumerate(stage_memories(config)):
            num_parameters = memory.weights_nbytes / config.precision.nbytes
            assert num_parameters == parameters(config, stage)
            literal += 1
    assert literal >= 20


def test_a_last_group_of_fewer_micro_batches_has_its_stages(
    layout: Callable[..., RunConfig],
) -> None:
    """16 of two samples end with a group of 4, which 32 of one sample could not."""
    par = {"vp": 2, "microbatch_group_size": 6}
    config = layout(pp=3, micro=2, samples=32, model={"num_layers": 6}, par=par)
    for stage, memory in enumerate(stage_memories(config)):
        assert memory.weights_nbytes == config.precision.nbytes * parameters(config, stage)
