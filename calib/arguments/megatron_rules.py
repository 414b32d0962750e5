"""Megatron's constraints on layouts beyond degrees: refusals, and further required options.

Rules are those of core_v0.16.1: ``validate_args`` of ``megatron/training/arguments.py``,
``TransformerConfig.__post_init__``, ``OptimizerConfig.__post_init__``, the buckets of its DDP and
its calculator of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ..memory.activations import OFFLOADED_MODULES
from ..workload.argument_values import Values
from ..workload.config import Attention, Fp8Recipe, Precision, Recompute, RunConfig
from ..workload.model_shape import Dispatcher
from ..workload.parallelism import Engine, Sharding
from ._megatron_settings import is_fsdp2

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
OFFLOAD = "NVTE_CPU_OFFLOAD_V1"
VARIABLES = (CONNECTIONS, OFFLOAD)
"""Environment variables in Megatron's rules."""
# The driver's default (CUDA programming guide, environment variables).
_DEFAULT_CONNECTIONS = "8"
_BLACKWELL_NAMES = ("B200", "B300", "GB200", "GB300", "B100", "RTX PRO")
"""Names of devices from Blackwell on, whose queues preserve order without the variable."""


def refusals(config: RunConfig) -> tuple[str, ...]:
    """Return the reasons why Megatron refuses this layout, one clause each; empty if it accepts it.

    >>> from ..workload.config import Batch
    >>> from ..workload.model_shape import ModelShape
    >>> from ..workload.parallelism import Parallelism
    >>> gpt = ModelShape(num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> refusals(RunConfig(model=gpt, parallelism=Parallelism(tp=2, overlaps_tp=True),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8)))
    ('--tp-comm-overlap needs --sequence-parallel; add it or leave the overlap out',)
    """
    rules = (
        *(_of_order, _of_sharding, _of_recompute, _of_experts, _of_exchange_overlap),
        *(_of_kernels, _of_batch, _of_ends),
    )
    return tuple(clause for rule in rules for clause in rule(config))


def required_values(config: RunConfig, given: Mapping[str, object]) -> Values:
    """Return further values that this layout requires, by name in the namespace.

    ``given`` are the values that stay on the command line; only differences from these, or from
    Megatron's defaults, are returned.
    """
    values: Values = {}
    is_torch = is_fsdp2(config) or "use_torch_fsdp2" in given
    form = str(given.get("ckpt_format", "torch_dist"))
    wanted = _checkpoint_form(config, form, is_torch=is_torch)
    if wanted != form:
        values["ckpt_format"] = wanted
    # A running FSDP2 job already has a valid setting; only restate it if it was given.
    can_restate_fusion = "use_torch_fsdp2" not in given or "gradient_accumulation_fusion" in given
    if is_torch and can_restate_fusion and config.fuses_gradient_accumulation:
        values["gradient_accumulation_fusion"] = False
    if config.optimizer_offload_frac:
        values["use_precision_aware_optimizer"] = True
    if config.uses_cuda_graphs and not config.cuda_graph_scope and config.parallelism.ep > 1:
        values["moe_pad_experts_for_cuda_graph_inference"] = True
    positions = str(given.get("max_position_embeddings", ""))
    if positions.isdecimal() and int(positions) < config.model.seq_length:
        values["max_position_embeddings"] = config.model.seq_length
    return values


def misplaced(config: RunConfig, given: Mapping[str, object]) -> frozenset[str]:
    """Return the given names that Megatron accepts only in other layouts than this one."""
    return frozenset(n for n in given if n in _ONLY_WHERE and not _ONLY_WHERE[n](config))


def environment(config: RunConfig, seen: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the layout's processes need, with their values.

    ``seen`` are those of the running layout; correct values of ``VARIABLES`` stay.  If tp or cp
    split layers, messages and matrix products share one queue (not with FSDP; Megatron does not
    require it from Blackwell on).
    """
    par, variables = config.parallelism, dict(seen)
    is_split = par.tp > 1 or par.cp > 1
    is_before_blackwell = not any(name in config.device for name in _BLACKWELL_NAMES)
    if is_fsdp(config):
        if variables.get(CONNECTIONS) == "1":
            variables[CONNECTIONS] = _DEFAULT_CONNECTIONS
    elif is_split and is_before_blackwell and not _overlaps_exchange(config):
        variables[CONNECTIONS] = "1"
    if config.offload_modules:
        variables[OFFLOAD] = "1"
    return variables


def is_fsdp(config: RunConfig) -> bool:
    """Return True if gradients or weights are sharded too, by Megatron's FSDP or PyTorch's."""
    return config.parallelism.sharded in (Sharding.GRADS, Sharding.WEIGHTS)


def _checkpoint_form(config: RunConfig, given: str, *, is_torch: bool) -> str:
    """Return the ``--ckpt-format``: the given one if the layout accepts it."""
    if is_torch:
        is_taken = given == "torch_dcp" and config.parallelism.tp == 1
        return given if is_taken else "torch_dist"
    if is_fsdp(config):
        return "fsdp_dtensor"
    return "torch_dist" if given in ("fsdp_dtensor", "torch_dcp") else given


def _overlaps_exchange(config: RunConfig) -> bool:
    return config.model.experts is not None and config.model.experts.overlaps_exchange


def _of_order(config: RunConfig) -> Iterator[str]:
    par = config.parallelism
    if par.engine is not Engine.MEGATRON:
        yield f"engine {par.engine.value} is not Megatron's; choose a layout of Megatron's"
    if par.overlaps_p2p_ends and par.vp == 1:
        yield (
            "--overlap-p2p-communication-warmup-flush needs virtual stages; set vp or leave it out"
        )
    if par.overlaps_tp and not par.is_sequence_parallel:
        yield "--tp-comm-overlap needs --sequence-parallel; add it or leave the overlap out"
    if config.attention is Attention.UNFUSED and par.cp > 1:
        yield (
            "context parallelism needs Transformer Engine's attention; set cp 1 or another "
            "attention backend"
        )


def _of_sharding(config: RunConfig) -> Iterator[str]:
    par = config.parallelism
    is_on = par.is_optimizer_distributed
    if par.overlaps_param_gather and not (is_on and par.overlaps_grad_reduce):
        yield (
            "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce; "
            "add them or leave it out"
        )
    if par.num_optimizer_instances > 1 and not is_on:
        yield (
            "--num-distributed-optimizer-instances needs --use-distributed-optimizer; add it or "
            "leave the instances out"
        )
    if config.keeps_fp8_params and not is_on:
        yield (
            "parameters in 8 bits need --use-distributed-optimizer; add it or keep them in 16 bits"
        )
    if (config.optimizer_state_nbytes or config.optimizer_offload_frac) and not is_on:
        yield (
            "--use-precision-aware-optimizer needs --use-distributed-optimizer; add the latter too"
        )
    if not is_fsdp2(config):
        return
    if par.pp > 1 or par.ep > 1:
        yield "--use-torch-fsdp2 takes neither pipeline nor expert parallelism; set pp 1 and ep 1"
    if par.num_optimizer_instances > 1:
        yield (
            "--use-torch-fsdp2 excludes --num-distributed-optimizer-instances; leave one of them "
            "out"
        )
    if config.model.is_tied:
        yield "--use-torch-fsdp2 needs --untie-embeddings-and-output-weights; add the latter too"
    if config.precision is Precision.FP16:
        yield "--use-torch-fsdp2 excludes --fp16; give --bf16"
    if config.optimizer_state_nbytes or config.optimizer_offload_frac:
        yield "--use-torch-fsdp2 excludes --use-precision-aware-optimizer; leave one of them out"


def _of_recompute(config: RunConfig) -> Iterator[str]:
    par, experts, modules = config.parallelism, config.model.experts, config.recompute_modules
    if config.distributes_saved_activations and (par.tp == 1 or par.is_sequence_parallel):
        yield (
            "--distribute-saved-activations needs tp above 1 without --sequence-parallel; leave "
            "one of the two options out"
        )
    if config.recomputes_all and any(num % config.recompute_span for num in config.chunk_layers):
        # ``_checkpointed_forward`` asks for layers beyond the last one.
        yield (
            f"--recompute-num-layers {config.recompute_span} does not divide the "
            f"{max(config.chunk_layers)} layers of a chunk; choose a divisor"
        )
    if config.recompute is not Recompute.SELECTIVE:
        return
    if "moe_act" in modules and (experts is None or not experts.is_grouped):
        yield "--recompute-modules moe_act needs --moe-grouped-gemm; add it or leave moe_act out"
    if "mla_up_proj" in modules and config.model.latent_attention is None:
        yield (
            "--recompute-modules mla_up_proj needs --multi-latent-attention; leave mla_up_proj out"
        )
    if "shared_experts" in modules and experts is not None and experts.overlaps_shared:
        yield (
            "--recompute-modules shared_experts excludes --moe-shared-expert-overlap; leave one of "
            "them out"
        )
    is_late = config.fp8 is Fp8Recipe.DELAYED
    if is_late and {"moe_act", "layernorm"} & set(modules):
        yield (
            "--fp8-recipe delayed excludes recompute of moe_act and layernorm; leave both modules "
            "out"
        )


def _of_experts(config: RunConfig) -> Iterator[str]:
    par, experts = config.parallelism, config.model.experts
    if experts is None:
        return
    if config.model.has_bias and par.expert_tp > 1:
        yield "experts with a bias need expert tp 1; set it or give --disable-bias-linear"
    if experts.dispatcher is Dispatcher.FLEX and par.expert_tp * par.ep == 1:
        yield (
            "--moe-token-dispatcher-type flex needs expert parallelism; choose alltoall or a "
            "larger ep"
        )
    if experts.overlaps_shared and experts.dispatcher is not Dispatcher.ALL_TO_ALL:
        yield ("--moe-shared-expert-overlap needs --moe-token-dispatcher-type alltoall; choose it")
    if experts.delays_weight_gradients and not experts.overlaps_exchange:
        yield ("--delay-wgrad-compute needs --overlap-moe-expert-parallel-comm; add the latter too")


def _of_exchange_overlap(config: RunConfig) -> Iterator[str]:
    par, experts = config.parallelism, config.model.experts
    if experts is None or not experts.overlaps_exchange:
        return
    is_exchanged = experts.dispatcher is not Dispatcher.ALL_GATHER
    if par.ep == 1 or not is_exchanged or (par.pp > 1 and par.vp == 1):
        yield (
            "--overlap-moe-expert-parallel-comm needs ep above 1, a dispatcher other than "
            "allgather, and virtual stages where there is a pipeline; set these or leave it out"
        )
    if config.recompute is Recompute.FULL or experts.overlaps_shared:
        yield (
            "--overlap-moe-expert-parallel-comm excludes full recompute and "
            "--moe-shared-expert-overlap; leave it or those out"
        )
    if config.precision is Precision.FP32:
        yield "--overlap-moe-expert-parallel-comm needs 16 bits; give --bf16 or leave it out"
    if config.model.num_prediction_layers > (par.pp > 1):
        yield (
            "--overlap-moe-expert-parallel-comm takes at most one prediction layer, and that only "
            "with a pipeline; set --mtp-num-layers to fit or leave it out"
        )


def _of_ends(config: RunConfig) -> Iterator[str]:
    """Yield refusals of ``TransformerConfig`` for bf16 layers in fp8 models and late gradients."""
    if any(config.wide_layers) and config.fp8 is Fp8Recipe.DELAYED:
        yield "--first-last-layers-bf16 excludes --fp8-recipe delayed; choose another recipe"
    most = config.model.num_layers // config.parallelism.pp
    if config.fp8 is not Fp8Recipe.NONE and max(config.wide_layers) > most:
        yield (
            f"{max(config.wide_layers)} layers in bf16 at one end are more than the {most} of a "
            "stage; set --num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16 to fit"
        )
    if config.defers_head_gradients and not config.fuses_gradient_accumulation:
        yield (
            "--defer-embedding-wgrad-compute needs gradient accumulation fusion; leave out "
            "--no-gradient-accumulation-fusion or the former"
        )


def _of_kernels(config: RunConfig) -> Iterator[str]:
    strange = sorted(set(config.offload_modules) - OFFLOADED_MODULES)
    if strange:
        yield (
            f"--offload-modules {' '.join(strange)} is not known; choose from "
            f"{', '.join(sorted(OFFLOADED_MODULES))}"
        )
    if "attn_proj" in config.offload_modules and "core_attn" not in config.offload_modules:
        yield "--offload-modules attn_proj needs core_attn as well; add core_attn or leave it out"
    if not config.uses_cuda_graphs:
        return
    if config.recompute is Recompute.FULL and not config.is_step_replayed:
        yield (
            "full recompute takes CUDA graphs only of the whole iteration; choose that scope or "
            "selective recompute"
        )
    if "moe_router" in config.cuda_graph_scope and "moe" in config.recompute_modules:
        yield "--recompute-modules moe excludes CUDA graphs of moe_router; leave one of them out"


def _of_batch(config: RunConfig) -> Iterator[str]:
    ramp = config.cadence.rampup_batch_size
    share = config.batch.micro_batch_size * config.parallelism.dp
    if ramp and (ramp[0] % share or ramp[1] % share):
        yield (
            f"--rampup-batch-size {ramp[0]} {ramp[1]} has batches that are not a multiple of "
            f"micro-batch x dp = {share}; change either"
        )


_ONLY_WHERE: Mapping[str, Callable[[RunConfig], bool]] = {
    "check_weight_hash_across_dp_replicas_interval": lambda config: (
        not config.parallelism.shards_weights
    ),
    "fsdp_manual_registration": lambda config: is_fsdp(config) and not is_fsdp2(config),
    "reuse_grad_buf_for_mxfp8_param_ag": lambda config: (
        config.keeps_fp8_params and config.parallelism.overlaps_param_gather and not is_fsdp(config)
    ),
}
"""Options that Megatron accepts only in some layouts, with the condition."""
