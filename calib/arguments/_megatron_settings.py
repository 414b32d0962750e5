"""Settings that several arguments of Megatron say together: one rule each, in both directions.

Everything else of a layout is a declared field (``calib/workload/argument_fields.py``).  Rules are
those of Megatron-LM core_v0.16.1 (``validate_args`` of ``megatron/training/arguments.py`` and
``TransformerConfig.__post_init__``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..workload.argument_values import Arguments, Values, is_true, option_of, whole
from ..workload.choices import RECOMPUTE_MODULES
from ..workload.config import Attention, Fp8Recipe, Precision, Recompute, RunConfig
from ..workload.config_json import decode
from ..workload.parallelism import ContextComm, Parallelism, Sharding
from ..workload.pipeline_layout import (
    PipelineLayout,
    PipelineSplit,
    parse_layout,
    split_layers,
    virtual_stages,
    write_layout,
)
from ._hybrid_pattern import pattern_values

Fields = Mapping[str, Any]
"""Fields that are read already, by name."""


def _nothing(given: Arguments, fields: Fields) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Arguments of Megatron that are only meaningful together, and fields that follow from them."""

    write: Callable[[RunConfig], Values]
    """Function that returns the values of a run; what is left out has Megatron's default."""
    read: Callable[[Arguments, Fields], dict[str, Any]] = _nothing
    """Function that returns the fields, by the arguments and the fields read before."""
    part: type = RunConfig
    """Class of the fields."""
    switches: tuple[str, ...] = ()
    """Arguments without a value."""
    values: tuple[str, ...] = ()
    """Arguments with one value."""
    lists: tuple[str, ...] = ()
    """Arguments with several words."""
    old_switches: tuple[str, ...] = ()
    old_values: tuple[str, ...] = ()
    """Arguments that say the same in other words, and are read but never written."""
    beside: tuple[str, ...] = ()
    """Arguments of declared fields that have a meaning only with these."""
    validated: tuple[str, ...] = ()
    """Names in a namespace alone: of validated arguments, ``TransformerConfig`` or a launcher."""

    @property
    def names(self) -> frozenset[str]:
        """All of its arguments."""
        written = (*self.switches, *self.values, *self.lists, *self.beside)
        return frozenset((*written, *self.old_switches, *self.old_values))


def _said(values: Values) -> Values:
    return {name: value for name, value in values.items() if value}


FIRST_STAGE = ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
LAST_STAGE = ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")
"""Name of Megatron's argument, and of the field in its ``TransformerConfig``."""


def pipeline_layout(given: Arguments) -> PipelineLayout | None:
    """Return the parsed ``--pipeline-model-parallel-layout``; None without one."""
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


def chunks(given: Arguments, layout: PipelineLayout | None, pp: int) -> tuple[int, tuple[int, ...]]:
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


def _split_values(config: RunConfig) -> Values:
    par, model = config.parallelism, config.model
    if model.layer_kinds:
        return pattern_values(config)
    if par.chunk_layers:
        layout = write_layout(par.chunk_layers, model.num_prediction_layers)
        return {"pipeline_model_parallel_layout": layout}
    if par.vp == 1:
        return {}
    return {"num_layers_per_virtual_pipeline_stage": model.num_layers // par.num_chunks}


SPLIT = Setting(
    # ``chunks`` reads it, as a hybrid model's pattern may decide in its place.
    write=_split_values,
    part=Parallelism,
    values=(
        *("hybrid_layer_pattern", "hybrid_override_pattern"),
        *("num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout"),
    ),
    old_switches=("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    old_values=(FIRST_STAGE[0], LAST_STAGE[0], "num_virtual_stages_per_pipeline_rank"),
    validated=(FIRST_STAGE[1], LAST_STAGE[1], "virtual_pipeline_model_parallel_size"),
)


_HIERARCHY = "hierarchical_context_parallel_sizes"


def _context(given: Arguments, fields: Fields) -> dict[str, Any]:
    comm = _context_comm(given, fields["cp"])
    return {"context_comm": comm, "context_inner": _context_inner(given, comm, fields["cp"])}


def _context_comm(given: Arguments, cp: int) -> ContextComm:
    """Return the ``cp_comm_type`` of all layers; P2P if they differ, which is not modelled."""
    # The help of Megatron's parser says "allgather", which Transformer Engine refuses.
    words = {"all_gather" if c == "allgather" else c for c in given.words("cp_comm_type")}
    comms = {decode(ContextComm, word) for word in sorted(words)}
    if len(comms) != 1 or (cp == 1 and ContextComm.HIERARCHICAL in comms):
        return ContextComm.P2P
    return comms.pop()


def _context_inner(given: Arguments, comm: ContextComm, cp: int) -> int:
    """Return the first of ``--hierarchical-context-parallel-sizes``: ranks that exchange heads."""
    if cp == 1 or comm is not ContextComm.HIERARCHICAL:
        return 1
    words = (word for text in given.words(_HIERARCHY) for word in text.split())
    sizes = [whole(_HIERARCHY, word) for word in words]
    if len(sizes) != 2 or math.prod(sizes) != cp:
        raise ConfigError(
            f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes)) or '(none)'} is not "
            f"two sizes whose product is cp {cp}, as a2a+p2p needs; give such as 2 {cp // 2}"
        )
    return sizes[0]


def _context_values(config: RunConfig) -> Values:
    par, comm = config.parallelism, config.parallelism.context_comm
    if comm is not ContextComm.HIERARCHICAL:
        return {} if comm is ContextComm.P2P else {"cp_comm_type": comm.value}
    if par.cp == 1:
        return {}
    sizes = [str(par.exchanged_cp), str(par.cp // par.exchanged_cp)]
    return {"cp_comm_type": comm.value, _HIERARCHY: sizes}


_CONTEXT = Setting(
    read=_context, write=_context_values, part=Parallelism, lists=("cp_comm_type", _HIERARCHY)
)


def _recompute(given: Arguments, fields: Fields) -> dict[str, Any]:
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
    return _said(values)


RECOMPUTE = Setting(
    read=_recompute,
    write=_recompute_values,
    switches=("distribute_saved_activations",),
    values=("recompute_granularity", "recompute_method", "recompute_num_layers"),
    lists=("recompute_modules",),
    old_switches=("moe_layer_recompute", "recompute_activations"),
)


# Name of Megatron's argument, and of the field in its ``TransformerConfig``.
_FP8 = ("fp8", "fp8_format")
_FP4 = ("fp4", "fp4_format")
_FP8_NUMBERS = ("e4m3", "hybrid")
_NARROW_PARAMS = ("fp8_param_gather", "fp8_param", "fp4_param")
_WIDE_ENDS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


def is_in_8_bits(given: Arguments) -> bool:
    """Return True if a recipe for products in 8 or 4 bits is given."""
    return any(given.text(*names, default="none") not in ("none", "") for names in (_FP8, _FP4))


def _fp8(given: Arguments, fields: Fields) -> dict[str, Any]:
    if not is_in_8_bits(given):
        return {}
    is_wide = given.is_on("first_last_layers_bf16")
    return {
        "fp8": _fp8_recipe(given),
        "keeps_fp8_params": any(map(given.is_on, _NARROW_PARAMS)),
        "wide_layers": tuple(given.number(n, default=1) if is_wide else 0 for n in _WIDE_ENDS),
    }


def _fp8_recipe(given: Arguments) -> Fp8Recipe:
    if given.text(*_FP4, default="none") not in ("none", ""):
        return Fp8Recipe.NVFP4
    if (numbers := given.text(*_FP8)) not in _FP8_NUMBERS:
        raise ConfigError(
            f"--fp8-format {numbers!r} is not known; choose from {', '.join(_FP8_NUMBERS)}"
        )
    recipe = given.text("fp8_recipe", default=Fp8Recipe.DELAYED.value)
    # A custom recipe (listed as unmodelled) has an unknown scaling rule.
    return Fp8Recipe.TENSORWISE if recipe == "custom" else decode(Fp8Recipe, recipe)


def _fp8_values(config: RunConfig) -> Values:
    if config.fp8 is Fp8Recipe.NONE:
        return {}
    ends: Values = {}
    if any(config.wide_layers):
        ends = dict(zip(_WIDE_ENDS, config.wide_layers, strict=True))
        ends["first_last_layers_bf16"] = True
    keeps_params = config.keeps_fp8_params
    if config.fp8 is Fp8Recipe.NVFP4:
        return _said({"fp4": "e2m1", "fp4_param": keeps_params}) | ends
    recipe = config.fp8.value
    return _said({"fp8": "hybrid", "fp8_recipe": recipe, "fp8_param_gather": keeps_params}) | ends


_NARROW = Setting(
    read=_fp8,
    write=_fp8_values,
    switches=("first_last_layers_bf16", "fp4_param", "fp8_param_gather"),
    values=("fp4", "fp8", "fp8_recipe", *_WIDE_ENDS),
    validated=("fp4_format", "fp8_param"),
)


_WHOLE_STEP = "full_iteration"


def _graphs(given: Arguments, fields: Fields) -> dict[str, Any]:
    """Return the fields of CUDA graphs; later cores name the option for modules and a whole step as
    impl."""
    impl = given.text("cuda_graph_impl", default="none")
    words = given.words("cuda_graph_scope", "cuda_graph_modules")
    if impl == "none" and not any(map(given.is_on, _GRAPHS.old_switches)):
        return {}
    names = (word.rpartition(".")[2] for text in words for word in text.split())
    modules = tuple(name for name in names if name != "full")
    scope = (_WHOLE_STEP,) if impl == _WHOLE_STEP else modules
    return {"uses_cuda_graphs": True, "cuda_graph_scope": scope}


def _graph_values(config: RunConfig) -> Values:
    """Return CUDA graph values: Transformer Engine's for modules, else Megatron's own."""
    if not config.uses_cuda_graphs:
        return {}
    is_cut = bool(config.cuda_graph_scope) and not config.is_step_replayed
    impl = "transformer_engine" if is_cut else "local"
    return _said({"cuda_graph_impl": impl, "cuda_graph_scope": list(config.cuda_graph_scope)})


_GRAPHS = Setting(
    read=_graphs,
    write=_graph_values,
    values=("cuda_graph_impl",),
    lists=("cuda_graph_scope",),
    old_switches=("enable_cuda_graph", "external_cuda_graph"),
    validated=("cuda_graph_modules",),
)


_STRATEGY = "data_parallel_sharding_strategy"
_STRATEGIES = {
    "no_shard": Sharding.NONE,
    "optim": Sharding.OPTIMIZER,
    "optim_grads": Sharding.GRADS,
    "optim_grads_params": Sharding.WEIGHTS,
}
_FSDP = ("use_megatron_fsdp", "use_custom_fsdp")
"""Megatron's FSDP, and its name before core_v0.14."""
_FSDP2, _RESHARDS = "use_torch_fsdp2", "torch_fsdp2_reshard_after_forward"
_OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")


def _sharding(given: Arguments, fields: Fields) -> dict[str, Any]:
    """Return FSDP's settings; PyTorch's FSDP2 shards everything, always overlaps, and excludes a
    distributed optimizer."""
    if given.is_on(_FSDP2):
        return {
            "is_optimizer_distributed": True,
            "sharding": Sharding.WEIGHTS,
            "regathers_weights": given.is_on(_RESHARDS, default=True),
            "overlaps_grad_reduce": True,
            "overlaps_param_gather": True,
        }
    if not given.is_on(*_FSDP):
        return {}
    strategy = given.text(_STRATEGY, default="no_shard")
    if strategy not in _STRATEGIES:
        raise ConfigError(
            f"--data-parallel-sharding-strategy {strategy!r} is not known; choose from "
            f"{', '.join(_STRATEGIES)}"
        )
    sharding = _STRATEGIES[strategy]
    is_on = sharding is not Sharding.NONE
    return {"is_optimizer_distributed": True, "sharding": sharding} if is_on else {}


def _sharding_values(config: RunConfig) -> Values:
    par = config.parallelism
    if par.sharded in (Sharding.NONE, Sharding.OPTIMIZER):
        return {}
    if is_fsdp2(config):
        return {_FSDP2: True, _RESHARDS: False}
    names = {sharding: name for name, sharding in _STRATEGIES.items()}
    return {_FSDP[0]: True, _STRATEGY: names[par.sharded]}


def is_fsdp2(config: RunConfig) -> bool:
    """Return True for sharded weights that stay on a rank between the passes, as only PyTorch's
    FSDP2 keeps them."""
    return config.parallelism.shards_weights and not config.parallelism.regathers_weights


SHARDING = Setting(
    read=_sharding,
    write=_sharding_values,
    part=Parallelism,
    switches=(_FSDP[0], _FSDP2, _RESHARDS),
    values=(_STRATEGY,),
    old_switches=(_FSDP[1],),
    beside=("use_distributed_optimizer", *_OVERLAPS),
)


_IS_AWARE = "use_precision_aware_optimizer"
_STATE_DTYPES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_DTYPE_NBYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
_DTYPE_NBYTES |= {"fp8": 1, "uint8": 1}


def _states(given: Arguments, fields: Fields) -> dict[str, Any]:
    """Return the size of the optimizer's states."""
    if not given.is_on(_IS_AWARE):
        return {}
    weights, *moments = (_nbytes(given, name) for name in _STATE_DTYPES)
    if weights == 4:
        recipe, share = fields.get("fp8", Fp8Recipe.NONE), fields.get("optimizer_offload_frac", 0)
        weights = _fp32_weight_nbytes(fields["precision"], recipe, is_offloaded=share > 0)
    return {"optimizer_state_nbytes": weights + sum(moments)}


def _fp32_weight_nbytes(precision: Precision, fp8: Fp8Recipe, *, is_offloaded: bool) -> int:
    """Return the bytes of the precision-aware optimizer for an fp32 weight.

    Beside a weight in bf16 it stores only the other 16 bits (``store_param_remainders``); with an
    fp8 recipe other than delayed scaling, Megatron's core holds whole weights in its place unless
    they are offloaded (``use_precision_aware_optimizer_no_fp8_or_ds_fp8`` of core_v0.16.1).
    """
    is_of_optimizer = fp8 in (Fp8Recipe.NONE, Fp8Recipe.DELAYED, Fp8Recipe.NVFP4)
    return 2 if (is_of_optimizer or is_offloaded) and precision is Precision.BF16 else 4


def _state_values(config: RunConfig) -> Values:
    if not config.optimizer_state_nbytes:
        return {}
    # Several pairs may give the sum; take the widest first moment, as the order has no cost.
    is_offloaded = config.optimizer_offload_frac > 0
    weights = _fp32_weight_nbytes(config.precision, config.fp8, is_offloaded=is_offloaded)
    moments = _moments(config.optimizer_state_nbytes - weights)
    return {_IS_AWARE: True, **dict(zip(_STATE_DTYPES[1:], moments, strict=True))}


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
            f"{option_of(name)} {word!r} is not known; choose from fp32, bf16, fp16, fp8"
        )
    return _DTYPE_NBYTES[word]


_STATES = Setting(
    read=_states,
    write=_state_values,
    switches=(_IS_AWARE,),
    values=_STATE_DTYPES[1:],
    old_values=_STATE_DTYPES[:1],
    beside=(
        *("optimizer_cpu_offload", "optimizer_offload_fraction"),
        "overlap_cpu_optimizer_d2h_h2d",
    ),
)


_IMPLEMENTATIONS = ("native", "te", "linear")


def _loss(given: Arguments, fields: Fields) -> dict[str, Any]:
    if not given.is_on("cross_entropy_loss_fusion"):
        return {}
    implementation = given.text("cross_entropy_fusion_impl", default="native")
    if implementation not in _IMPLEMENTATIONS:
        raise ConfigError(
            f"--cross-entropy-fusion-impl {implementation!r} is not known; choose from "
            f"{', '.join(_IMPLEMENTATIONS)}"
        )
    return {"keeps_fp32_logits": implementation != "te", "fuses_head": implementation == "linear"}


def _loss_values(config: RunConfig) -> Values:
    if config.fuses_head:
        return {"cross_entropy_fusion_impl": "linear"}
    return {} if config.keeps_fp32_logits else {"cross_entropy_fusion_impl": "te"}


_LOSS = Setting(
    read=_loss,
    write=_loss_values,
    values=("cross_entropy_fusion_impl",),
    beside=("cross_entropy_loss_fusion",),
)


_AS_ELSEWHERE = "auto"
"""Value for an unset type of FSDP's gradients."""
_TORCH_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_FSDP_DTYPES = ("megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype")


def fsdp_dtypes(given: Arguments) -> tuple[str, str]:
    """Return the types in which Megatron's FSDP stores and reduces gradients (core 0.18 and later):
    ``fp32``, ``bf16``, ``fp16`` or ``auto``."""
    if not given.is_on(*_FSDP):
        return _AS_ELSEWHERE, _AS_ELSEWHERE
    words = (given.text(name, default=_AS_ELSEWHERE).rpartition(".")[2] for name in _FSDP_DTYPES)
    main, sent = (_TORCH_NAMES.get(word, word) for word in words)
    return main, main if sent == _AS_ELSEWHERE else sent


def _gradients(given: Arguments, fields: Fields) -> dict[str, Any]:
    return {"reduces_grads_in_bf16": _reduces_in_16_bits(given, fields["precision"])}


def _reduces_in_16_bits(given: Arguments, precision: Precision) -> bool:
    if precision is Precision.FP32:
        return False
    in_fp32 = given.get("grad_reduce_in_fp32")
    if in_fp32 is not None:
        return not is_true(in_fp32)
    if precision is Precision.FP16:
        return not given.is_on("accumulate_allreduce_grads_in_fp32")
    if (sharded := fsdp_dtypes(given)[0]) != _AS_ELSEWHERE:
        return sharded != "fp32"
    main = given.text("main_grads_dtype", default="fp32")
    return given.is_on("grad_reduce_in_bf16") or main not in ("fp32", "torch.float32")


def _gradient_values(config: RunConfig) -> Values:
    is_narrow = config.reduces_grads_in_bf16
    if config.precision is Precision.FP16:
        return _said({"accumulate_allreduce_grads_in_fp32": not is_narrow})
    return _said({"grad_reduce_in_bf16": is_narrow})


_GRADIENTS = Setting(
    read=_gradients,
    write=_gradient_values,
    switches=("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16"),
    values=_FSDP_DTYPES,
    old_values=("main_grads_dtype",),
    validated=("grad_reduce_in_fp32",),
)


OF_WORK = (_CONTEXT, SPLIT, RECOMPUTE, _NARROW, _GRAPHS)
"""Settings of what a rank computes."""
OF_STATE = (SHARDING, _STATES, _LOSS, _GRADIENTS)
"""Settings of gradients and of the optimizer."""
SETTINGS = (*OF_WORK, *OF_STATE)


def _run_values(config: RunConfig) -> Values:
    cadence = config.cadence
    is_local = not config.fuses_norms and config.attention is Attention.UNFUSED
    return _said(
        {
            "bf16": config.precision is Precision.BF16,
            "fp16": config.precision is Precision.FP16,
            "rampup_batch_size": [str(word) for word in cadence.rampup_batch_size],
            "step_batch_size_schedule": cadence.step_batch_size_schedule,
            # Only Megatron's own layers have both.
            "transformer_impl": "local" if is_local else "",
        }
    )


OF_RUN = Setting(
    # ``from_namespace`` reads it.
    write=_run_values,
    switches=("apply_query_key_layer_scaling", "bf16", "fp16", "torch_compile"),
    values=("framework", "step_batch_size_schedule", "train_samples", "transformer_impl"),
    lists=("rampup_batch_size",),
    validated=("data_parallel_size", "ranks_per_node", "world_size"),
)
"""Arguments of precision, kernels and cadence that no single field holds."""
