"""What a model is called: its kind and its number of parameters."""

from __future__ import annotations

from dataclasses import replace

from ..workload.config import Batch, Parallelism, RunConfig
from ..workload.model_shape import ModelShape
from .stage_work import held_parameters

_NAMES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_FEW = 9.95
"""From here on two digits stand before the point, and none is needed behind it."""


def model_name(config: RunConfig) -> str:
    """The model as people name it, ``GPT 13B`` or ``MoE 47B (13B active)``.

    All parameters count, embeddings and padded rows of the vocabulary too; active are those of the
    same model with ``top_k`` experts, which a token meets.
    """
    model, experts = config.model, config.model.experts
    total = count_name(_num_parameters(config, model))
    if experts is None:
        return f"GPT {total}"
    met = replace(model, experts=replace(experts, num_experts=experts.top_k))
    return f"MoE {total} ({count_name(_num_parameters(config, met))} active)"


def _num_parameters(config: RunConfig, model: ModelShape) -> int:
    """Of a model of this shape, whole on one rank."""
    whole = replace(
        config,
        model=model,
        parallelism=Parallelism(),
        batch=Batch(micro_batch_size=1, global_batch_size=1),
        recompute_num_layers=0,
    )
    return sum(held_parameters(whole, 0))


def count_name(number: float) -> str:
    """A number of parameters in two digits or three.

    >>> [count_name(n) for n in (46.7e9, 1.31e9, 354_871_296, 842_496, 99)]
    ['47B', '1.3B', '355M', '842K', '99']
    """
    for size, name in _NAMES:
        if number >= 0.9995 * size:
            held = number / size
            return f"{held:.1f}{name}" if held < _FEW else f"{held:.0f}{name}"
    return f"{number:.0f}"
