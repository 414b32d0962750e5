"""Step time by terms: the parts of the critical stage, with compute split by operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum

import numpy as np

from ..workload.collectives import GroupRole
from ..workload.operators import OPAQUE_OPERATORS, Operator, OperatorKind, Phase
from .compiled import Compiled
from .evaluation import GroupTimes
from .items import PASS_PARTS, Floats, Part, SparseRows, part_of

Kind = OperatorKind


class Term(Enum):
    """Component of a step's time, in the order of reports."""

    ATTENTION = "attention"
    """Attention with its projections, forward and backward, as are the following terms."""
    MLP = "mlp"
    """Feed-forward layers, including experts."""
    ROUTING = "routing"
    """Router, and permutation of tokens to the order of their experts."""
    NORM = "norm"
    """Norms, residuals, and other work on hidden states."""
    HEAD = "head"
    """Embedding, logits and loss."""
    RECOMPUTE = "recompute"
    LAUNCHES = "launches"
    """Waits of a device within its passes for the host's launches."""
    TP = "tp"
    """Exposed transfers, as for the following terms."""
    CP = "cp"
    EP = "ep"
    PP = "pp"
    """Messages between stages that are waited for at once."""
    BUBBLE = "bubble"
    """Waits of the critical stage: for the pipeline to fill and drain, and for slower stages."""
    DP = "dp"
    OPTIMIZER = "optimizer"
    OFFLOAD = "offload"
    """Copies of activations that no pass hides."""
    HOST = "host"
    NODES = "nodes"
    """Additional time of many nodes and of a release, less the gain of devices that cool down in
    bubbles."""
    UNEXPLAINED = "unexplained"
    """Residual of measured steps of this and similar layouts from all other terms."""


TERM_TEXTS: Mapping[Term, str] = {
    Term.ATTENTION: "attention",
    Term.MLP: "MLP",
    Term.ROUTING: "routing",
    Term.NORM: "norms",
    Term.HEAD: "embedding/head",
    Term.RECOMPUTE: "recompute",
    Term.LAUNCHES: "launches",
    Term.TP: "TP transfers",
    Term.CP: "CP transfers",
    Term.EP: "EP transfers",
    Term.PP: "PP messages",
    Term.BUBBLE: "PP bubble",
    Term.DP: "DP exposed",
    Term.OPTIMIZER: "optimizer",
    Term.OFFLOAD: "offload",
    Term.HOST: "host",
    Term.NODES: "nodes, clocks",
    Term.UNEXPLAINED: "unexplained",
}
"""Names of terms in reports."""
_COMPUTE = (Part.FORWARD, Part.BACKWARD)
PART_TEXTS: Mapping[Part, str] = {
    part: "compute" if part in _COMPUTE else TERM_TEXTS[Term(part.value)] for part in Part
}
"""Names of parts, which do not distinguish operators."""
_OPERATORS = (Term.ATTENTION, Term.MLP, Term.ROUTING, Term.NORM, Term.HEAD)
_KINDS = {
    Term.ATTENTION: (
        *(Kind.LINEAR_QKV, Kind.POSITION, Kind.CORE_ATTENTION, Kind.LINEAR_PROJ),
        *(Kind.FLASH_ATTENTION, Kind.MASK, Kind.SOFTMAX, Kind.FUSED_SOFTMAX, Kind.ROTARY),
        # The other mixers of tokens.
        *OPAQUE_OPERATORS.values(),
    ),
    Term.MLP: (
        *(Kind.LINEAR_FC1, Kind.ACTIVATION, Kind.LINEAR_FC2, Kind.GROUPED_LINEAR, Kind.EXPERTS),
        *(Kind.LINEAR, Kind.BATCHED_PRODUCT, Kind.LAYER),
    ),
    Term.ROUTING: (Kind.ROUTER, Kind.PERMUTE),
    Term.NORM: (*(Kind.NORM, Kind.RMS_NORM, Kind.FUSED_NORM, Kind.RESIDUAL, Kind.ELEMENTWISE),),
    Term.HEAD: (Kind.EMBEDDING, Kind.LOGITS, Kind.LOSS),
    Term.OPTIMIZER: (Kind.OPTIMIZER, Kind.SHARDED_OPTIMIZER, Kind.STATED_OPTIMIZER),
    Term.OFFLOAD: (Kind.HOST_COPY,),
    Term.HOST: (Kind.HOST_MICROBATCH, Kind.HOST_STEP, Kind.SHARD_UNIT),
}
_TERM_OF = {kind: term for term, kinds in _KINDS.items() for kind in kinds}
_DATA = (GroupRole.DP, GroupRole.DP_INSTANCES, GroupRole.EXPERT_DP, GroupRole.EMBEDDING)
_LEAST_S = 1e-15
"""Keeps shares finite; no block with work is this short."""


def term_of(kind: OperatorKind, phase: Phase) -> Term:
    """Return the term of an operator's time.

    >>> term_of(OperatorKind.LINEAR_FC1, Phase.FORWARD), term_of(OperatorKind.NORM, Phase.RECOMPUTE)
    (<Term.MLP: 'mlp'>, <Term.RECOMPUTE: 'recompute'>)
    """
    return Term.RECOMPUTE if phase is Phase.RECOMPUTE else _TERM_OF[kind]


def term_of_role(role: GroupRole) -> Term:
    """Return the term of a transfer's exposed time."""
    if role in _DATA:
        return Term.DP
    return Term.PP if role is GroupRole.PP else Term(part_of(role).value)


def term_times(
    compiled: Compiled, group_times: GroupTimes, items_s: Floats, layout: int
) -> dict[Term, Floats]:
    """Return the seconds of each term of one layout of a group, shape (alternatives,) each.

    They add up to its ``total_s``; ``items_s`` are the times that ``group_times`` was evaluated
    with. The critical stage is that of the first alternative. ``NODES`` and ``UNEXPLAINED`` are not
    included.
    """
    parts = group_times.part_times(layout)
    stage = group_times.critical_stage(layout)
    offload_s = group_times.group.pipeline.num_microbatches * group_times.copies_s[stage, layout]
    return {
        **_work(compiled, group_times, items_s, layout),
        **{Term(part.value): parts[part] for part in (*PASS_PARTS, Part.PP, Part.BUBBLE)},
        Term.DP: parts[Part.DP],
        Term.OPTIMIZER: parts[Part.OPTIMIZER],
        Term.OFFLOAD: offload_s,
        Term.HOST: parts[Part.HOST] - offload_s,
    }


def _work(
    compiled: Compiled, group_times: GroupTimes, items_s: Floats, layout: int
) -> dict[Term, Floats]:
    """Return the passes of the critical stage by operators, with recompute and waits for
    launches."""
    sums, blocks = compiled.sums, group_times.blocks
    recompute_s = sums.recompute @ items_s
    plain_s = sums.forward @ items_s + sums.backward @ items_s + recompute_s
    waits_s = blocks.waits_s if blocks.waits_s is not None else np.zeros_like(plain_s)
    done_s = blocks.forward_s + blocks.backward_s + blocks.recompute_s - waits_s
    slower = done_s / np.maximum(plain_s, _LEAST_S)
    terms = [_TERM_OF[i.kind] if isinstance(i, Operator) else None for i in compiled.items]
    out: dict[Term, Floats] = {}
    for term in _OPERATORS:
        is_of_term = np.array([float(item_term is term) for item_term in terms])
        term_s = (
            _only(sums.forward, is_of_term) @ items_s + _only(sums.backward, is_of_term) @ items_s
        )
        out[term] = group_times.of_blocks(layout, slower * term_s)
    out[Term.RECOMPUTE] = group_times.of_blocks(layout, slower * recompute_s)
    out[Term.LAUNCHES] = group_times.of_blocks(layout, waits_s)
    return out


def _only(rows: SparseRows, is_of_term: Floats) -> SparseRows:
    return replace(rows, counts=rows.counts * is_of_term[rows.columns])
