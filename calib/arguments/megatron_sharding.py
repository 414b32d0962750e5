"""What is sharded over data parallelism and how wide optimizer states are, by Megatron's arguments.

Rules are those of core_v0.16.1: ``--use-megatron-fsdp`` (earlier ``--use-custom-fsdp``) with
``--data-parallel-sharding-strategy``, or ``--use-torch-fsdp2``, which shards everything, overlaps
by itself and takes no distributed optimizer beside it.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import ConfigError
from ..workload.argument_values import Arguments
from ..workload.config import Parallelism, Precision, RunConfig, Sharding
from .megatron_options import Values

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
"""The word for a width of FSDP's gradients that is not set."""


def with_sharding(par: Parallelism, given: Arguments) -> Parallelism:
    """The layout with what FSDP sets; as it is where that is not in use."""
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
    found = _STRATEGIES[strategy]
    if found is Sharding.NONE:
        return par
    return replace(par, is_optimizer_distributed=True, sharding=found)


def fsdp_dtypes(given: Arguments) -> tuple[str, str]:
    """In what Megatron's FSDP keeps gradients and in what it reduces them (core 0.18 and later):
    ``fp32``, ``bf16``, ``fp16`` or ``AS_ELSEWHERE``."""
    if not given.is_on(*_FSDP):
        return AS_ELSEWHERE, AS_ELSEWHERE
    names = ("megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype")
    words = (given.text(name, default=AS_ELSEWHERE).rpartition(".")[2] for name in names)
    main, sent = (_TORCH_NAMES.get(word, word) for word in words)
    return main, main if sent == AS_ELSEWHERE else sent


def sharding_values(par: Parallelism) -> Values:
    """The arguments that ``with_sharding`` reads back; empty up to the distributed optimizer."""
    names = {found: name for name, found in _STRATEGIES.items()}
    if par.sharded in (Sharding.NONE, Sharding.OPTIMIZER):
        return {}
    if par.shards_weights and not par.regathers_weights:
        return {"use_torch_fsdp2": True}
    return {"use_megatron_fsdp": True, _STRATEGY: names[par.sharded]}


def with_states(config: RunConfig, given: Arguments) -> RunConfig:
    """The run with the size of its optimizer's states, and the share that the host holds.

    Beside parameters in bf16 the precision-aware optimizer keeps of the fp32 ones only the 16 bits
    that they lack (``store_param_remainders``).
    """
    if given.is_on("use_precision_aware_optimizer"):
        weights, *moments = (_nbytes(given, name) for name in _STATE_DTYPES)
        if config.precision is Precision.BF16 and weights == 4:
            weights = 2
        config = replace(config, optimizer_state_nbytes=weights + sum(moments))
    if given.is_on("optimizer_cpu_offload"):
        is_stated = given.get("optimizer_offload_fraction") is not None
        stated = given.real("optimizer_offload_fraction") if is_stated else 1.0
        config = replace(
            config,
            optimizer_offload_frac=stated,
            overlaps_optimizer_offload=given.is_on("overlap_cpu_optimizer_d2h_h2d"),
        )
    return config


def optimizer_values(config: RunConfig) -> Values:
    """The arguments of states of a width of their own, or the host's, as ``with_states`` reads
    them."""
    values: Values = {}
    if config.optimizer_offload_frac:
        values = {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": config.optimizer_offload_frac,
            "overlap_cpu_optimizer_d2h_h2d": config.overlaps_optimizer_offload or None,
        }
    if not config.optimizer_state_nbytes:
        return values
    # Of the pairs that give the sum the widest first moment: which one is which costs nothing.
    weights = 2 if config.precision is Precision.BF16 else 4
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
