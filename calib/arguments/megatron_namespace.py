"""``RunConfig`` from a Megatron args namespace, with its unmodelled settings listed.

Defaults and rules are those of Megatron-LM core_v0.16.1 (``validate_args`` of
``megatron/training/arguments.py`` and ``TransformerConfig.__post_init__``), so that arguments give
the same config before and after validation.
"""

from __future__ import annotations

import math
from typing import Any

from ..errors import ConfigError
from ..memory import OFFLOADED_MODULES
from ..workload import (
    CONFIG_SWITCHES,
    RECOMPUTE_MODULES,
    Arguments,
    Attention,
    Batch,
    Cadence,
    CheckpointForm,
    ContextComm,
    Fp8Recipe,
    Parallelism,
    PipelineLayout,
    PipelineSplit,
    Precision,
    Recompute,
    RunConfig,
    decode,
    is_true,
    parse_layout,
    split_layers,
    virtual_stages,
    whole,
)
from .hybrid_pattern import HybridPattern, segments_of, with_pattern
from .megatron_model import model_shape
from .megatron_options import PARALLEL_SWITCHES, unmodelled_settings
from .megatron_values import AS_ELSEWHERE, fsdp_dtypes, with_sharding, with_states
from .torch_stacks import on_stack

FIRST_STAGE = ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
LAST_STAGE = ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")
"""Name of Megatron's argument, and of the field in its ``TransformerConfig``."""
# These also name the argument first, then the field.
_FP8 = ("fp8", "fp8_format")
_FP8_NUMBERS = ("e4m3", "hybrid")
_FP4 = ("fp4", "fp4_format")
_WIDE_SOFTMAX = ("attention_softmax_in_fp32", "apply_query_key_layer_scaling")
_WHOLE_STEP = "full_iteration"
_CADENCE = (
    *("eval_interval", "eval_iters", "save_interval"),
    *("full_batch_size", "num_final_evals", "exit_interval"),
)
"""Numeric fields of ``Cadence`` that have Megatron's names."""


def from_namespace(args: object) -> RunConfig:
    """Return the config of a run from Megatron's arguments (any object with their names).

    Arguments may be as given or as ``validate_args`` leaves them; ``world_size`` and
    ``ranks_per_node`` are the launcher's.  Settings that are not modelled (hybrid models, ...) are
    listed by name in ``unmodelled``.  Raise ``ConfigError`` if a size without a default is missing
    or the layout cannot run.
    """
    args, pattern = with_pattern(args)
    given = Arguments(args)
    layout = _layout(given)
    parallelism = _parallelism(given, layout, pattern)
    model = model_shape(given, parallelism.tp, pattern)
    if layout is not None and sum(layout.chunk_layers) != model.num_layers:
        raise ConfigError(
            f"the pipeline layout has {sum(layout.chunk_layers)} t, not num_layers "
            f"{model.num_layers}; make them agree"
        )
    micro = given.required("micro_batch_size")
    precision = _precision(given)
    batch = Batch(
        micro_batch_size=micro,
        global_batch_size=_full_batch(given, micro * parallelism.dp),
    )
    config = RunConfig(
        model=model,
        parallelism=parallelism,
        batch=batch,
        precision=precision,
        hidden_dropout=given.real("hidden_dropout"),
        attention_dropout=given.real("attention_dropout"),
        cadence=_cadence(given, batch),
        unmodelled=_unmodelled(args, given, layout),
        **_recompute(given),
        **_kernels(given, precision),
    )
    return on_stack(with_states(config, given), given.text("framework"))


def _kernels(given: Arguments, precision: Precision) -> dict[str, Any]:
    """Return the fields that change how operators run, not which ones."""
    return {
        **{n: given.is_on(o, default=default) for n, (o, default) in CONFIG_SWITCHES.items()},
        "fp8": _fp8(given),
        "wide_layers": _wide_layers(given),
        "keeps_fp8_params": _is_in_8_bits(given)
        and any(given.is_on(name) for name in ("fp8_param_gather", "fp8_param", "fp4_param")),
        "attention": _attention(given),
        "is_softmax_wide": any(given.is_on(name) for name in _WIDE_SOFTMAX),
        "keeps_fp32_logits": _fusion(given) != "te",
        "fuses_head": _fusion(given) == "linear",
        "fuses_norms": not _is_local(given),
        "reduces_grads_in_bf16": _reduces_in_16_bits(given, precision),
        "defers_head_gradients": (is_deferred := _defers_heads(given)),
        "head_deferral_limit": given.number("wgrad_deferral_limit") if is_deferred else 0,
        "offload_modules": _offloaded(given),
        "uses_cuda_graphs": _uses_graphs(given),
        "is_compiled": given.is_on("torch_compile"),
        "cuda_graph_scope": _graph_scope(given),
    }


def _fusion(given: Arguments) -> str:
    """Return the implementation of the fused loss; empty without fusion."""
    implementation = given.text("cross_entropy_fusion_impl", default="native")
    if not given.is_on("cross_entropy_loss_fusion"):
        return ""
    if implementation not in ("native", "te", "linear"):
        raise ConfigError(
            f"--cross-entropy-fusion-impl {implementation!r} is not known; choose from native, te, "
            "linear"
        )
    return implementation


def _defers_heads(given: Arguments) -> bool:
    num_stages = given.number("pipeline_model_parallel_size", default=1)
    return num_stages > 1 and given.is_on("defer_embedding_wgrad_compute")


def _offloaded(given: Arguments) -> tuple[str, ...]:
    if not given.is_on("fine_grained_activation_offloading"):
        return ()
    return tuple(word for text in given.words("offload_modules") for word in text.split())


def _uses_graphs(given: Arguments) -> bool:
    switches = ("enable_cuda_graph", "external_cuda_graph")
    impl = given.text("cuda_graph_impl", default="none")
    return impl != "none" or any(given.is_on(name) for name in switches)


def _graph_scope(given: Arguments) -> tuple[str, ...]:
    """Return graphed modules; later cores name the option for modules and a whole step as impl."""
    words = given.words("cuda_graph_scope", "cuda_graph_modules")
    if not _uses_graphs(given):
        return ()
    if given.text("cuda_graph_impl") == _WHOLE_STEP:
        return (_WHOLE_STEP,)
    names = (word.rpartition(".")[2] for text in words for word in text.split())
    return tuple(name for name in names if name != "full")


def _layout(given: Arguments) -> PipelineLayout | None:
    value = given.get("pipeline_model_parallel_layout")
    if value is None:
        return None
    # A ``TransformerConfig`` has the parsed layout, with its source in ``input_data``.
    layout = parse_layout(getattr(value, "input_data", value))
    predicted = given.number("mtp_num_layers")
    if layout.num_prediction_layers != predicted:
        raise ConfigError(
            f"the pipeline layout has {layout.num_prediction_layers} m, not mtp_num_layers "
            f"{predicted}; make them agree"
        )
    return layout


def _parallelism(
    given: Arguments, layout: PipelineLayout | None, pattern: HybridPattern | None
) -> Parallelism:
    tp = given.number("tensor_model_parallel_size", default=1)
    pp = given.number("pipeline_model_parallel_size", default=1)
    cp = given.number("context_parallel_size", default=1)
    etp = given.number("expert_tensor_parallel_size")
    segments = segments_of(pattern, pp)
    if segments:
        vp, chunk_layers = len(segments) // pp, segments
    else:
        vp, chunk_layers = _chunks(given, layout, pp)
    group = given.number("microbatch_group_size_per_vp_stage")
    switches: dict[str, Any] = {
        field: given.is_on(name) for field, name in PARALLEL_SWITCHES.items()
    }
    switches["is_sequence_parallel"] &= tp > 1
    switches["gathers_beside_update"] &= vp > 1 and switches["overlaps_param_gather"]
    par = Parallelism(
        tp=tp,
        pp=pp,
        vp=vp,
        dp=_replicas(given, {"tp": tp, "pp": pp, "cp": cp}),
        cp=cp,
        ep=given.number("expert_model_parallel_size", default=1),
        etp=0 if etp == tp else etp,
        chunk_layers=() if len(set(chunk_layers)) == 1 else chunk_layers,
        microbatch_group_size=0 if vp == 1 or group == pp else group,
        context_comm=_context_comm(given, cp),
        context_inner=_context_inner(given, cp),
        num_optimizer_instances=given.number("num_distributed_optimizer_instances", default=1),
        overlaps_p2p=vp == 1 or given.is_on("overlap_p2p_comm", default=True),
        overlaps_p2p_ends=given.is_on("overlap_p2p_comm_warmup_flush") and vp > 1,
        bucket_numel=given.number("ddp_bucket_size"),
        ranks_per_node=given.number("ranks_per_node"),
        **switches,
    )
    return with_sharding(par, given)


def _context_comm(given: Arguments, cp: int) -> ContextComm:
    """Return the ``cp_comm_type`` of all layers; P2P if they differ, which is not modelled."""
    # The help of Megatron's parser says "allgather", which Transformer Engine refuses.
    words = {"all_gather" if c == "allgather" else c for c in given.words("cp_comm_type")}
    comms = {decode(ContextComm, word) for word in sorted(words)}
    if len(comms) != 1 or (cp == 1 and ContextComm.HIERARCHICAL in comms):
        return ContextComm.P2P
    return comms.pop()


def _context_inner(given: Arguments, cp: int) -> int:
    """Return the first of ``--hierarchical-context-parallel-sizes``: ranks that exchange heads."""
    if cp == 1 or _context_comm(given, cp) is not ContextComm.HIERARCHICAL:
        return 1
    sizes = [
        whole("hierarchical_context_parallel_sizes", word)
        for text in given.words("hierarchical_context_parallel_sizes")
        for word in text.split()
    ]
    if len(sizes) != 2 or math.prod(sizes) != cp:
        raise ConfigError(
            f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes)) or '(none)'} is not "
            f"two sizes whose product is cp {cp}, as a2a+p2p needs; give such as 2 {cp // 2}"
        )
    return sizes[0]


def _replicas(given: Arguments, degrees: dict[str, int]) -> int:
    """Return dp: from the number of ranks if known, else as given, else 1."""
    shown = {name: degree for name, degree in degrees.items() if degree != 1 or name != "cp"}
    layout = " x ".join(f"{name} {degree}" for name, degree in shown.items())
    size = degrees["tp"] * degrees["pp"] * degrees["cp"]
    if min(degrees.values()) < 1:
        raise ConfigError(f"{layout} is not a layout; give degrees of at least 1")
    world, dp = given.number("world_size"), given.number("data_parallel_size")
    if not world:
        return dp or 1
    if dp and dp * size != world:
        raise ConfigError(
            f"--gpus {world} is not {layout} x dp {dp}; leave one of them out or make them agree"
        )
    dp, rest = divmod(world, size)
    if rest or not dp:
        nearest = max(1, round(world / size)) * size
        remedy = f"give degrees whose product divides {world}"
        if not (heads := given.number("num_attention_heads")) or heads % degrees["tp"] == 0:
            remedy = f"give --gpus {nearest}, or {remedy.removeprefix('give ')}"
        raise ConfigError(f"{world} ranks do not split over {layout}; {remedy}")
    return dp


def _chunks(
    given: Arguments, layout: PipelineLayout | None, pp: int
) -> tuple[int, tuple[int, ...]]:
    """Return vp, and the layers of each chunk (empty for an even split)."""
    if layout is not None:
        vp, rest = divmod(len(layout.chunk_layers), max(pp, 1))
        if rest:
            raise ConfigError(
                f"a pipeline layout of {len(layout.chunk_layers)} chunks does not split over pp "
                f"{pp}; give a multiple of pp chunks"
            )
        return vp, layout.chunk_layers
    num_layers = given.number("num_layers", "encoder_num_layers")
    first, last = given.get(*FIRST_STAGE), given.get(*LAST_STAGE)
    sizes: dict[str, Any] = {
        "num_layers": num_layers,
        "pp": max(pp, 1),
        "first": None if first is None else whole(FIRST_STAGE[0], first),
        "last": None if last is None else whole(LAST_STAGE[0], last),
        "counts_embedding": given.is_on("account_for_embedding_in_pipeline_split"),
        "counts_loss": given.is_on("account_for_loss_in_pipeline_split"),
    }
    vp = given.number(
        "virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"
    )
    if not vp and given.get("num_layers_per_virtual_pipeline_stage") is not None:
        per_chunk = given.number("num_layers_per_virtual_pipeline_stage")
        vp = virtual_stages(PipelineSplit(**sizes), per_chunk)
    vp = vp or 1
    is_even = first is last is None and not sizes["counts_embedding"] and not sizes["counts_loss"]
    return vp, () if is_even else split_layers(PipelineSplit(**sizes, vp=vp))


def _recompute(given: Arguments) -> dict[str, Any]:
    """Return the fields of recompute."""
    granularity = given.text("recompute_granularity", default=Recompute.NONE.value)
    if given.is_on("recompute_activations"):
        granularity = Recompute.SELECTIVE.value
    modules = given.words("recompute_modules")
    if strange := sorted(set(modules) - RECOMPUTE_MODULES):
        raise ConfigError(
            f"--recompute-modules {' '.join(strange)} is not known; choose from "
            f"{', '.join(sorted(RECOMPUTE_MODULES))}"
        )
    if given.is_on("moe_layer_recompute"):
        granularity = Recompute.SELECTIVE.value
        modules = tuple(dict.fromkeys((*(modules or ("core_attn",)), "moe")))
    values = [r.value for r in Recompute]
    if granularity not in values:
        raise ConfigError(
            f"--recompute-granularity {granularity!r} is not known; choose from {', '.join(values)}"
        )
    recompute = Recompute(granularity)
    method = given.text("recompute_method") if recompute is Recompute.FULL else ""
    is_listed = recompute is Recompute.SELECTIVE and modules != ("core_attn",)
    num_layers = given.number("recompute_num_layers")
    return {
        "recompute": recompute,
        "recompute_num_layers": num_layers if method == "block" else 0,
        "recompute_span": max(num_layers, 1) if method == "uniform" else 1,
        "recompute_modules": modules if is_listed else (),
        "distributes_saved_activations": recompute is Recompute.FULL
        and given.is_on("distribute_saved_activations"),
    }


def _precision(given: Arguments) -> Precision:
    if given.is_on("bf16"):
        return Precision.BF16
    return Precision.FP16 if given.is_on("fp16") else Precision.FP32


def _is_in_8_bits(given: Arguments) -> bool:
    return any(given.text(*names, default="none") not in ("none", "") for names in (_FP8, _FP4))


def _wide_layers(given: Arguments) -> tuple[int, int]:
    if not (_is_in_8_bits(given) and given.is_on("first_last_layers_bf16")):
        return 0, 0
    first = given.number("num_layers_at_start_in_bf16", default=1)
    return first, given.number("num_layers_at_end_in_bf16", default=1)


def _fp8(given: Arguments) -> Fp8Recipe:
    if given.text(*_FP4, default="none") not in ("none", ""):
        return Fp8Recipe.NVFP4
    if not _is_in_8_bits(given):
        return Fp8Recipe.NONE
    if (numbers := given.text(*_FP8)) not in _FP8_NUMBERS:
        raise ConfigError(
            f"--fp8-format {numbers!r} is not known; choose from {', '.join(_FP8_NUMBERS)}"
        )
    recipe = given.text("fp8_recipe", default=Fp8Recipe.DELAYED.value)
    # A custom recipe (listed as unmodelled) has an unknown scaling rule.
    return Fp8Recipe.TENSORWISE if recipe == "custom" else decode(Fp8Recipe, recipe)


def _attention(given: Arguments) -> Attention:
    backend = given.text("attention_backend", default="auto").rpartition(".")[2]
    # Without Transformer Engine there is only core's attention, with a seq x seq matrix.
    if _is_local(given) or backend in ("unfused", "local"):
        return Attention.UNFUSED
    return Attention.FUSED if backend in ("flash", "fused") else Attention.AUTO


def _is_local(given: Arguments) -> bool:
    """Return True if layers are core's own; Megatron's default is Transformer Engine."""
    return given.text("transformer_impl") == "local"


def _reduces_in_16_bits(given: Arguments, precision: Precision) -> bool:
    if precision is Precision.FP32:
        return False
    in_fp32 = given.get("grad_reduce_in_fp32")
    if in_fp32 is not None:
        return not is_true(in_fp32)
    if precision is Precision.FP16:
        return not given.is_on("accumulate_allreduce_grads_in_fp32")
    if (sharded := fsdp_dtypes(given)[0]) != AS_ELSEWHERE:
        return sharded != "fp32"
    main = given.text("main_grads_dtype", default="fp32")
    return given.is_on("grad_reduce_in_bf16") or main not in ("fp32", "torch.float32")


def _full_batch(given: Arguments, micro_batches: int) -> int:
    """Return the global batch; the last size of a schedule, which excludes ``--global-batch-size``,
    if there is one."""
    schedule = " ".join(given.words("step_batch_size_schedule")).replace(",", " ").split()
    if schedule:
        return whole("step_batch_size_schedule", schedule[-1].rpartition(":")[2])
    return given.number("global_batch_size") or micro_batches


def _cadence(given: Arguments, batch: Batch) -> Cadence:
    ramp = given.words("rampup_batch_size")
    if ramp and len(ramp) != 3:
        raise ConfigError(
            f"--rampup-batch-size {' '.join(ramp)} is not START INCREMENT SAMPLES; give three "
            "whole numbers"
        )
    rampup = tuple(whole("rampup_batch_size", word) for word in ramp)
    samples = given.number("train_samples")
    num_steps = given.number("train_iters")
    if samples and not num_steps:
        full = given.number("full_batch_size") or batch.global_batch_size
        num_steps = _num_steps(samples, full, rampup)
    return Cadence(
        train_iters=num_steps,
        rampup_batch_size=rampup,
        step_batch_size_schedule=" ".join(given.words("step_batch_size_schedule")),
        is_saving=bool(given.text("save")),
        checkpoint_form=_checkpoint_form(given),
        **{name: given.number(name) for name in _CADENCE},
    )


def _checkpoint_form(given: Arguments) -> CheckpointForm:
    """Return how the state is saved (``training/checkpointing.py`` of core 0.16.1).

    Before core 0.14 the buffers of the distributed optimizer were split by weight in a save that
    all replicas share.
    """
    form, option = given.text("ckpt_format"), "dist_ckpt_optim_fully_reshardable"
    if not form:
        return CheckpointForm.UNKNOWN
    if not any(given.text(name) for name in ("save", "load", "pretrained_checkpoint")):
        return CheckpointForm.NONE
    if given.is_on("no_save_optim"):
        return CheckpointForm.WEIGHTS
    if form == CheckpointForm.BY_RANK.value:
        return CheckpointForm.BY_RANK
    if form not in ("torch_dist", "zarr"):
        return CheckpointForm.BY_SHARD
    is_before = given.get(option) is None or given.is_on("dist_ckpt_save_pre_mcore_014")
    is_by_weight = given.is_on(option) or (is_before and given.is_on("ckpt_fully_parallel_save"))
    if given.is_on("use_distributed_optimizer") and not is_by_weight:
        return CheckpointForm.BY_BUFFER
    return CheckpointForm.BY_WEIGHT


def _num_steps(samples: int, global_batch_size: int, rampup: tuple[int, ...]) -> int:
    """Return the steps of a run given in samples (``update_train_iters`` of core 0.16.1)."""
    if not rampup or rampup[1] < 1 or rampup[0] >= global_batch_size:
        return samples // global_batch_size
    start, increment, until = rampup
    samples_each = until / ((global_batch_size - start) // increment)
    done = steps = 0
    while done <= min(until, samples):
        done += min(start + int(done / samples_each) * increment, global_batch_size)
        steps += 1
    return steps + max(samples - done, 0) // global_batch_size


def _unmodelled(args: object, given: Arguments, layout: PipelineLayout | None) -> tuple[str, ...]:
    unmodelled_names = list(unmodelled_settings(args))
    if len(set(given.words("cp_comm_type"))) > 1:
        unmodelled_names.append("cp_comm_type")
    if len(set(fsdp_dtypes(given))) > 1:
        unmodelled_names.append("megatron_fsdp_grad_comm_dtype")
    if _is_in_8_bits(given) and given.text("fp8_recipe") == "custom":
        unmodelled_names.append("fp8_recipe")
    if set(_offloaded(given)) - OFFLOADED_MODULES:
        unmodelled_names.append("offload_modules")
    if layout is not None and not layout.is_plain:
        unmodelled_names.append("pipeline_model_parallel_layout")
    return tuple(unmodelled_names)
