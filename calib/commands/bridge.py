"""Arguments of a Megatron-Bridge recipe for another layout: Hydra's ``path=value``.

Paths are those of its ``ConfigContainer`` (Megatron-Bridge of 2026-08: ``training/config.py``,
``docs/megatron-lm-to-megatron-bridge.md``, ``scripts/translate_mlm_to_bridge.py``).
A recipe brings values of its own, so that what is off is said too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..arguments.megatron_options import EXPERT_SWITCHES, Values
from ..arguments.megatron_rules import beside
from ..arguments.megatron_values import layout_values, model_values
from ..workload.argument_values import ArgumentValue
from ..workload.config import RunConfig
from .words import Noted, Word, plain

_VP = "virtual_pipeline_model_parallel_size"
_SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    "expert_model_parallel_size",
)
"""1 where they are not said; any other value is none, or false."""
_SWITCHES = frozenset(
    {
        *("sequence_parallel", "distribute_saved_activations", "overlap_grad_reduce"),
        *("fine_grained_activation_offloading", "overlap_param_gather", "tp_comm_overlap"),
        *("use_distributed_optimizer", "use_megatron_fsdp", "use_torch_fsdp2"),
        *("use_tp_pp_dp_mapping", "optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"),
        *("use_precision_aware_optimizer", "ddp_pad_buckets_for_high_nccl_busbw"),
        *("overlap_p2p_comm_warmup_flush", "cross_entropy_loss_fusion"),
        *EXPERT_SWITCHES.values(),
    }
)
_UNSAID: Mapping[str, ArgumentValue] = {
    **dict.fromkeys(_SIZES, 1),
    **dict.fromkeys(_SWITCHES, False),
    "num_distributed_optimizer_instances": 1,
    "gradient_accumulation_fusion": True,
    "overlap_p2p_comm": True,
    "ckpt_format": "torch_dist",
}
_OF_MODEL = (
    *_SIZES,
    *("expert_tensor_parallel_size", "sequence_parallel", "cp_comm_type", _VP, "seq_length"),
    *("pipeline_model_parallel_layout", "microbatch_group_size_per_vp_stage"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("distribute_saved_activations", "fine_grained_activation_offloading", "offload_modules"),
    *("overlap_p2p_comm", "overlap_p2p_comm_warmup_flush", "tp_comm_overlap"),
    *("gradient_accumulation_fusion", "cross_entropy_loss_fusion"),
    *("moe_expert_capacity_factor", "moe_token_dispatcher_type"),
    *EXPERT_SWITCHES.values(),
)
PATHS: Mapping[str, tuple[str, ...]] = {
    **{name: (f"model.{name}",) for name in _OF_MODEL},
    "micro_batch_size": ("train.micro_batch_size",),
    "global_batch_size": ("train.global_batch_size",),
    "seq_length": ("model.seq_length", "dataset.seq_length"),
    "overlap_grad_reduce": ("ddp.overlap_grad_reduce",),
    "overlap_param_gather": ("ddp.overlap_param_gather", "optimizer.overlap_param_gather"),
    "use_distributed_optimizer": (
        "ddp.use_distributed_optimizer",
        "optimizer.use_distributed_optimizer",
    ),
    "num_distributed_optimizer_instances": ("ddp.num_distributed_optimizer_instances",),
    "ddp_bucket_size": ("ddp.bucket_size",),
    "ddp_pad_buckets_for_high_nccl_busbw": ("ddp.pad_buckets_for_high_nccl_busbw",),
    "use_megatron_fsdp": ("dist.use_megatron_fsdp", "ddp.use_megatron_fsdp"),
    "data_parallel_sharding_strategy": ("ddp.data_parallel_sharding_strategy",),
    "use_torch_fsdp2": ("dist.use_torch_fsdp2",),
    "use_tp_pp_dp_mapping": ("dist.use_tp_pp_dp_mapping",),
    "ckpt_format": ("checkpoint.ckpt_format",),
    "optimizer_cpu_offload": ("optimizer.optimizer_cpu_offload",),
    "optimizer_offload_fraction": ("optimizer.optimizer_offload_fraction",),
    "overlap_cpu_optimizer_d2h_h2d": ("optimizer.overlap_cpu_optimizer_d2h_h2d",),
    "use_precision_aware_optimizer": ("optimizer.use_precision_aware_optimizer",),
}
"""Where each of Megatron's arguments lies in a ``ConfigContainer``."""
_OVERLAPS = frozenset({"overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap"})


def bridge_program(argv: Sequence[Word], running: RunConfig, config: RunConfig) -> Noted:
    """The recipe's words with an override for all that differs from the running layout.

    Overrides that the user gave are changed in place, others come at the end, where they win.
    """
    now, then = _values(running), _values(config)
    differing = [n for n in now.keys() | then.keys() if _of(now, n) != _of(then, n)]
    overrides = {
        path: _hydra(_of(then, name))
        for name, paths in PATHS.items()
        for path in (paths if name in differing else ())
    }
    out: list[Word] = []
    for word in argv:
        path = word.text.partition("=")[0].lstrip("+")
        value = overrides.pop(path, None) if "=" in word.text else None
        out.append(word if value is None else Word(text=f"{path}={value}"))
    out += plain([f"{path}={value}" for path, value in overrides.items()])
    return Noted(words=tuple(out), notes=tuple(_notes(differing)))


def _notes(differing: Sequence[str]) -> list[str]:
    notes = []
    unnamed = sorted(name for name in differing if name not in PATHS)
    if unnamed:
        notes.append(f"set in the recipe itself: {', '.join(unnamed)}")
    if _OVERLAPS & set(differing):
        notes.append("a recipe with comm_overlap has the last word on overlaps; set them there")
    return notes


def _values(config: RunConfig) -> Values:
    par = config.parallelism
    values: Values = {**layout_values(config), **beside(config, {})}
    values["seq_length"] = config.model.seq_length
    switches = frozenset(EXPERT_SWITCHES.values()) | {"moe_token_dispatcher_type"}
    values |= {name: v for name, v in model_values(config).items() if name in switches}
    values.pop("num_layers_per_virtual_pipeline_stage", None)
    if par.vp > 1:
        values[_VP] = par.vp
    return values


def _of(values: Values, name: str) -> ArgumentValue | None:
    return values.get(name, _UNSAID.get(name))


def _hydra(value: ArgumentValue | None) -> str:
    """A value in Hydra's grammar.

    >>> [_hydra(value) for value in (None, True, ["mlp", "moe"], "Et*3|t*2L", 4)]
    ['null', 'true', '[mlp,moe]', "'Et*3|t*2L'", '4']
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    text = str(value)
    return text if text.replace("_", "").replace(".", "").isalnum() else f"'{text}'"
