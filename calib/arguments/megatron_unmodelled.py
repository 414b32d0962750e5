"""Settings of Megatron that touch time or memory and that the model leaves out."""

from __future__ import annotations

from typing import Any

_OFF = ("None", "False", "0", "0.0", "", "[]", "none")
"""Values that leave a setting out of use."""
_LEFT_OUT = """
    activation_offload_fraction attention_output_gate batch_invariant_mode
    check_weight_hash_across_dp_replicas_interval cpu_offloading cpu_offloading_num_layers
    ddp_num_buckets ddp_reduce_scatter_with_fp32_accumulation decoder_num_layers
    decrease_batch_size_if_needed defer_embedding_wgrad_compute delay_wgrad_compute
    deterministic_mode empty_unused_memory_level
    experimental_attention_variant fine_grained_activation_offloading first_last_layers_bf16
    fp32_residual_connection full_validation heterogeneous_layers_config_encoded_json
    heterogeneous_layers_config_path hierarchical_context_parallel_sizes hybrid_attention_ratio
    hybrid_context_parallel hybrid_layer_pattern hybrid_mlp_ratio hybrid_override_pattern
    is_hybrid_model kitchen_config_file kitchen_recipe_number linear_attention_freq
    log_num_zeros_in_grad log_params_norm moe_extended_tp moe_latent_size
    multiple_validation_sets nccl_ub non_persistent_save_interval optimizer_cpu_offload
    overlap_moe_expert_parallel_comm
    overlap_param_gather_with_optimizer_step perform_rl_step qk_clip qk_l2_norm sft skip_train
    step_batch_size_schedule symmetric_ar_type te_precision_config_file timing_log_level
    tp_comm_overlap_rs_dgrad train_sync_interval use_custom_fsdp use_kitchen_attention
    use_legacy_models use_megatron_fsdp use_precision_aware_optimizer use_ring_exchange_p2p
    use_sharp use_torch_fsdp2 vision_pretraining window_size yaml_cfg
"""
LEFT_OUT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_LEFT_OUT.split(), ()),
    "cuda_graph_scope": ("full", "['full']", "full_iteration", "['full_iteration']"),
    "exp_avg_dtype": ("fp32", "torch.float32"),
    "exp_avg_sq_dtype": ("fp32", "torch.float32"),
    "main_params_dtype": ("fp32", "torch.float32"),
    "optimizer": ("adam",),
    "pipeline_model_parallel_comm_backend": ("nccl",),
    "softmax_type": ("vanilla",),
    "spec": ("local", "['local']"),
    "tensor_parallel_num_weight_shards": ("1",),
}
"""Name, and the values beyond ``_OFF`` that leave it out of use."""
SWITCHED_OFF = (
    "fp8_wgrad",
    "tp_comm_bulk_dgrad",
    "tp_comm_bulk_wgrad",
    "tp_comm_overlap_ag",
    "tp_comm_overlap_rs",
    "tp_comm_split_ag",
    "tp_comm_split_rs",
)
"""Settings that are on by default and are left out where they are off."""


def left_out(args: Any) -> tuple[str, ...]:
    """Names of the settings in use that the model leaves out, from an argument namespace."""
    used = [name for name in LEFT_OUT if is_used(name, getattr(args, name, None))]
    return (*used, *(name for name in SWITCHED_OFF if getattr(args, name, None) is False))


def is_used(name: str, value: Any) -> bool:
    """True where a setting is neither off nor at the value that the model assumes."""
    word = str(value)
    return word not in _OFF and word not in LEFT_OUT[name]
