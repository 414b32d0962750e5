"""What the program of a run cannot be asked for: left out of a search, counted, and said."""

from __future__ import annotations

from dataclasses import replace

from ..arguments import NEEDS_ENGINE, TRANSFORMER_ENGINE, Keep, layout_name, program_name
from ..search import FSDP_OPTIONS, OFFLOAD_OPTIONS, Found, cells_of, modules_of, num_variants
from ..workload import RunConfig, takes_options

_AXES = {
    "tp": "--tensor-model-parallel-size",
    "sp": "--sequence-parallel",
    "cp": "--context-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "vpp": "--num-layers-per-virtual-pipeline-stage",
    "mbs": "--micro-batch-size",
    "recompute": "--recompute-granularity",
}
"""Axes that stay as they are where nothing says another value."""
_EXPERT_AXES = {"ep": "--expert-model-parallel-size"}
_WITHIN = (
    *("--pipeline-model-parallel-layout", "--recompute-method", "--recompute-num-layers"),
    *("--recompute-modules", "--use-distributed-optimizer", "--overlap-grad-reduce"),
    *("--overlap-param-gather", "--num-distributed-optimizer-instances"),
)
"""What splits, recompute and states of an axis need."""
_NOT_ON_A_CPU = ("--context-parallel-size", *FSDP_OPTIONS, *OFFLOAD_OPTIONS)


def askable(config: RunConfig, keep: Keep | None) -> Keep | None:
    """The layouts that are asked for, with each axis that the program has no option for as it runs.

    An axis that is asked for otherwise stays asked for: its rows say why they are not offered.
    """
    if not takes_options(config):
        return keep
    kept = keep
    for name, option in _axes(config).items():
        if option in config.absent:
            asked = kept or Keep()
            kept = asked.having(name, layout_name(name).read(config)) or asked
    return kept


def counted(config: RunConfig, num_ranks: int, keep: Keep | None, found: Found) -> Found:
    """What was found, with the layouts that the program cannot be asked for among what rules cut.

    ``keep`` is what was asked for.
    """
    reason = left_out(config)
    if not reason:
        return found
    cells = cells_of(replace(config, absent=()), num_ranks, keep)
    number = max(0, num_variants(cells, keep) - found.proof.num_layouts)
    proof = replace(found.proof, cut={**found.proof.cut, reason: number})
    return replace(found, proof=proof)


def left_out(config: RunConfig) -> str:
    """Why layouts of a run were not searched; empty where its program takes all options.

    Options that no layout of this model and device needs are not named.
    """
    if not config.absent or not takes_options(config):
        return ""
    wanted = dict.fromkeys((*_axes(config).values(), *_WITHIN, *FSDP_OPTIONS, *OFFLOAD_OPTIONS))
    if config.device == "cpu":
        wanted = {option: None for option in wanted if option not in _NOT_ON_A_CPU}
    missing = ", ".join(option for option in wanted if option in config.absent)
    texts = [f"{program_name(config)} takes no {missing}"] if missing else []
    again = [name for name in modules_of(replace(config, absent=())) if name in NEEDS_ENGINE]
    if TRANSFORMER_ENGINE in config.absent and again:
        texts.append(f"recompute of {', '.join(again)} needs Transformer Engine")
    return "; ".join(texts)


def _axes(config: RunConfig) -> dict[str, str]:
    return _AXES | (_EXPERT_AXES if config.model.experts is not None else {})
