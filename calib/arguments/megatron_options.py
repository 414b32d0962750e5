"""Names of Megatron's arguments: which the model reads, and how a command line spells them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..workload.argument_values import is_true
from .megatron_harmless import HARMLESS, HARMLESS_WHEN_VALIDATED
from .megatron_unmodelled import LEFT_OUT, SWITCHED_OFF

_MODELLED = """
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    accumulate_allreduce_grads_in_fp32 add_bias_linear add_qkv_bias attention_backend
    attention_dropout bf16 context_parallel_size cp_comm_type cross_entropy_fusion_impl
    cross_entropy_loss_fusion
    cuda_graph_impl ddp_bucket_size ddp_pad_buckets_for_high_nccl_busbw
    decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers distribute_saved_activations
    enable_cuda_graph encoder_num_layers encoder_seq_length eval_interval eval_iters
    expert_model_parallel_size expert_tensor_parallel_size external_cuda_graph ffn_hidden_size fp16
    fp4 fp4_param fp8 fp8_param_gather fp8_recipe global_batch_size grad_reduce_in_bf16
    gradient_accumulation_fusion group_query_attention hidden_dropout hidden_size kv_channels
    kv_lora_rank main_grads_dtype make_vocab_size_divisible_by masked_softmax_fusion
    max_position_embeddings
    micro_batch_size microbatch_group_size_per_vp_stage moe_expert_capacity_factor
    moe_ffn_hidden_size moe_grouped_gemm moe_layer_freq moe_layer_recompute
    moe_pad_expert_input_to_capacity moe_router_dtype moe_router_topk moe_shared_expert_gate
    moe_shared_expert_intermediate_size moe_shared_expert_overlap moe_token_dispatcher_type
    mtp_num_layers multi_latent_attention normalization num_attention_heads
    num_distributed_optimizer_instances num_experts num_layers num_layers_per_virtual_pipeline_stage
    num_query_groups num_virtual_stages_per_pipeline_rank overlap_grad_reduce overlap_p2p_comm
    overlap_p2p_comm_warmup_flush
    overlap_param_gather padded_vocab_size pipeline_model_parallel_layout
    pipeline_model_parallel_size position_embedding_type q_lora_rank qk_head_dim qk_layernorm
    qk_pos_emb_head_dim quick_geglu rampup_batch_size recompute_activations recompute_granularity
    recompute_method recompute_modules recompute_num_layers save_interval seq_length
    sequence_parallel swiglu tensor_model_parallel_size tokenizer_type tp_comm_overlap train_iters
    train_samples transformer_impl untie_embeddings_and_output_weights use_distributed_optimizer
    use_rotary_position_embeddings use_tp_pp_dp_mapping v_head_dim vocab_size
"""
MODELLED = frozenset(_MODELLED.split())
"""Arguments that ``from_namespace`` reads, by their names in Megatron's namespace."""
_DERIVED = """
    data_parallel_size fp4_format fp8_param gated_linear_unit grad_reduce_in_fp32 num_moe_experts
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage ranks_per_node
    virtual_pipeline_model_parallel_size world_size
"""
DERIVED = frozenset(_DERIVED.split())
"""Names that it reads as well, of validated arguments, of a ``TransformerConfig`` or a launcher."""
SPELLED: Mapping[str, tuple[str, Any]] = {
    "disable_bias_linear": ("add_bias_linear", False),
    "fp4_format": ("fp4", None),
    "fp4_param_gather": ("fp4_param", None),
    "fp8_e4m3": ("fp8", "e4m3"),
    "fp8_format": ("fp8", None),
    "fp8_hybrid": ("fp8", "hybrid"),
    "microbatch_group_size_per_virtual_pipeline_stage": (
        "microbatch_group_size_per_vp_stage",
        None,
    ),
    "no_gradient_accumulation_fusion": ("gradient_accumulation_fusion", False),
    "no_masked_softmax_fusion": ("masked_softmax_fusion", False),
    "no_overlap_p2p_communication": ("overlap_p2p_comm", False),
    "overlap_p2p_communication_warmup_flush": ("overlap_p2p_comm_warmup_flush", None),
    "persistent_save_interval": ("save_interval", None),
    "use_nccl_ub": ("nccl_ub", None),
    **{f"{no}_{name}": (name, False) for name in SWITCHED_OFF for no in ("no", "disable")},
}
"""Options named otherwise in the namespace: that name, and the value that a switch stands for."""
_READ = MODELLED | DERIVED | set(LEFT_OUT) | set(SWITCHED_OFF)
_BRACKETS = re.compile(r"[\[\],]")
_LISTS = ("cp_comm_type", "cuda_graph_scope", "rampup_batch_size", "recompute_modules")


@dataclass(slots=True, kw_only=True)
class ArgumentTable:
    """Arguments by their names in the namespace, and those that nobody knows, in order."""

    values: dict[str, Any] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def put(self, name: str, value: Any) -> None:
        """Take one argument; ``value`` is True for a switch."""
        target, constant = SPELLED.get(name, (name, None))
        if constant is not None:
            if is_true(value):
                self.values[target] = constant
        elif target in _READ:
            is_split = target in _LISTS and isinstance(value, str)
            self.values[target] = _BRACKETS.sub(" ", value).split() if is_split else value
        elif not _is_harmless(name):
            self.unknown.append(name)


def read_words(argv: Sequence[str]) -> ArgumentTable:
    """The options of a command line without its launcher; stray words count as unknown."""
    table = ArgumentTable()
    for option, words in options_of(argv):
        if not option:
            table.unknown += words
            continue
        value: Any = True if not words else words[0] if len(words) == 1 else words
        found = len(table.unknown)
        table.put(option.lstrip("-").replace("-", "_"), value)
        table.unknown[found:] = [option] * (len(table.unknown) - found)
    return table


def read_mapping(mapping: Mapping[str, Any]) -> ArgumentTable:
    """Arguments of a parsed YAML or JSON file, by option (``--num-layers``) or by name.

    ``MODEL_ARGS`` of Megatron's own functional tests and the sections ``language_model`` and
    ``model_parallel`` of its ``--yaml-cfg`` are looked into.
    """
    table = ArgumentTable()
    for key, value in _flat(mapping.get("MODEL_ARGS", mapping)):
        is_option = key.startswith("-")
        if value is None or (is_option and value is False):
            continue
        name = key.lstrip("-").replace("-", "_")
        found = len(table.unknown)
        # Functional tests escape what a shell would take for its own.
        table.put(name, value.replace("\\", "").strip("'\"") if isinstance(value, str) else value)
        table.unknown[found:] = [key] * (len(table.unknown) - found)
    if str(mapping.get("activation_func", "")).lower() == "swiglu":
        table.values["swiglu"] = True
    return table


def options_of(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option with the words behind it; words before the first have the option ``""``."""
    option, words = "", []
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            if option or words:
                yield option, words
            option, joined, value = word.partition("=")
            words = [value] if joined else []
        else:
            words.append(word)
    if option or words:
        yield option, words


def is_known(name: str) -> bool:
    """True for a name of Megatron's, with underscores, that is read, left out or harmless."""
    return name in _READ or name in SPELLED or _is_harmless(name)


def _flat(mapping: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in mapping.items():
        if key in ("language_model", "model_parallel") and isinstance(value, Mapping):
            yield from value.items()
        else:
            yield str(key), value


def _is_harmless(name: str) -> bool:
    names = (name, f"no_{name}", f"disable_{name}")
    return name in HARMLESS_WHEN_VALIDATED or any(n in HARMLESS for n in names)
