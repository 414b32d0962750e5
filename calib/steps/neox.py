"""Steps of GPT-NeoX runs from tables of operators and collectives alone.

What differs from Megatron (DeepSpeed's pipeline engine and ZeRO-1 under GPT-NeoX):

* no transfer hides behind work; with a parallel residual attention and MLP share the all-reduce of
  the forward pass, while backwards each sums the gradient of its own input;
* each rank sends its share of the activations to the next stage, and the mask with them;
* a stage sums its gradients when its last backward pass is done, updates, and gathers parameters.

A step adds up hundreds of equal transfers: what counts is the mean of the samples at a payload, not
their median.  Where the cluster of the runs fell back to sockets, the samples that carry a flag for
that are the right ones, since the runs used that network too; elsewhere the flag excludes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.stats import t as student

from ..fit.collectives import CollectiveModel
from ..fit.groups import canonical, group_of
from ..samples.step_rows import StepPredictions, StepRow, Trait
from ..timeline.costs import pipeline_costs
from ..timeline.simulate import simulate
from ..workload.blocks import BlockKind, block, chunk_sorts
from ..workload.collectives import Collective, CollectiveCall, GroupRole
from ..workload.config import Normalization, RunConfig
from ..workload.operators import OPTIMIZER_ELEMENT_NBYTES, Operator, OperatorKind, Phase
from ..workload.parameters import parameters
from ..workload.pieces import hidden_nbytes
from ..workload.ranks import group_call
from ..workload.stage_work import hop_num_nodes
from .operator_tables import OperatorTables, operator_tables
from .transfer_tables import transfer_tables

Kind = OperatorKind
_NEAR_FRAC = 0.05
_ENOUGH = 5
"""Samples of a group within 5 % of a payload whose mean is taken in place of the curve."""
_SIGMA_LOG = 0.06
_FREEDOM = 7.0
FRAMEWORK = "GPT-NeoX"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfers:
    """Transfers of one cluster: means of samples near a payload, else the curve of the group."""

    rows: pd.DataFrame
    model: CollectiveModel

    def time_s(self, call: CollectiveCall) -> float:
        """Mean seconds of one call."""
        if call.num_ranks == 1:
            return 0.0
        call = canonical(call)
        rows = self.rows
        alike = rows[
            (rows["collective"] == call.collective.value)
            & (rows["num_ranks"] == call.num_ranks)
            & (rows["num_nodes"] == call.num_nodes)
            & (abs(np.log(rows["nbytes"] / call.nbytes)) < _NEAR_FRAC)
        ]
        if len(alike) >= _ENOUGH:
            return float((alike["time_s"] / alike["nbytes"]).mean()) * call.nbytes
        group = group_of(replace(call, role=GroupRole.OTHER))
        found = self.model.estimate(group, np.array([float(call.nbytes)]))
        return float(np.exp(found.log_time[0]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NeoxSteps:
    """Step times of one cluster; calibration rows move all of them by one factor."""

    operators: OperatorTables
    transfers: Transfers
    offset_log: float = 0.0

    def fit(self, rows: Sequence[StepRow]) -> NeoxSteps:
        """With the mean residual of some rows, drawn to none by the weight of one row."""
        if not rows:
            return self
        residuals = [np.log(row.measured_s / self.step_s(row)) for row in rows]
        return replace(self, offset_log=float(np.sum(residuals)) / (len(rows) + 1))

    def predict(self, rows: Sequence[StepRow]) -> StepPredictions:
        """Medians and 90 % intervals."""
        found = np.array([self.step_s(row) for row in rows]) * np.exp(self.offset_log)
        half = float(np.exp(student.ppf(0.95, _FREEDOM) * _SIGMA_LOG))
        return StepPredictions(time_s=found, low_s=found / half, high_s=found * half)

    def step_s(self, row: StepRow) -> float:
        """Seconds of one step."""
        config = row.config
        stages = range(config.parallelism.pp)
        passes = [_Stage(row, self).passes_s(stage) for stage in stages]
        forward, backward = (np.array([found[i] for found in passes]) for i in range(2))
        sends = np.array([self._send_s(row, stage) for stage in stages[:-1]]).reshape(-1, 2)
        pipeline = simulate(
            pipeline_costs(
                forward,
                backward,
                activation_s=sends[:, :1],
                gradient_s=sends[:, 1:],
            ),
            config.num_microbatches,
        )
        reduced = [self._over_dp(config, s, Collective.ALL_REDUCE) for s in stages]
        updates = [
            self._adam_s(config, s) + self._over_dp(config, s, Collective.ALL_GATHER)
            for s in stages
        ]
        return float((pipeline.end_s[:, 0] + np.array(reduced)).max()) + max(updates)

    def _send_s(self, row: StepRow, stage: int) -> tuple[float, float]:
        """An activation down and a gradient up over the boundary after a stage."""
        config, par = row.config, row.config.parallelism
        share = hidden_nbytes(config) // par.tp
        mask = config.model.seq_length**2 if Trait.MASK_IN_P2P in row.traits else 0
        nodes = hop_num_nodes(par, stage)
        down, up = (
            CollectiveCall(
                collective=Collective.SEND,
                role=GroupRole.PP,
                num_ranks=2,
                nbytes=nbytes,
                num_nodes=nodes,
            )
            for nbytes in (share + mask, share)
        )
        return self.transfers.time_s(down), self.transfers.time_s(up)

    def _over_dp(self, config: RunConfig, stage: int, collective: Collective) -> float:
        nbytes = parameters(config, stage) * config.precision.nbytes
        return self.transfers.time_s(group_call(config, collective, GroupRole.DP, nbytes))

    def _adam_s(self, config: RunConfig, stage: int) -> float:
        optimizer = Operator(
            kind=Kind.OPTIMIZER,
            phase=Phase.STEP,
            shape=(parameters(config, stage),),
            element_nbytes=OPTIMIZER_ELEMENT_NBYTES,
        )
        return float(self.operators.times_s([optimizer])[0])


def neox_steps(
    operators: Sequence[pd.DataFrame], collectives: Sequence[pd.DataFrame], row: StepRow
) -> NeoxSteps:
    """The model of the machine that a row ran on."""
    device = row.config.device
    is_socket = Trait.SOCKET_NETWORK in row.traits
    rows = pd.concat(list(collectives), ignore_index=True)
    rows = rows[(rows["device"] == device) & ((rows["flag"] == "") | is_socket)]
    return NeoxSteps(
        operators=operator_tables(operators, device=device),
        transfers=Transfers(
            rows=rows, model=transfer_tables([rows], device=device, is_flagged_used=is_socket)
        ),
    )


@dataclass(frozen=True, slots=True)
class _Stage:
    row: StepRow
    steps: NeoxSteps

    def passes_s(self, stage: int) -> tuple[float, float]:
        """One forward and one backward pass of a micro-batch, recomputation included."""
        config = self.row.config
        forward = backward = 0.0
        for (kind, is_again), count in chunk_sorts(config, stage):
            down, up = self._work_s(kind)
            sums_down, sums_up = self._sums(kind)
            down += sums_down * self._all_reduce_s
            up += sums_up * self._all_reduce_s
            forward += count * down
            backward += count * (up + (down if is_again else 0.0))
        return forward, backward

    @property
    def _all_reduce_s(self) -> float:
        config = self.row.config
        call = group_call(config, Collective.ALL_REDUCE, GroupRole.TP, hidden_nbytes(config))
        return self.steps.transfers.time_s(call)

    def _sums(self, kind: BlockKind) -> tuple[int, int]:
        """All-reduces over tp of (tokens, hidden), forwards and backwards."""
        if kind is BlockKind.LAYER:
            return (1 if Trait.PARALLEL_RESIDUAL in self.row.traits else 2), 2
        return (1, 0) if kind is BlockKind.EMBEDDING else (0, 1)

    def _work_s(self, kind: BlockKind) -> tuple[float, float]:
        out = []
        made = block(self.row.config, kind)
        for operators in (made.forward, made.backward):
            parts = [
                part
                for operator, count in operators
                for part in count * sampled(operator, self.row)
            ]
            out.append(float(np.sum(self.steps.operators.times_s(parts))))
        return out[0], out[1]


def sampled(operator: Operator, row: StepRow) -> tuple[Operator, ...]:
    """The operators that were sampled in place of one that a layout generates.

    GPT-NeoX runs RMSNorm and rotation as chains of eager calls; a residual addition was sampled
    alone, and a layer has two.
    """
    model, tp = row.config.model, row.config.parallelism.tp
    match operator.kind:
        case Kind.NORM if model.normalization is Normalization.RMS_NORM:
            return (replace(operator, kind=Kind.RMS_NORM),)
        case Kind.RESIDUAL:
            return operator, operator
        case Kind.POSITION:
            heads, micro = model.num_attention_heads // tp, row.config.batch.micro_batch_size
            shape = (model.seq_length, micro, heads, model.kv_channels)
            return (replace(operator, kind=Kind.ROTARY, shape=shape),)
        case Kind.CORE_ATTENTION:
            return _attention(operator, row)
        case _:
            return (operator,)


def _attention(operator: Operator, row: StepRow) -> tuple[Operator, ...]:
    micro, heads, groups, seq, channels = operator.shape
    if row.config.is_attention_fused:
        shape = (micro, heads, groups, seq, channels, channels)
        return (replace(operator, kind=Kind.FLASH_ATTENTION, shape=shape),)
    matrices = micro * heads
    softmax = [(Kind.FUSED_SOFTMAX, (matrices, seq, seq))]
    if Trait.TRIANGULAR_SOFTMAX not in row.traits:
        softmax = [(kind, (matrices * seq, seq)) for kind in (Kind.MASK, Kind.SOFTMAX)]
    parts = (
        (Kind.BATCHED_PRODUCT, (matrices, seq, channels, seq)),
        *softmax,
        (Kind.BATCHED_PRODUCT, (matrices, seq, seq, channels)),
    )
    return tuple(replace(operator, kind=kind, shape=shape) for kind, shape in parts)
