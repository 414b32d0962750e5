"""``RunConfig`` as values of Megatron's arguments: the inverse of ``from_namespace``.

Sharding over replicas and the width of optimizer states are converted here in both directions.
Rules are those of core_v0.16.1: ``--use-megatron-fsdp`` (earlier ``--use-custom-fsdp``) with
``--data-parallel-sharding-strategy``, or ``--use-torch-fsdp2``, which shards everything, always
overlaps and excludes a distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from ..errors import ConfigError
from ..workload import (
    CONFIG_SWITCHES,
    Arguments,
    Attention,
    ContextComm,
    Experts,
    Fp8Recipe,
    ModelShape,
    Parallelism,
    Precision,
    Recompute,
    RunConfig,
    Sharding,
    write_layout,
)
from .hybrid_pattern import pattern_values
from .megatron_options import (
    EXPERT_SWITCHES,
    GROUPS,
    PARALLEL_SWITCHES,
    SPELLED,
    SWITCHES,
    Values,
    option_words,
)

_STRATEGY = "data_parallel_sharding_strategy"
_STRATEGIES = {
    "no_shard": Sharding.NONE,
    "optim": Sharding.OPTIMIZER,
    "optim_grads": Sharding.GRADS,
    "optim_grads_params": Sharding.WEIGHTS,
}
_FSDP = ("use_megatron_fsdp", "use_custom_fsdp")
_STATE_DTYPES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_DTYPE_NBYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
_DTYPE_NBYTES |= {"fp8": 1, "uint8": 1}
_TORCH_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
AS_ELSEWHERE = "auto"
"""Value for an unset type of FSDP's gradients."""


def with_sharding(par: Parallelism, given: Arguments) -> Parallelism:
    """Return the layout with FSDP's settings; unchanged if FSDP is off."""
    if given.is_on("use_torch_fsdp2"):
        return replace(
            par,
            is_optimizer_distributed=True,
            sharding=Sharding.WEIGHTS,
            regathers_weights=given.is_on("torch_fsdp2_reshard_after_forward", default=True),
            overlaps_grad_reduce=True,
            overlaps_param_gather=True,
        )
    if not given.is_on(*_FSDP):
        return par
    strategy = given.text(_STRATEGY, default="no_shard")
    if strategy not in _STRATEGIES:
        raise ConfigError(
            f"--data-parallel-sharding-strategy {strategy!r} is not known; choose from "
            f"{', '.join(_STRATEGIES)}"
        )
    sharding = _STRATEGIES[strategy]
    if sharding is Sharding.NONE:
        return par
    return replace(par, is_optimizer_distributed=True, sharding=sharding)


def fsdp_dtypes(given: Arguments) -> tuple[str, str]:
    """Return the types in which Megatron's FSDP stores and reduces gradients (core 0.18 and later):
    ``fp32``, ``bf16``, ``fp16`` or ``AS_ELSEWHERE``."""
    if not given.is_on(*_FSDP):
        return AS_ELSEWHERE, AS_ELSEWHERE
    names = ("megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype")
    words = (given.text(name, default=AS_ELSEWHERE).rpartition(".")[2] for name in names)
    main, sent = (_TORCH_NAMES.get(word, word) for word in words)
    return main, main if sent == AS_ELSEWHERE else sent


def sharding_values(par: Parallelism) -> Values:
    """Return the arguments that ``with_sharding`` reads; empty up to the distributed optimizer."""
    names = {sharding: name for name, sharding in _STRATEGIES.items()}
    if par.sharded in (Sharding.NONE, Sharding.OPTIMIZER):
        return {}
    if par.shards_weights and not par.regathers_weights:
        return {"use_torch_fsdp2": True}
    return {"use_megatron_fsdp": True, _STRATEGY: names[par.sharded]}


def with_states(config: RunConfig, given: Arguments) -> RunConfig:
    """Return the run with the size of its optimizer states, and the share offloaded to the host."""
    if given.is_on("optimizer_cpu_offload"):
        is_stated = given.get("optimizer_offload_fraction") is not None
        stated = given.real("optimizer_offload_fraction") if is_stated else 1.0
        config = replace(
            config,
            optimizer_offload_frac=stated,
            overlaps_optimizer_offload=given.is_on("overlap_cpu_optimizer_d2h_h2d"),
        )
    if given.is_on("use_precision_aware_optimizer"):
        weights, *moments = (_nbytes(given, name) for name in _STATE_DTYPES)
        if weights == 4:
            weights = _fp32_weight_nbytes(config)
        config = replace(config, optimizer_state_nbytes=weights + sum(moments))
    return config


def _fp32_weight_nbytes(config: RunConfig) -> int:
    """Return the bytes of the precision-aware optimizer for an fp32 weight.

    Beside a weight in bf16 it stores only the other 16 bits (``store_param_remainders``); with an
    fp8 recipe other than delayed scaling, Megatron's core holds whole weights in its place unless
    they are offloaded (``use_precision_aware_optimizer_no_fp8_or_ds_fp8`` of core_v0.16.1).
    """
    is_of_optimizer = config.fp8 in (Fp8Recipe.NONE, Fp8Recipe.DELAYED, Fp8Recipe.NVFP4)
    splits = is_of_optimizer or config.optimizer_offload_frac > 0
    return 2 if splits and config.precision is Precision.BF16 else 4


def optimizer_values(config: RunConfig) -> Values:
    """Return the arguments for optimizer states of other widths or on the host, as ``with_states``
    reads them."""
    values: Values = {}
    if config.optimizer_offload_frac:
        values = {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": config.optimizer_offload_frac,
            "overlap_cpu_optimizer_d2h_h2d": config.overlaps_optimizer_offload or None,
        }
    if not config.optimizer_state_nbytes:
        return values
    # Several pairs may give the sum; take the widest first moment, as the order has no cost.
    weights = _fp32_weight_nbytes(config)
    first, second = _moments(config.optimizer_state_nbytes - weights)
    return {
        **values,
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": first,
        "exp_avg_sq_dtype": second,
    }


def _moments(nbytes: int) -> tuple[str, str]:
    names = {4: "fp32", 2: "bf16", 1: "fp8"}
    for first in names:
        if nbytes - first in names:
            return names[first], names[nbytes - first]
    return "fp32", "fp32"


def _nbytes(given: Arguments, name: str) -> int:
    word = given.text(name, default="fp32").rpartition(".")[2].lower()
    if word not in _DTYPE_NBYTES:
        raise ConfigError(
            f"--{name.replace('_', '-')} {word!r} is not known; choose from fp32, bf16, fp16, fp8"
        )
    return _DTYPE_NBYTES[word]


_SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
    *("kv_channels", "seq_length"),
)
"""Sizes of ``ModelShape`` that have Megatron's names."""
_OPTIONS = {
    target: (name, constant)
    for name, (target, constant) in SPELLED.items()
    if name not in ("checkpoint_activations", "fp8_e4m3", "fp8_hybrid", "persistent_save_interval")
}


def layout_values(config: RunConfig) -> Values:
    """Return a layout's values, by name in the namespace; defaults are omitted, except sizes."""
    par = config.parallelism
    values: Values = {
        "tensor_model_parallel_size": par.tp,
        "pipeline_model_parallel_size": par.pp,
        "micro_batch_size": config.batch.micro_batch_size,
        "global_batch_size": config.cadence.full_batch_size or config.batch.global_batch_size,
    }
    if config.cadence.step_batch_size_schedule:
        del values["global_batch_size"]  # Megatron accepts only one of the two
    optional = {
        "context_parallel_size": par.cp if par.cp > 1 else 0,
        **_context_values(par),
        "expert_model_parallel_size": par.ep if par.ep > 1 else 0,
        "expert_tensor_parallel_size": par.etp,
        "num_distributed_optimizer_instances": max(par.num_optimizer_instances - 1, 0)
        and par.num_optimizer_instances,
        **_chunk_values(config),
        "microbatch_group_size_per_vp_stage": par.microbatch_group_size,
        "ddp_bucket_size": par.bucket_numel,
        **_recompute_values(config),
        **_fp8_values(config),
        **_graph_values(config),
        "fine_grained_activation_offloading": bool(config.offload_modules),
        "offload_modules": list(config.offload_modules),
        **{name: getattr(par, field) for field, name in PARALLEL_SWITCHES.items()},
        **sharding_values(par),
        **optimizer_values(config),
        "cross_entropy_fusion_impl": _fusion_of(config),
        **_gradient_values(config),
        **_deferral_values(config),
    }
    values.update((name, value) for name, value in optional.items() if value)
    if config.fp8 is not Fp8Recipe.NONE and any(config.wide_layers):
        values["first_last_layers_bf16"] = True
        for end, num_layers in zip(("start", "end"), config.wide_layers, strict=True):
            values[f"num_layers_at_{end}_in_bf16"] = num_layers
    if values.get("use_torch_fsdp2"):
        values["torch_fsdp2_reshard_after_forward"] = False
        for name in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
            values.pop(name, None)
    if par.vp > 1 and not par.overlaps_p2p:
        values["overlap_p2p_comm"] = False
    if not (par.overlaps_param_gather and par.vp > 1):
        values.pop(PARALLEL_SWITCHES["gathers_beside_update"], None)
    if par.overlaps_p2p_ends:
        values["overlap_p2p_comm_warmup_flush"] = True
    return values | _switches(config, is_layout=True)


def model_values(config: RunConfig) -> Values:
    """Return values of model, precision, attention and cadence, by name in the namespace."""
    model, cadence = config.model, config.cadence
    is_grouped = model.num_query_groups != model.num_attention_heads
    values: Values = {
        **{name: getattr(model, name) for name in _SIZES},
        "padded_vocab_size": model.vocab_size,
        "normalization": model.normalization.value,
        "position_embedding_type": model.position_embedding.value,
        "attention_backend": config.attention.value,
    }
    optional = {
        "max_position_embeddings": model.max_position_embeddings,
        "group_query_attention": is_grouped,
        "num_query_groups": model.num_query_groups if is_grouped else 0,
        "swiglu": model.is_gated,
        "add_qkv_bias": model.has_qkv_bias,
        "qk_layernorm": model.has_qk_norm,
        "attention_output_gate": model.has_attention_gate,
        "untie_embeddings_and_output_weights": not model.is_tied,
        "mtp_num_layers": model.num_prediction_layers,
        **(_expert_values(model.experts) if model.experts else {}),
        **_latent_values(model),
        **_window_values(model),
        "bf16": config.precision is Precision.BF16,
        "fp16": config.precision is Precision.FP16,
        "train_iters": cadence.train_iters,
        "eval_interval": cadence.eval_interval,
        "save_interval": cadence.save_interval,
        "rampup_batch_size": [str(word) for word in cadence.rampup_batch_size],
        "step_batch_size_schedule": cadence.step_batch_size_schedule,
    }
    values.update((name, value) for name, value in optional.items() if value)
    if not config.fuses_norms and config.attention is Attention.UNFUSED:
        # Only Megatron's own layers have both.
        values["transformer_impl"] = "local"
    if not model.has_bias:
        values["add_bias_linear"] = False
    values |= _switches(config, is_layout=False)
    if config.is_softmax_wide:
        values["attention_softmax_in_fp32"] = True
    return {
        **values,
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "eval_iters": cadence.eval_iters,
    }


def as_options(values: Values) -> Iterator[tuple[str, list[str]]]:
    """Yield each value as its option and the words after it; a switch has none."""
    for target, value in values.items():
        name, constant = _OPTIONS.get(target, (target, None))
        option = "--" + name.replace("_", "-")
        if constant is not None or value is True:
            yield option, []
        else:
            yield option, [str(v) for v in value] if isinstance(value, list) else [str(value)]


def as_given(config: RunConfig, values: Values) -> RunConfig:
    """Return the config with those given options that ours would spell differently."""
    ours, words = layout_values(config), []
    for group in GROUPS:
        canonical = {name: value for name, value in ours.items() if name in group}
        stated = {n: v for n, v in values.items() if n in group and _has_option(n, v)}
        if stated and dict(as_options(canonical)) != (options := dict(as_options(stated))):
            words += [w for option, rest in options.items() for w in option_words(option, rest)]
    return replace(config, given=tuple(words))


def _graph_values(config: RunConfig) -> Values:
    """Return CUDA graph values: Transformer Engine's for modules, else Megatron's own."""
    if not config.uses_cuda_graphs:
        return {}
    is_cut = bool(config.cuda_graph_scope) and not config.is_step_replayed
    impl = "transformer_engine" if is_cut else "local"
    return {"cuda_graph_impl": impl, "cuda_graph_scope": list(config.cuda_graph_scope)}


def _switches(config: RunConfig, *, is_layout: bool) -> Values:
    """Return the switches that are not at their defaults: those of layouts, or all others."""
    both = ((option, getattr(config, n), usual) for n, (option, usual) in CONFIG_SWITCHES.items())
    return {
        option: value
        for option, value, usual in both
        if value is not usual and any(option in group for group in GROUPS) is is_layout
    }


def _has_option(target: str, value: object) -> bool:
    """Return False for values without an option: None, a default switch, an object of a library."""
    constant = _OPTIONS.get(target, (target, None))[1]
    if isinstance(value, bool) or constant is not None or target in SWITCHES:
        return value is (constant is not False)
    return isinstance(value, str | int | float | list)


def _context_values(par: Parallelism) -> Values:
    comm = par.context_comm
    if comm is not ContextComm.HIERARCHICAL:
        return {"cp_comm_type": "" if comm is ContextComm.P2P else comm.value}
    if par.cp == 1:
        return {}
    sizes = [str(par.exchanged_cp), str(par.cp // par.exchanged_cp)]
    return {"cp_comm_type": comm.value, "hierarchical_context_parallel_sizes": sizes}


def _chunk_values(config: RunConfig) -> Values:
    par, model = config.parallelism, config.model
    if model.layer_kinds:
        return pattern_values(config)
    if par.chunk_layers:
        layout = write_layout(par.chunk_layers, model.num_prediction_layers)
        return {"pipeline_model_parallel_layout": layout}
    if par.vp == 1:
        return {}
    return {"num_layers_per_virtual_pipeline_stage": model.num_layers // par.num_chunks}


def _recompute_values(config: RunConfig) -> Values:
    if config.recompute is Recompute.NONE:
        return {}
    values: Values = {"recompute_granularity": config.recompute.value}
    if config.recompute is Recompute.FULL:
        values["recompute_method"] = "block" if config.recompute_num_layers else "uniform"
        values["recompute_num_layers"] = config.recompute_num_layers or config.recompute_span
        values["distribute_saved_activations"] = config.distributes_saved_activations
    elif config.recompute_modules:
        values["recompute_modules"] = list(config.recompute_modules)
    return values


def _fp8_values(config: RunConfig) -> Values:
    if config.fp8 is Fp8Recipe.NONE:
        return {}
    if config.fp8 is Fp8Recipe.NVFP4:
        return {"fp4": "e2m1", "fp4_param": config.keeps_fp8_params}
    return {
        "fp8": "hybrid",
        "fp8_recipe": config.fp8.value,
        "fp8_param_gather": config.keeps_fp8_params,
    }


def _fusion_of(config: RunConfig) -> str | None:
    if config.fuses_head:
        return "linear"
    return None if config.keeps_fp32_logits else "te"


def _deferral_values(config: RunConfig) -> Values:
    if not config.defers_head_gradients or config.parallelism.pp == 1:
        return {}
    limit = config.head_deferral_limit
    return {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": limit}


def _gradient_values(config: RunConfig) -> Values:
    if config.precision is Precision.FP16:
        return {"accumulate_allreduce_grads_in_fp32": not config.reduces_grads_in_bf16}
    return {"grad_reduce_in_bf16": config.reduces_grads_in_bf16}


def _expert_values(experts: Experts) -> Values:
    return {
        "num_experts": experts.num_experts,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size,
        "moe_layer_freq": _runs(experts.layer_pattern),
        "moe_token_dispatcher_type": experts.dispatcher.value,
        "moe_expert_capacity_factor": experts.capacity_factor,
        "moe_expert_rank_capacity_factor": experts.rank_capacity_factor,
        "moe_paged_stash": experts.stash_factor > 0,
        "moe_paged_stash_buffer_size_factor_cuda": experts.stash_factor,
        **{name: getattr(experts, field) for field, name in EXPERT_SWITCHES.items()},
        "moe_router_dtype": "fp32" if experts.has_fp32_router else "",
    }


def _latent_values(model: ModelShape) -> Values:
    latent = model.latent_attention
    if latent is None:
        return {}
    names = latent.__dataclass_fields__
    return {"multi_latent_attention": True, **{name: getattr(latent, name) for name in names}}


def _window_values(model: ModelShape) -> Values:
    window = model.window
    if window is None:
        return {}
    return {
        "window_size": f"{window.width - 1},0",
        "window_attn_skip_freq": _runs(window.layers) or None,
    }


def _runs(flags: Sequence[bool]) -> str:
    """Return flags as Megatron evaluates them, such as ``[0]*3+[1]*58``."""
    runs = [(int(is_set), len(list(run))) for is_set, run in groupby(flags)]
    return "+".join(f"[{is_set}]*{num}" for is_set, num in runs)
