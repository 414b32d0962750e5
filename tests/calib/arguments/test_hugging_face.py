"""Published config.json files, against the parameter counts that their authors state."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.calib.arguments.hugging_face import Training, from_hugging_face, from_training
from forerun.calib.errors import ConfigError
from forerun.calib.memory.peak import memory
from forerun.calib.workload.config import Sharding
from forerun.calib.workload.model_shape import ModelShape, Normalization, PositionEmbedding

LLAMA3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
MIXTRAL_8X7B = {
    **LLAMA3_8B,
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GPT2_XL = {"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48, "vocab_size": 50257}
NEOX_20B = {
    "model_type": "gpt_neox",
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "max_position_embeddings": 2048,
    "num_attention_heads": 64,
    "num_hidden_layers": 44,
    "vocab_size": 50432,
}
QWEN2_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


def weights(model: ModelShape) -> int:
    """Weights of products and embeddings, counted by hand; norms and biases are some 0.1 %."""
    hidden, gates = model.hidden_size, 3 if model.is_gated else 2
    heads, latent = model.num_attention_heads, model.latent_attention
    attention = hidden * model.kv_channels * 2 * (heads + model.num_query_groups)
    if latent:
        query = latent.qk_head_dim + latent.qk_pos_emb_head_dim
        attention = (
            latent.q_lora_rank * (hidden + heads * query)
            + hidden * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
            + latent.kv_lora_rank * heads * (latent.qk_head_dim + latent.v_head_dim)
            + heads * latent.v_head_dim * hidden
        )
    total = model.vocab_size * hidden * (1 if model.is_tied else 2)
    for layer in range(model.num_layers):
        mlp = model.ffn_hidden_size
        if model.experts and model.has_experts(layer):
            routed = model.experts.num_experts * model.experts.ffn_hidden_size
            mlp = routed + model.experts.shared_ffn_hidden_size
        total += attention + gates * hidden * mlp
    return total


@pytest.mark.parametrize(
    ("config", "stated"),
    [
        (LLAMA3_8B, 8.03e9),
        (MIXTRAL_8X7B, 46.7e9),
        (QWEN3_30B_A3B, 30.5e9),
        (DEEPSEEK_V3, 671e9),
        ({**GPT2_XL, "n_positions": 1024}, 1.558e9),
        (NEOX_20B, 20.55e9),
        (QWEN2_7B, 7.62e9),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_weights_are_what_the_authors_state(config: dict[str, Any], stated: float) -> None:
    assert weights(from_hugging_face(config)) == pytest.approx(stated, rel=5e-3)


def test_a_configuration_that_transformers_itself_writes_has_the_same_experts() -> None:
    transformers = pytest.importorskip("transformers")
    for name, stated in {"Qwen3MoeConfig": 128, "Qwen2MoeConfig": 60, "MixtralConfig": 8}.items():
        model = from_hugging_face(getattr(transformers, name)().to_dict())
        assert model.experts is not None and model.experts.num_experts == stated


def test_kinds_differ_where_their_papers_say() -> None:
    llama = from_hugging_face(LLAMA3_8B, seq_length=4096, vocab_multiple=512)
    assert (llama.seq_length, llama.vocab_size) == (4096, 128512)
    assert llama.normalization is Normalization.RMS_NORM and not llama.has_bias
    assert from_hugging_face(QWEN2_7B).has_qkv_bias
    assert from_hugging_face(QWEN3_30B_A3B).has_qk_norm
    deepseek = from_hugging_face(DEEPSEEK_V3)
    assert deepseek.num_prediction_layers == 1
    assert [deepseek.has_experts(layer) for layer in (2, 3)] == [False, True]
    neox = from_hugging_face(NEOX_20B)
    assert neox.position_embedding is PositionEmbedding.ROPE
    assert neox.normalization is Normalization.LAYER_NORM and neox.has_bias


def test_every_second_layer_may_be_sparse() -> None:
    config = {**QWEN3_30B_A3B, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    model = from_hugging_face(config)
    assert [model.has_experts(layer) for layer in range(4)] == [False, False, False, True]


def test_an_unknown_kind_and_a_missing_size_are_named() -> None:
    with pytest.raises(ConfigError, match=r"model_type 'bert' .* known are: deepseek_v2, .*qwen3"):
        from_hugging_face({"model_type": "bert"})
    with pytest.raises(ConfigError, match="num_hidden_layers is missing"):
        from_hugging_face({**QWEN2_7B, "num_hidden_layers": None})


def test_a_sharded_loop_is_modelled_as_one_and_keeps_a_share_of_everything() -> None:
    gpt2: dict[str, Any] = {
        "model_type": "gpt2",
        "n_layer": 8,
        "n_embd": 64,
        "n_head": 4,
        "n_positions": 128,
    }
    gpt2["vocab_size"] = 512
    plain, sharded = (
        from_training(
            gpt2,
            Training(micro_batch_size=2, seq_length=32, num_ranks=4, is_sharded=is_sharded),
        )
        for is_sharded in (False, True)
    )
    assert plain.parallelism.sharded is Sharding.NONE
    assert sharded.parallelism.sharded is Sharding.WEIGHTS and not sharded.unmodelled
    whole, share = memory(plain), memory(sharded)
    for part in ("weights_nbytes", "grads_nbytes", "optimizer_nbytes"):
        assert getattr(share, part) == pytest.approx(getattr(whole, part) / 4, rel=1e-3)
