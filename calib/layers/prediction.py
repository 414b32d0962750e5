"""Layer modules of multi-token prediction (DeepSeek-V3, 2024, section 2.2) as Megatron runs it.

Each prediction layer joins the hidden states with the embedding of a token further ahead, halves
the width, runs one transformer layer of the kind of the last, and adds logits and a loss of its
own.  Embedding and output head are those of the model; the last stage holds a copy of the table.
"""

from __future__ import annotations

from dataclasses import replace

from ..workload.collectives import Collective, CollectiveUse, Placement
from ..workload.config import RunConfig
from ..workload.operators import OperatorKind
from .dense import embedding_module, head_module
from .layer_modules import (
    LayerModule,
    column_uses,
    hidden_call,
    linear_tensors,
    local_tokens,
    norm_module,
    tokens_of,
    transfer,
)

EMBEDDING = "embedding"
HEAD = "head"
"""Modules that are never computed again."""


def embedding_copy_module(config: RunConfig) -> LayerModule:
    """The table that prediction layers look up where the last chunk is not the first."""
    return LayerModule(module=EMBEDDING, tensors=embedding_module(config).tensors)


def prediction_modules(
    config: RunConfig, layer: tuple[LayerModule, ...]
) -> tuple[LayerModule, ...]:
    """The final norm of the model, and all prediction layers; ``layer`` are the last layer's.

    The norm is here because Megatron holds it between the last layer and these.
    """
    final, head = head_module(config)
    each = (
        replace(embedding_module(config), tensors=()),
        norm_module(config, "embedding_norm"),
        norm_module(config, "hidden_norm"),
        _join_module(config),
        *layer,
        norm_module(config, "prediction_norm"),
        replace(head, tensors=()),
    )
    return (final, *each * config.model.num_prediction_layers)


def _join_module(config: RunConfig) -> LayerModule:
    """Concatenation, and the projection of both halves: column-parallel, its result gathered."""
    hidden, tp = config.model.hidden_size, config.parallelism.tp
    return LayerModule(
        module="eh_proj",
        operators=(
            (OperatorKind.ELEMENTWISE, (local_tokens(config), 2 * hidden), 1),
            (OperatorKind.LINEAR, (tokens_of(config), 2 * hidden, hidden // tp), 1),
        ),
        uses=(*column_uses(config, OperatorKind.LINEAR, width=2 * hidden), *_gather_uses(config)),
        tensors=linear_tensors("join", 2 * hidden, hidden // tp, has_bias=False),
    )


def _gather_uses(config: RunConfig) -> tuple[CollectiveUse, ...]:
    if config.parallelism.tp == 1:
        return ()
    forward = transfer(hidden_call(config, Collective.ALL_GATHER), Placement.FORWARD)
    if not config.parallelism.is_sequence_parallel:
        return (forward,)
    return forward, replace(forward, placement=Placement.BACKWARD)
