"""Published config.json files, against the parameters of the published models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.arguments.hugging_face import Training, from_hugging_face, from_training
from forerun.calib.arguments.hugging_face_shape import (
    _FAMILIES,
    _unread_keys,
    notes_of_keys,
    text_keys,
)
from forerun.calib.arguments.megatron_args import apply_options
from forerun.calib.errors import ConfigError
from forerun.calib.layers.stage_work import stage_parameters
from forerun.calib.memory.peak import memory
from forerun.calib.workload.config import Batch, RunConfig
from forerun.calib.workload.model_shape import ModelShape, Normalization, PositionEmbedding
from forerun.calib.workload.parallelism import Parallelism, Sharding

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
GEMMA2_9B = {
    "model_type": "gemma2",
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA3_27B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
GLM_4_5 = {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "use_qk_norm": True,
    "vocab_size": 151552,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "sliding_window": 128,
    "vocab_size": 201088,
}
PHI_2 = {
    "model_type": "phi",
    "hidden_act": "gelu_new",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": None,
    "vocab_size": 51200,
}
PHI_4 = {
    "model_type": "phi3",
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "max_position_embeddings": 16384,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 10,
    "vocab_size": 100352,
}
LLAMA4_MAVERICK = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "head_dim": 128,
        "hidden_size": 5120,
        "interleave_moe_layer_step": 2,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "vocab_size": 202048,
    },
}
KIMI_K2 = {
    **DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "vocab_size": 163840,
}
MINIMAX_M2 = {
    "model_type": "minimax_m2",
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "use_qk_norm": True,
    "vocab_size": 200064,
}
MINIMAX_TEXT_01 = {
    "model_type": "minimax_text_01",
    "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10,
    "head_dim": 128,
    "hidden_size": 6144,
    "intermediate_size": 9216,
    "num_attention_heads": 64,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "vocab_size": 200064,
}
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
}
JAMBA_MINI = {
    "model_type": "jamba",
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 256,
    "mamba_expand": 2,
    "num_attention_heads": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 65536,
}
NEMOTRON_H_8B = {
    "model_type": "nemotron_h",
    "attention_head_dim": 128,
    "conv_kernel": 4,
    "expand": 2,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-",
    "intermediate_size": 21504,
    "mamba_head_dim": 64,
    "mamba_num_heads": 128,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 8,
    "ssm_state_size": 128,
    "vocab_size": 131072,
}
MAMBA2_2_7B = {
    "model_type": "mamba2",
    "expand": 2,
    "head_dim": 64,
    "hidden_size": 2560,
    "n_groups": 1,
    "num_heads": 80,
    "num_hidden_layers": 64,
    "state_size": 128,
    "tie_word_embeddings": True,
    "time_step_rank": 160,
    "vocab_size": 50288,
}


def parameters(model: ModelShape) -> int:
    """Parameters of the unsplit model, without layers that predict further ahead."""
    plain = replace(model, num_prediction_layers=0, prediction_kinds="")
    batch = Batch(micro_batch_size=1, global_batch_size=1)
    return sum(stage_parameters(RunConfig(model=plain, parallelism=Parallelism(), batch=batch), 0))


def active(model: ModelShape) -> int:
    """Parameters that a token passes through, with both embeddings."""
    experts = model.experts
    assert experts is not None
    return parameters(replace(model, experts=replace(experts, num_experts=experts.top_k)))


# Parameters that transformers 5.23 builds on the meta device, except for MiniMax-Text-01, whose
# paper states 456 billion (arXiv:2501.08313).
@pytest.mark.parametrize(
    ("config", "stated"),
    [
        (LLAMA3_8B, 8_030_261_248),
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN3_30B_A3B, 30_532_122_624),
        (DEEPSEEK_V3, 671_026_404_352),
        (KIMI_K2, 1_026_408_209_408),
        ({**GPT2_XL, "n_positions": 1024}, 1_557_611_200),
        (NEOX_20B, 20_554_567_680),
        (QWEN2_7B, 7_615_616_512),
        (GEMMA2_9B, 9_241_705_984),
        (GEMMA3_27B, 27_009_346_304),
        (GLM_4_5, 352_797_814_784),
        (GPT_OSS_20B, 20_914_757_184),
        (PHI_2, 2_779_683_840),
        (PHI_4, 14_659_507_200),
        (LLAMA4_MAVERICK, 400_711_848_960),
        (MINIMAX_M2, 228_689_748_992),
        (MINIMAX_TEXT_01, 456_090_000_000),
        (QWEN3_NEXT_80B, 79_674_391_296),
        (JAMBA_MINI, 51_570_323_328),
        (NEMOTRON_H_8B, 8_100_852_736),
        (MAMBA2_2_7B, 2_702_599_680),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_parameters_are_those_of_the_published_models(config: dict[str, Any], stated: int) -> None:
    model = from_hugging_face(config, vocab_multiple=1)
    assert parameters(model) == pytest.approx(stated, rel=2e-3)


@pytest.mark.parametrize(
    "config",
    [NEOX_20B, GEMMA2_9B, GPT_OSS_20B, PHI_2, LLAMA4_MAVERICK, QWEN3_NEXT_80B, NEMOTRON_H_8B],
    ids=lambda config: config["model_type"],
)
def test_an_option_of_the_layout_leaves_the_model_as_it_is(config: dict[str, Any]) -> None:
    """Also what Megatron has no option for: a parallel residual, chunks, sizes of other mixers."""
    run = RunConfig(
        model=from_hugging_face(config, seq_length=4096),
        parallelism=Parallelism(dp=8),
        batch=Batch(micro_batch_size=1, global_batch_size=64),
    )
    other = apply_options(run, ["--micro-batch-size", "2"])
    assert other.batch.micro_batch_size == 2
    assert other.model == run.model


@pytest.mark.parametrize(
    ("config", "stated", "embedding"),
    [
        (QWEN3_30B_A3B, 3.3e9, 0),
        (DEEPSEEK_V3, 37e9, 0),
        (KIMI_K2, 32e9, 1),
        (GPT_OSS_20B, 3.6e9, 1),
        (LLAMA4_MAVERICK, 17e9, 0),
        (MINIMAX_TEXT_01, 45.9e9, 2),
        (MINIMAX_M2, 10e9, 2),
        (JAMBA_MINI, 12e9, 0),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_active_parameters_are_as_stated_without_the_tables_that_authors_omit(
    config: dict[str, Any], stated: float, embedding: int
) -> None:
    model = from_hugging_face(config, vocab_multiple=1)
    tables = embedding * model.vocab_size * model.hidden_size
    assert active(model) - tables == pytest.approx(stated, rel=0.025)


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
    with pytest.raises(ConfigError, match=r"model_type 'gpt9' is not known"):
        from_hugging_face({"model_type": "gpt9"})
    with pytest.raises(ConfigError, match="num_hidden_layers is missing"):
        from_hugging_face({**QWEN2_7B, "num_hidden_layers": None})


def test_layers_of_hybrid_models_are_those_of_their_keys() -> None:
    qwen, jamba = from_hugging_face(QWEN3_NEXT_80B), from_hugging_face(JAMBA_MINI)
    assert qwen.layer_kinds == "GEGEGE*E" * 12 and qwen.has_attention_gate
    assert jamba.layer_kinds == "M-MEM-ME*-MEM-ME" * 4
    assert from_hugging_face(NEMOTRON_H_8B).layer_kinds == NEMOTRON_H_8B["hybrid_override_pattern"]
    assert from_hugging_face(MAMBA2_2_7B).layer_kinds == "M" * 64
    assert from_hugging_face(MINIMAX_TEXT_01).layer_kinds == ("LE" * 7 + "*E") * 10
    words = ["linear_attention", "full_attention"] * 24
    listed = {**QWEN3_NEXT_80B, "layer_types": words, "num_nextn_predict_layers": 1}
    model = from_hugging_face(listed)
    assert (model.layer_kinds, model.prediction_kinds) == ("GE*E" * 24, "*E")


def test_experts_are_where_their_keys_place_them() -> None:
    def sparse(**keys: object) -> list[int]:
        model = from_hugging_face({**MIXTRAL_8X7B, "num_hidden_layers": 8, **keys})
        return [layer for layer in range(8) if model.has_experts(layer)]

    assert sparse() == list(range(8))
    assert sparse(interleave_moe_layer_step=4) == [3, 7]
    assert sparse(moe_layers=[2, 5]) == [2, 5]
    assert sparse(moe_layer_freq=[0, 1, 1, 1, 0, 0, 0, 1]) == [1, 2, 3, 7]
    assert sparse(mlp_layer_types=["dense"] * 6 + ["sparse"] * 2) == [6, 7]
    assert sparse(moe_layer_start_index=2, moe_layer_end_index=4, moe_layer_interval=1) == [2, 3, 4]
    assert sparse(num_dense_layers=7) == [7]


def test_an_unknown_family_is_read_by_its_keys_with_a_note() -> None:
    config = {**LLAMA3_8B, "model_type": "new", "hidden_act": "silu", "rms_norm_eps": 1e-6}
    assert from_hugging_face(config) == from_hugging_face(LLAMA3_8B)
    (note,) = notes_of_keys(config, seq_length=8192)
    assert note.startswith("model_type 'new' is not known and read by its keys")
    assert not notes_of_keys(LLAMA3_8B, seq_length=8192)
    with pytest.raises(ConfigError, match=r"nor what altup_num_inputs, laurel_rank do; give the"):
        from_hugging_face({**config, "laurel_rank": 64, "altup_num_inputs": 4})
    with pytest.raises(ConfigError, match="hidden_act silu its layers are open"):
        from_hugging_face({**config, "hidden_act": "gelu"})
    with pytest.raises(ConfigError, match="is not of a decoder alone"):
        from_hugging_face({**config, "architectures": ["NewForMaskedLM"]})


def test_what_a_shape_omits_is_noted() -> None:
    (encoder,) = notes_of_keys(GEMMA3_27B, seq_length=8192)
    assert encoder == "config.json has vision_config: only its text model counts"
    (prediction,) = notes_of_keys(MINIMAX_M2, seq_length=8192)
    assert prediction.startswith("config.json has 3 prediction layers")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "lists 3 layers, not num_hidden_layers 32"),
        ({"layer_types": ["rwkv"] * 32}, "has 'rwkv', which is not known"),
        ({"layer_types": ["linear_attention"] * 32}, "linear attention whose sizes are not known"),
        ({"mamba_d_state": 16}, "no key says which they are"),
        ({"num_hidden_layers": 10**9}, "num_layers 1000000000 is above"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
    ],
)
def test_layers_that_are_not_settled_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_hugging_face({**LLAMA3_8B, **keys})


def test_a_loop_is_modelled_only_if_its_modules_are_recorded() -> None:
    training = Training(micro_batch_size=1, seq_length=32)
    assert from_training(QWEN3_30B_A3B, training).model.num_layers == 48
    with pytest.raises(ConfigError, match="'jamba' are not recorded; recorded are deepseek_v2"):
        from_training(JAMBA_MINI, training)


@pytest.mark.parametrize(
    ("kernels", "is_fused"), [(None, True), ({"fused_linear_cross_entropy": False}, False)]
)
def test_ligers_head_keeps_no_logits(kernels: dict[str, bool] | None, is_fused: bool) -> None:
    arguments = pytest.importorskip("transformers").TrainingArguments
    fuses_head = pytest.importorskip("forerun.hooks.adapters.hugging_face").fuses_head
    args = arguments("out", use_liger_kernel=True, liger_kernel_config=kernels)
    assert fuses_head(args) is is_fused and not fuses_head(arguments("out"))
    training = Training(
        micro_batch_size=4,
        seq_length=4096,
        recomputes=True,
        fuses_head=is_fused,
        device="H100",
        framework="transformers 5.23",
    )
    config = from_training(LLAMA3_8B, training)
    logits = 4 * 4096 * config.model.vocab_size
    assert memory(config).logits_nbytes == (0 if is_fused else 12 * logits)


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


@pytest.mark.parametrize("kind", [*_FAMILIES, "gpt2"])
def test_a_known_family_has_no_unread_key_of_its_own(kind: str) -> None:
    """All keys of transformers' own classes, which a running loop hands over in full."""
    auto = pytest.importorskip("transformers").AutoConfig
    try:
        keys = text_keys(auto.for_model(kind).to_dict())
    except ValueError:
        pytest.skip("no class of transformers")
    assert _unread_keys(keys, is_known=True) == []


@pytest.mark.parametrize("config", [LLAMA3_8B, MIXTRAL_8X7B, QWEN3_30B_A3B, DEEPSEEK_V3])
@given(
    first=st.sampled_from(["moe", "expert", "attn", "mlp", "hidden"]),
    last=st.sampled_from(["latent_size", "low_rank", "extra_dim", "num_copies", "latent_heads"]),
    value=st.integers(2, 1 << 20) | st.lists(st.integers(2, 99), min_size=1, max_size=3),
)
def test_a_size_that_is_not_read_is_named_for_a_known_family_too(
    config: dict[str, Any], first: str, last: str, value: object
) -> None:
    """As moe_latent_size of Nemotron 3 Super, whose experts are a quarter as wide as without it."""
    name = f"{first}_{last}"
    with pytest.raises(ConfigError, match=f"is known, but not what {name} does"):
        from_hugging_face({**config, name: value})
    assert from_hugging_face({**config, name: None}) == from_hugging_face(config)


def test_an_encoder_is_said_to_be_one() -> None:
    t5 = {"model_type": "t5", "is_encoder_decoder": True, "d_model": 512, "num_layers": 6}
    with pytest.raises(ConfigError, match="'t5' is not of a decoder alone"):
        from_hugging_face(t5)
