"""What an operator costs by physics: FLOP, bytes moved, launches, and the time these take.

Memory passes (how often an operator reads or writes its tensor) are starting constants read off
public A100 samples of eager Megatron operators (Zhang et al., arXiv:2509.22832, their released
data).  Launches are how many eager calls long an operator is, read off a model too small to compute
anything (hidden size 32, Megatron-core 0.16 without fusions).  What differs on a machine is fitted
on top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ..errors import CalibrationError
from ..workload.operators import Operator, OperatorKind, Phase

_FP32_NBYTES = 4


class Family(Enum):
    """Operators whose errors go together: one is too slow where the others of it are."""

    LINEAR = "linear"
    ATTENTION = "attention"
    MEMORY = "memory"
    OPTIMIZER = "optimizer"
    HOST = "host"
    COLLECTIVE = "collective"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Rates of one rank's machine that the laws divide by."""

    flop_per_s: float
    bytes_per_s: float
    launch_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one operator does in one phase; a launch is one eager call of the framework."""

    flop: float
    nbytes: float
    num_launches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """Reads and writes of one element, and eager framework calls, forward and backward."""

    forward: float
    backward: float
    forward_launches: int
    backward_launches: int


_PASSES = {
    OperatorKind.EMBEDDING: _Passes(
        forward=14.0, backward=15.0, forward_launches=22, backward_launches=13
    ),
    OperatorKind.NORM: _Passes(forward=3.7, backward=12.0, forward_launches=3, backward_launches=5),
    OperatorKind.POSITION: _Passes(
        forward=22.0, backward=52.0, forward_launches=11, backward_launches=3
    ),
    OperatorKind.RESIDUAL: _Passes(
        forward=6.9, backward=6.9, forward_launches=18, backward_launches=5
    ),
    OperatorKind.ACTIVATION: _Passes(
        forward=2.8, backward=3.75, forward_launches=9, backward_launches=8
    ),
    OperatorKind.LOSS: _Passes(
        forward=17.0, backward=5.3, forward_launches=43, backward_launches=13
    ),
    # Scores of unfused attention: fill-mask and softmax, plus what the two products read and write.
    OperatorKind.CORE_ATTENTION: _Passes(
        forward=11.8, backward=28.3, forward_launches=35, backward_launches=13
    ),
}
_NUM_SIZES = {
    OperatorKind.EMBEDDING: 3,
    OperatorKind.NORM: 2,
    OperatorKind.POSITION: 2,
    OperatorKind.CORE_ATTENTION: 5,
    OperatorKind.RESIDUAL: 2,
    OperatorKind.ACTIVATION: 3,
    OperatorKind.LOSS: 2,
    OperatorKind.OPTIMIZER: 1,
    OperatorKind.HOST_MICROBATCH: 0,
    OperatorKind.HOST_STEP: 0,
}
# Adam reads parameter, gradient and two moments and writes three of them; clipping reads the
# gradient once more and zeroing it writes it: nine fp32 passes.
_OPTIMIZER_PASSES = 9.0
_OPTIMIZER_FLOP = 14.0
# A loop over some fifty parameter tensors; their number does not show in the operator's shape.
_OPTIMIZER_LAUNCHES = 400
_LINEAR_LAUNCHES = 7
_LINEAR_BACKWARD_LAUNCHES = 9


def family(kind: OperatorKind) -> Family:
    """Which operators share an error with this one.

    >>> family(OperatorKind.LOGITS), family(OperatorKind.NORM)
    (<Family.LINEAR: 'linear'>, <Family.MEMORY: 'memory'>)
    """
    if kind.is_linear:
        return Family.LINEAR
    return _FAMILIES.get(kind, Family.MEMORY)


_FAMILIES = {
    OperatorKind.CORE_ATTENTION: Family.ATTENTION,
    OperatorKind.OPTIMIZER: Family.OPTIMIZER,
    OperatorKind.HOST_MICROBATCH: Family.HOST,
    OperatorKind.HOST_STEP: Family.HOST,
}


def work(operator: Operator) -> Work:
    """FLOP, bytes and launches of an operator.

    A linear's backward is two products, one for the input's and one for the weight's gradient; the
    latter is added into an fp32 buffer.

    >>> fc1 = Operator(kind=OperatorKind.LINEAR_FC1, phase=Phase.FORWARD, shape=(256, 512, 2048),
    ...                element_nbytes=2)
    >>> work(fc1).flop == 2 * 256 * 512 * 2048
    True
    >>> int(work(fc1).nbytes) == 2 * (256 * 512 + 512 * 2048 + 256 * 2048)
    True
    """
    expected = 3 if operator.kind.is_linear else _NUM_SIZES[operator.kind]
    if len(operator.shape) != expected:
        raise CalibrationError(
            f"{operator.kind.value} shape {operator.shape} has {len(operator.shape)} sizes, not "
            f"{expected}; record it with the same version that reads it"
        )
    if operator.kind.is_linear:
        return _linear(operator)
    return _WORK.get(operator.kind, _memory)(operator)


def law_time_s(operator: Operator, ceilings: Ceilings) -> float:
    """Seconds by the law: launches, FLOP and bytes one after the other.

    The sum fits measured products better than the maximum does, above all in the backward phase.

    >>> norm = Operator(kind=OperatorKind.NORM, phase=Phase.FORWARD, shape=(1000, 1000),
    ...                 element_nbytes=4)
    >>> law_time_s(norm, Ceilings(flop_per_s=1e12, bytes_per_s=1e10, launch_s=1e-5))
    0.00151
    """
    done = work(operator)
    return (
        done.num_launches * ceilings.launch_s
        + done.flop / ceilings.flop_per_s
        + done.nbytes / ceilings.bytes_per_s
    )


def _linear(operator: Operator) -> Work:
    tokens, size_in, size_out = operator.shape
    flop = 2.0 * tokens * size_in * size_out
    weight = float(size_in * size_out)
    activations = float(tokens * (size_in + size_out))
    if operator.phase is not Phase.BACKWARD:
        nbytes = operator.element_nbytes * (activations + weight)
        return Work(flop=flop, nbytes=nbytes, num_launches=_LINEAR_LAUNCHES)
    nbytes = operator.element_nbytes * (2 * activations + weight) + 2 * _FP32_NBYTES * weight
    return Work(flop=2 * flop, nbytes=nbytes, num_launches=_LINEAR_BACKWARD_LAUNCHES)


def _attention(operator: Operator) -> Work:
    """Two products over the full square of scores: the mask is applied, not skipped."""
    micro_batch, heads, query_groups, seq, channels = operator.shape
    scores = float(micro_batch * heads * seq * seq)
    inputs = float(micro_batch * seq * channels * (2 * heads + 2 * query_groups))
    passes, launches = _passes(operator)
    num_products = 4 if operator.phase is Phase.BACKWARD else 2
    nbytes = operator.element_nbytes * (passes * scores + num_products / 2 * inputs)
    return Work(flop=num_products * 2.0 * scores * channels, nbytes=nbytes, num_launches=launches)


def _embedding(operator: Operator) -> Work:
    """Backward also fills a dense gradient of the table and adds it into the fp32 buffer."""
    tokens, hidden, vocab = operator.shape
    passes, launches = _passes(operator)
    nbytes = operator.element_nbytes * passes * tokens * hidden
    if operator.phase is Phase.BACKWARD:
        nbytes += (2 * operator.element_nbytes + 2 * _FP32_NBYTES) * float(vocab * hidden)
    return Work(flop=0.0, nbytes=nbytes, num_launches=launches)


def _activation(operator: Operator) -> Work:
    tokens, size_in, size_out = operator.shape
    passes, launches = _passes(operator)
    elements = tokens * (size_in + size_out) / 2
    return Work(flop=0.0, nbytes=operator.element_nbytes * passes * elements, num_launches=launches)


def _optimizer(operator: Operator) -> Work:
    (num_parameters,) = operator.shape
    nbytes = _OPTIMIZER_PASSES * _FP32_NBYTES * num_parameters
    if operator.element_nbytes < _FP32_NBYTES:
        nbytes += 2.0 * operator.element_nbytes * num_parameters
    return Work(
        flop=_OPTIMIZER_FLOP * num_parameters, nbytes=nbytes, num_launches=_OPTIMIZER_LAUNCHES
    )


def _host(operator: Operator) -> Work:
    return Work(flop=0.0, nbytes=0.0, num_launches=1)


def _memory(operator: Operator) -> Work:
    passes, launches = _passes(operator)
    elements = float(operator.shape[0] * operator.shape[1])
    return Work(flop=0.0, nbytes=operator.element_nbytes * passes * elements, num_launches=launches)


def _passes(operator: Operator) -> tuple[float, int]:
    passes = _PASSES[operator.kind]
    if operator.phase is Phase.BACKWARD:
        return passes.backward, passes.backward_launches
    return passes.forward, passes.forward_launches


_WORK: dict[OperatorKind, Callable[[Operator], Work]] = {
    OperatorKind.CORE_ATTENTION: _attention,
    OperatorKind.EMBEDDING: _embedding,
    OperatorKind.ACTIVATION: _activation,
    OperatorKind.OPTIMIZER: _optimizer,
    OperatorKind.HOST_MICROBATCH: _host,
    OperatorKind.HOST_STEP: _host,
}
