"""Runs of PyTorch's own stack: what it does that Megatron does not."""

from __future__ import annotations

from dataclasses import replace

from ..errors import ConfigError
from ..workload.argument_values import shown
from ..workload.config import Precision, RunConfig, takes_options
from ..workload.parallelism import Engine

_OTHERS = ("megatron", "nemo", "primus")
"""Frameworks that train by Megatron core."""
_STATES_NBYTES = 16
"""Bytes of a parameter under FSDP: weight, gradient and both moments in fp32."""


def on_stack(config: RunConfig, framework: str) -> RunConfig:
    """Return the run as the framework trains it that its user names; ``""``: Megatron.

    PyTorch's stacks have no Transformer Engine, and FSDP2 keeps all states in fp32; in a pipeline
    it retains gathered weights and reduces gradients once (``apply_fsdp`` and
    ``backward_maybe_with_nosync`` of torchtitan).  Raise ``ConfigError`` if the name is unknown.
    """
    named = replace(config, framework=framework)
    if not framework or framework.lower().startswith(_OTHERS):
        return config
    if takes_options(named):
        raise ConfigError(
            f"--framework {shown(framework)} is not known; give torchtitan, transformers, PyTorch "
            "or Lightning, or leave it out for Megatron"
        )
    par = replace(named.parallelism, engine=Engine.TORCH)
    if par.shards_weights:
        named = with_torch_states(named)
        is_flat = par.pp == 1
        par = replace(par, regathers_weights=is_flat, keeps_grads_whole=not is_flat)
    return replace(named, parallelism=par, fuses_norms=False, fuses_gradient_accumulation=False)


def with_torch_states(config: RunConfig) -> RunConfig:
    """Return the run under PyTorch's own FSDP: 16 bytes for each parameter, of which weights and
    gradients are counted at the width of their transfers."""
    if config.precision is Precision.FP32 or config.reduces_grads_in_bf16:
        # Weights and gradients take 2 bytes each, and the optimizer 12, which is the default.
        return config
    states = _STATES_NBYTES - config.precision.nbytes - 4
    return replace(config, optimizer_state_nbytes=states)
