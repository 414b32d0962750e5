"""Layout options that a program accepts, and changes of layout that it therefore cannot make.

A script on ``megatron.core`` has its own parser, which may know fewer options than Megatron-LM's.
``RunConfig.absent`` lists those that the program of a run lacks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..workload.argument_values import Values, name_of
from ..workload.config import RunConfig
from ._megatron_settings import SETTINGS
from .megatron_options import GROUPS
from .megatron_rules import required_values
from .megatron_values import as_options, layout_values

TRANSFORMER_ENGINE = "transformer_engine"
"""Entry in ``RunConfig.absent``: the module of this name was not imported."""
NEEDS_ENGINE = frozenset({"layernorm", "mla_up_proj", "moe_act"})
"""Recomputed modules whose output is dropped: core_v0.16.1's ``CheckpointWithoutOutput`` asks
Transformer Engine whether 8 bits are in use (``tensor_parallel/random.py``), whatever runs."""
_REQUIRED_NAMES = ("ckpt_format", "moe_pad_experts_for_cuda_graph_inference")


def _options() -> dict[str, str]:
    old = {name for one in SETTINGS for name in (*one.old_switches, *one.old_values)}
    names = sorted(frozenset(_REQUIRED_NAMES).union(*GROUPS) - old)
    spelled = {name: option for name in names for option, _ in as_options({name: name})}
    return {option: name for name, option in spelled.items()}


LAYOUT_OPTIONS: Mapping[str, str] = _options()
"""All options that a layout may set, with their names in Megatron's namespace."""


def options_in(names: Collection[str]) -> frozenset[str]:
    """Return the ``LAYOUT_OPTIONS`` whose values are in a Megatron namespace with these names."""
    return frozenset(
        option
        for option, name in LAYOUT_OPTIONS.items()
        if name in names or name_of(option) in names
    )


def absent_options(taken: Collection[str]) -> tuple[str, ...]:
    """Return the ``LAYOUT_OPTIONS`` that are not in ``taken``, in order."""
    return tuple(option for option in LAYOUT_OPTIONS if option not in taken)


def program_name(config: RunConfig) -> str:
    """Return the name of a run's program, for messages."""
    return config.program or "the script"


def unsupported_options_reason(config: RunConfig, running: RunConfig) -> str:
    """Return why the running layout's program cannot run another layout; empty if it can.

    It must accept the options for all differences, and have the library that recompute of a module
    needs.
    """
    if not running.absent:
        return ""
    there, here = _said_values(config), _said_values(running)
    differing = {
        name: there.get(name, here.get(name))
        for name in there.keys() | here.keys()
        if there.get(name) != here.get(name)
    }
    missing = sorted(option for option, _ in as_options(differing) if option in running.absent)
    if missing:
        return f"{program_name(running)} takes no {', '.join(missing)}"
    engine_modules = sorted(
        NEEDS_ENGINE & set(config.recompute_modules) - set(running.recompute_modules)
    )
    if engine_modules and TRANSFORMER_ENGINE in running.absent:
        modules = ", ".join(engine_modules)
        return f"recompute of {modules} needs Transformer Engine, which is not installed"
    return ""


def _said_values(config: RunConfig) -> Values:
    return {**layout_values(config), **required_values(config, {})}
