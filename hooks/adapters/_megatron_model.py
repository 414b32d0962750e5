"""Run configuration and parallel ranks read from Megatron's objects, without its command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from ...calib.arguments.megatron_namespace import from_namespace
from ...calib.workload.config import Attention, RunConfig
from ..process.inspection import attribute, class_names, classes, tree, weights
from ..process.settings import CadenceHint, environ_number
from ..sensors.sites import find_mixers

# Megatron nests three (data parallel, precision, virtual stage); a wrapper of itself must end.
_WRAPPER_DEPTH = 6
_DDP = {
    "use_distributed_optimizer": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "num_distributed_optimizer_instances": 1,
    "grad_reduce_in_fp32": False,
}
"""Fields of Megatron's DDP configuration that are also arguments, with their defaults."""
_BUCKETS = {"bucket_size": None, "pad_buckets_for_high_nccl_busbw": False}
"""Further DDP fields with their defaults; as arguments they are prefixed ``ddp_``."""

NUM_FINAL_EVALS = 2
"""Evaluations at the end of Megatron-LM's ``pretrain``: validation set and test set."""


def chunks_of(model: Any) -> tuple[Any, ...]:
    """Return this rank's virtual stages as a tuple, for a host that passes one model or a list."""
    return tuple(model) if isinstance(model, (list, tuple)) else (model,)


def unwrapped(model: Any) -> Any:
    """Return the model inside its data-parallel and precision wrappers."""
    for _ in range(_WRAPPER_DEPTH):
        inner = getattr(model, "module", None)
        if inner is None:
            break
        model = inner
    return model


def config_of(model: Any) -> Any | None:
    """Return the ``TransformerConfig`` of a model or of one of its wrappers."""
    return getattr(model, "config", None) or getattr(unwrapped(model), "config", None)


def timer_holders(models: Iterable[Any], optimizers: Iterable[Any]) -> tuple[tuple[Any, str], ...]:
    """Return the configurations in which the schedules and the optimizers look up timers."""
    parts = [config_of(model) for model in models]
    for optimizer in optimizers:
        for part in (optimizer, *getattr(optimizer, "chained_optimizers", ())):
            parts.append(getattr(part, "config", None))
    unique = {id(part): part for part in parts if hasattr(part, "timers")}
    return tuple((part, "timers") for part in unique.values())


def place() -> dict[str, Any]:
    """Return stage and ranks of this process as arguments of ``Host``."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return {}
    return {
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "dp_rank": parallel_state.get_data_parallel_rank(),
    }


def with_device(config: RunConfig, device: str, framework: str) -> RunConfig:
    """Return the config with the run's device and framework, and the launched ranks per node."""
    local_size = environ_number(os.environ, ("LOCAL_WORLD_SIZE",), 0)
    per_node = config.parallelism.ranks_per_node or local_size
    parallelism = replace(config.parallelism, ranks_per_node=per_node)
    return replace(config, device=device, framework=framework, parallelism=parallelism)


def with_layers(config: RunConfig, models: tuple[Any, ...]) -> RunConfig:
    """Return the config with fused norms and core's unfused attention if the model has them, and
    with the sizes of its opaque layers.

    A hand-written layer spec may differ from the arguments or from their defaults.
    """
    modules = tree(*models)
    config = _with_mixers(config, models)
    if any(map(_has_unfused_attention, modules)):
        config = replace(config, attention=Attention.UNFUSED)
    if any(attribute(module, "layer_norm_weight") is not None for module in modules):
        return replace(config, fuses_norms=True)
    has_layers = any("TransformerLayer" in class_names(module) for module in modules)
    return replace(config, fuses_norms=False) if has_layers else config


def _with_mixers(config: RunConfig, models: tuple[Any, ...]) -> RunConfig:
    """Return the config with the parameters that mixers on this rank have; a stage without one
    keeps those of the arguments."""
    tp, sizes = config.parallelism.tp, {}
    for symbol, _, mixer in find_mixers(models):
        split, whole = 0, 0
        for weight in weights((mixer,)):
            is_split = getattr(weight, "tensor_model_parallel", False) is True
            split, whole = (
                split + is_split * weight.numel(),
                whole + (not is_split) * weight.numel(),
            )
        sizes[symbol] = {"split_numel": split * tp, "whole_numel": whole}
    layers = tuple(
        replace(one, **sizes[one.symbol]) if sum(sizes.get(one.symbol, {}).values()) else one
        for one in config.model.opaque_layers
    )
    return replace(config, model=replace(config.model, opaque_layers=layers))


def _has_unfused_attention(module: Any) -> bool:
    """Return True for core's own attention, which materializes a matrix of sequence x sequence.

    Transformer Engine's class has the same name, hence the test of the module.
    """
    return any(
        cls.__name__ == "DotProductAttention" and cls.__module__.startswith("megatron.core.")
        for cls in classes(module)
    )


def with_running_batch(config: RunConfig) -> RunConfig:
    """Return the config at the current global batch size, from which a ramp-up continues."""
    from megatron.core import num_microbatches_calculator as calculator

    cadence = replace(config.cadence, num_final_evals=NUM_FINAL_EVALS)
    if not _has_ramp():
        cadence = replace(cadence, rampup_batch_size=())
    if not (cadence.rampup_batch_size or cadence.step_batch_size_schedule):
        return replace(config, cadence=cadence)
    size = calculator.get_current_running_global_batch_size()
    return replace(
        config,
        batch=replace(config.batch, global_batch_size=size),
        cadence=replace(cadence, full_batch_size=config.batch.global_batch_size),
    )


def _has_ramp() -> bool:
    """Return False for core 0.18 and later, which accept ``--rampup-batch-size`` but ignore it."""
    from megatron.core import num_microbatches_calculator

    return hasattr(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator")


def run_config(models: tuple[Any, ...], call: Mapping[str, Any], hint: CadenceHint) -> RunConfig:
    """Return the run's configuration from its model, its wrappers and its schedule's arguments."""
    import megatron.core
    from megatron.core import parallel_state

    from ..session.instruments import device_name

    settings = dict(vars(config_of(models[0])))
    gpt = unwrapped(models[0])
    ddp = getattr(models[0], "ddp_config", None)
    dp = parallel_state.get_data_parallel_world_size()
    micro = int(call["micro_batch_size"])
    sizes = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
    settings |= {
        f"{name}_size": getattr(parallel_state, f"get_{name}_world_size")() for name in sizes
    }
    settings |= {name: getattr(ddp, name, default) for name, default in _DDP.items()}
    settings |= {f"ddp_{name}": getattr(ddp, name, default) for name, default in _BUCKETS.items()}
    settings |= asdict(hint)
    settings.update(
        virtual_pipeline_model_parallel_size=(
            parallel_state.get_virtual_pipeline_model_parallel_world_size()
        ),
        data_parallel_size=dp,
        micro_batch_size=micro,
        global_batch_size=micro * dp * int(call["num_microbatches"]),
        seq_length=int(call["seq_length"]),
        group_query_attention=settings["num_query_groups"] != settings["num_attention_heads"],
        swiglu=settings["gated_linear_unit"],
        hybrid_layer_pattern=_pattern(gpt),
        padded_vocab_size=gpt.vocab_size,
        max_position_embeddings=gpt.max_sequence_length,
        position_embedding_type=gpt.position_embedding_type,
        untie_embeddings_and_output_weights=not gpt.share_embeddings_and_output_weights,
        save_interval=hint.save_interval if hint.save else None,
        num_final_evals=NUM_FINAL_EVALS if "megatron.training" in sys.modules else 0,
        rampup_batch_size=hint.rampup_batch_size if _has_ramp() else (),
        full_batch_size=hint.global_batch_size,
    )
    version = f"megatron-core {megatron.core.__version__}"
    config = from_namespace(settings)
    return with_layers(with_device(config, device_name(models), version), models)


def _pattern(model: Any) -> str | None:
    """Return the pattern of a hybrid model; before core 0.17 it has another name."""
    names = ("hybrid_layer_pattern", "hybrid_override_pattern")
    patterns = (getattr(model, name, None) for name in names)
    return next((one for one in patterns if isinstance(one, str)), None)
