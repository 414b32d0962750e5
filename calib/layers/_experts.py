"""Layer modules of an expert layer: router, token exchange, routed and shared experts.

The modules follow ``megatron.core`` 0.16.1 (``transformer/moe``).  They describe the busiest rank:
it gets ``workload.routing.imbalance`` times the mean, spread evenly over its experts.  Omitted
because they are small: the all-reduce of token counts over tp and cp for the auxiliary loss, and
that of the experts' biases once per step (both num_experts numbers a layer).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from ..workload.collectives import Collective, CollectiveUse, GroupRole, OtherPass, Placement
from ..workload.config import RunConfig
from ..workload.model_shape import Dispatcher, Experts
from ..workload.operators import OperatorKind
from ..workload.ranks import group_call, num_nodes
from ..workload.routing import expected_distinct, imbalance
from ._dense import mlp_module
from .layer_modules import (
    LayerModule,
    Shaped,
    between_ranks,
    column_uses,
    linear_tensors,
    local_tokens,
    row_uses,
    transfer,
)
from .tensors import ParameterTensor

_COUNT_NBYTES = 8
"""Token counts are int64; the routing map is one byte for each token and expert."""
# Under ``--moe-router-dtype fp32`` the token weights also travel in fp32.
_FP32_NBYTES = 4
_MIRROR = {
    Collective.ALL_GATHER: Collective.REDUCE_SCATTER,
    Collective.REDUCE_SCATTER: Collective.ALL_GATHER,
    Collective.ALL_TO_ALL: Collective.ALL_TO_ALL,
}
"""The collective that carries the gradient back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Tokens of one micro-batch in an expert layer, from the view of one rank."""

    num_experts: int
    """Experts of this rank."""
    tokens: int
    """Tokens that this rank routes."""
    copies: int
    """Rows that it sends: each token once per chosen expert, or the capacity."""
    rows: int
    """Rows that the experts of this rank receive in total."""

    @property
    def loads(self) -> tuple[tuple[int, int], ...]:
        """Pairs of rows per expert and number of local experts with that many rows."""
        base, more = divmod(self.rows, self.num_experts)
        loads = ((base + 1, more), (base, self.num_experts - more))
        return tuple((rows, number) for rows, number in loads if rows and number)


def routing(config: RunConfig) -> Routing:
    """Return the routing of one micro-batch.

    An expert takes at most ceil(tokens x top-k / experts x factor) tokens of each rank
    (``get_capacity``), and exactly that many if rows are padded to the capacity.
    """
    experts, par = _experts(config), config.parallelism
    tokens = local_tokens(config)
    copies = tokens * experts.top_k
    busiest = experts.imbalance
    if experts.capacity_factor:
        capacity = math.ceil(copies / experts.num_experts * experts.capacity_factor)
        total_capacity = capacity * experts.num_experts
        if experts.is_padded_to_capacity:
            copies, busiest = total_capacity, 1.0
        copies = min(copies, total_capacity)
        busiest = min(busiest, total_capacity / copies)
    return Routing(
        num_experts=experts.num_experts // par.ep,
        tokens=tokens,
        copies=copies,
        rows=math.ceil(copies * par.expert_tp * busiest),
    )


def expert_modules(config: RunConfig) -> tuple[LayerModule, ...]:
    """Return the modules that replace the dense MLP in an expert layer, tensors in Megatron's
    order."""
    experts, routed = _experts(config), routing(config)
    hidden, fc1, ffn = _widths(config, experts.ffn_hidden_size, config.parallelism.expert_tp)
    router = (OperatorKind.ROUTER, (routed.tokens, hidden, experts.num_experts), 1)
    moe = LayerModule(
        module="moe",
        operators=(
            router,
            *_reordering(experts, routed, hidden),
            *_products(experts, routed, hidden, fc1, OperatorKind.LINEAR_FC1),
            *_products(experts, routed, ffn, hidden, OperatorKind.LINEAR_FC2),
        ),
        uses=_exchange(config, routed),
        tensors=(*_router_tensors(config), *_expert_tensors(config, fc1, ffn)),
    )
    loads = ((routed.rows, 1),) if experts.is_grouped else routed.loads
    activation = LayerModule(
        module="moe_act",
        operators=tuple((OperatorKind.ACTIVATION, (rows, fc1, ffn), n) for rows, n in loads),
    )
    if not experts.shared_ffn_hidden_size:
        return moe, activation
    return moe, activation, _shared_module(config)


def _experts(config: RunConfig) -> Experts:
    """Return the model's experts with the imbalance assumed for this layout."""
    experts = config.model.experts
    if experts is None:
        raise AssertionError("a layer of experts was requested of a model that has none")
    return _spread(experts, config.parallelism.ep)


@lru_cache(maxsize=256)
def _spread(experts: Experts, ep: int) -> Experts:
    return replace(experts, imbalance=imbalance(experts, ep), measured=())


def _widths(config: RunConfig, ffn: int, tp: int) -> tuple[int, int, int]:
    """Return hidden, and the widths of one rank's share: fc1's output and fc2's input."""
    share = ffn // tp
    return config.model.hidden_size, share * (2 if config.model.is_gated else 1), share


def _reordering(experts: Experts, routed: Routing, hidden: int) -> tuple[Shaped, ...]:
    """Return the permutations of rows to the experts and back.

    The all-to-all dispatcher sorts rows twice: by expert before sending, and by local expert after
    receiving.  Experts that run one by one need one more permutation to join their outputs.
    """
    has_many = routed.num_experts > 1
    arrived = (OperatorKind.PERMUTE, (routed.rows, hidden, 1))
    joins = int(has_many and not experts.is_grouped)
    if experts.dispatcher is not Dispatcher.ALL_TO_ALL:
        return ((*arrived, 2 + joins),)
    sent = (OperatorKind.PERMUTE, (routed.copies, hidden, 1), 2)
    return sent, (*arrived, 2 * has_many + joins)


def _products(
    experts: Experts, routed: Routing, num_in: int, num_out: int, kind: OperatorKind
) -> tuple[Shaped, ...]:
    if experts.is_grouped:
        shape = (routed.num_experts, routed.rows, num_in, num_out)
        return ((OperatorKind.GROUPED_LINEAR, shape, 1),)
    return tuple((kind, (rows, num_in, num_out), number) for rows, number in routed.loads)


def _exchange(config: RunConfig, routed: Routing) -> tuple[CollectiveUse, ...]:
    experts = _experts(config)
    if experts.dispatcher is Dispatcher.ALL_GATHER:
        return _gathered(config, routed)
    is_flex = experts.dispatcher is Dispatcher.FLEX
    uses = _flex(config) if is_flex else _all_to_all(config, routed)
    if not overlaps_expert_exchange(config):
        return _overlap_with_shared(config, uses)
    overlapped_pass = OtherPass.WHOLE if experts.delays_weight_gradients else OtherPass.INPUTS
    return tuple(replace(use, is_overlapped=True, other_pass=overlapped_pass) for use in uses)


def _gathered(config: RunConfig, routed: Routing) -> tuple[CollectiveUse, ...]:
    """Return the collectives of the all-gather dispatcher: every rank of the expert group receives
    all of the group's tokens and processes those of its experts."""
    experts, par, role = _experts(config), config.parallelism, GroupRole.EXPERT_TP_EP
    tokens = routed.tokens * par.expert_tp * par.ep
    weight = _weight_nbytes(config)
    gather, hidden = Collective.ALL_GATHER, config.model.hidden_size
    return between_ranks(
        (
            *_forward_and_mirror(config, gather, role, tokens * hidden * config.precision.nbytes),
            *_forward_and_mirror(config, gather, role, tokens * experts.num_experts * weight),
            # The outputs of the experts are summed in the type of the token weights.
            *_forward_and_mirror(config, Collective.REDUCE_SCATTER, role, tokens * hidden * weight),
            _forward(config, gather, role, tokens * experts.num_experts),
        )
    )


def _all_to_all(config: RunConfig, routed: Routing) -> tuple[CollectiveUse, ...]:
    """Return the collectives of the all-to-all dispatcher: each token goes to the ranks of its
    experts, then to all of the experts' tp ranks."""
    experts, par = _experts(config), config.parallelism
    hidden, weight, exchange = config.model.hidden_size, _weight_nbytes(config), GroupRole.EP
    sent = math.ceil(routed.rows / par.expert_tp)
    split, whole = Collective.ALL_TO_ALL, routed.rows
    row = hidden * config.precision.nbytes
    counts = par.expert_tp * par.ep * experts.num_experts * _COUNT_NBYTES
    gather, scatter, tp = Collective.ALL_GATHER, Collective.REDUCE_SCATTER, GroupRole.EXPERT_TP
    uses = [
        *_forward_and_mirror(config, split, exchange, sent * row, count=2),
        *_forward_and_mirror(config, split, exchange, sent * weight),
        *_forward_and_mirror(config, gather, tp, whole * row),
        *_forward_and_mirror(config, gather, tp, whole * weight),
        *_forward_and_mirror(config, scatter, tp, whole * hidden * weight),
    ]
    if not experts.is_padded_to_capacity:
        uses.append(_forward(config, gather, GroupRole.EXPERT_TP_EP, counts))
    return between_ranks(uses)


def overlaps_expert_exchange(config: RunConfig) -> bool:
    """Return True if the exchange overlaps another micro-batch, which takes at least two."""
    experts = config.model.experts
    return experts is not None and experts.overlaps_exchange and config.num_microbatches > 1


def _flex(config: RunConfig) -> tuple[CollectiveUse, ...]:
    """Return the collectives of the flex dispatcher (DeepEP): each token goes once to each rank
    with one of its experts, and back.

    Across nodes a token goes once to each node and is forwarded there; then ``num_chosen`` is set.
    """
    experts, par, role = _experts(config), config.parallelism, GroupRole.EXPERT_TP_EP
    reached = par.expert_tp * expected_distinct(
        num_groups=par.ep, num_chosen=experts.top_k, group_size=experts.num_experts // par.ep
    )
    tokens = math.ceil(local_tokens(config) * reached * experts.imbalance)
    nbytes = tokens * config.model.hidden_size * config.precision.nbytes
    chosen = experts.top_k * par.expert_tp if num_nodes(par, role) > 1 else 0
    uses = _forward_and_mirror(config, Collective.ALL_TO_ALL, role, nbytes, count=2)
    return between_ranks(replace(u, call=replace(u.call, num_chosen=chosen)) for u in uses)


def _weight_nbytes(config: RunConfig) -> int:
    return _FP32_NBYTES if _experts(config).has_fp32_router else config.precision.nbytes


def _forward_and_mirror(
    config: RunConfig, collective: Collective, role: GroupRole, nbytes: int, count: int = 1
) -> tuple[CollectiveUse, CollectiveUse]:
    """Return a collective of the forward pass and the one that carries its gradient."""
    ways = ((collective, Placement.FORWARD), (_MIRROR[collective], Placement.BACKWARD))
    there, back = (transfer(group_call(config, c, role, nbytes), place) for c, place in ways)
    return replace(there, count=count), replace(back, count=count)


def _forward(
    config: RunConfig, collective: Collective, role: GroupRole, nbytes: int
) -> CollectiveUse:
    return transfer(group_call(config, collective, role, nbytes), Placement.FORWARD)


def _router_tensors(config: RunConfig) -> tuple[ParameterTensor, ...]:
    number = _experts(config).num_experts
    tensors = linear_tensors(
        "router", config.model.hidden_size, number, has_bias=config.model.has_bias
    )
    return tuple(replace(tensor, is_sequence_parallel=True) for tensor in tensors)


def _expert_tensors(config: RunConfig, fc1: int, ffn: int) -> tuple[ParameterTensor, ...]:
    """Return the tensors of the routed experts.

    Without expert parallelism, Megatron reduces their gradients with those of the dense part.
    """
    experts, par = _experts(config), config.parallelism
    hidden, has_bias = config.model.hidden_size, config.model.has_bias
    first, second = (
        tuple(replace(tensor, is_expert=par.ep > 1) for tensor in tensors)
        for tensors in (
            linear_tensors("expert.fc1", hidden, fc1, has_bias=has_bias),
            linear_tensors("expert.fc2", ffn, hidden, has_bias=has_bias, is_row=True),
        )
    )
    number = experts.num_experts // par.ep
    return first * number + second * number if experts.is_grouped else (first + second) * number


def _shared_module(config: RunConfig) -> LayerModule:
    """Return the shared experts: a dense MLP for every token, split over tp like any other."""
    experts, hidden = _experts(config), config.model.hidden_size
    dense = mlp_module(config, "shared_experts", experts.shared_ffn_hidden_size, has_bias=False)
    gate = ParameterTensor(name="shared.gate", numel=hidden, is_sequence_parallel=True)
    gates = (gate,) if experts.has_shared_gate else ()
    return replace(dense, uses=_shared_uses(config), tensors=(*gates, *dense.tensors))


def _overlap_with_shared(
    config: RunConfig, uses: tuple[CollectiveUse, ...]
) -> tuple[CollectiveUse, ...]:
    """Mark the exchange as overlapped by the shared experts, if Megatron runs them on a separate
    stream: the first product during dispatch, the second during combine."""
    experts = _experts(config)
    if not (experts.overlaps_shared and experts.shared_ffn_hidden_size):
        return uses
    dense = mlp_module(config, "shared_experts", experts.shared_ffn_hidden_size, has_bias=False)
    work = tuple((kind, shape) for kind, shape, _ in dense.operators)
    return tuple(replace(use, is_overlapped=True, overlapping_operators=work) for use in uses)


def _shared_uses(config: RunConfig) -> tuple[CollectiveUse, ...]:
    """Return the tensor-parallel collectives of the shared experts.

    If they overlap the exchange, Megatron retains the gathered input and gathers it only once: the
    gather overlaps the sorting of rows, the scatter of the output their unsorting.
    """
    column = column_uses(config, OperatorKind.LINEAR_FC1)
    row = row_uses(config, OperatorKind.LINEAR_FC2)
    if not _experts(config).overlaps_shared:
        return (*column, *row)
    backward_gather = (Placement.BACKWARD, Collective.ALL_GATHER)
    remaining_uses = [
        use for use in column if (use.placement, use.call.collective) != backward_gather
    ]
    routed = routing(config)
    sorting = ((OperatorKind.PERMUTE, (routed.copies, config.model.hidden_size, 1)),)
    return tuple(
        replace(use, is_overlapped=True, overlaps_with=None, overlapping_operators=sorting)
        for use in (*remaining_uses, *row)
    )
