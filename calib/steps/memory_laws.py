"""Bytes that fused kernels move: what a modern stack pays for operators that no table times.

Counted from what each kernel reads and writes.  Rate and fixed cost of a kernel are those that
SimuMax publishes with its system tables (v1.2, ``configs/system``): two thirds of the data sheet on
B200, and 30 us (B200) to 40 us (A100) a kernel.  No constant was fitted here.
"""

from __future__ import annotations

import math

from ..fit.priors import DevicePrior
from ..workload.operators import Operator, OperatorKind, Phase

# B200's, for all devices.
_KERNEL_S = 30e-6
_RATE_FRAC = 0.666
_FP32_NBYTES = 4
Passes = tuple[float, float]
Kernels = tuple[int, int]

_COUNTED: dict[OperatorKind, tuple[Passes, Kernels]] = {
    # Read the input, write the output; backward reads input and gradient, writes a gradient.
    OperatorKind.NORM: ((2.0, 3.0), (1, 1)),
    # Queries, keys and values become tensors of their own, then queries and keys are rotated.
    OperatorKind.POSITION: ((4.0, 4.0), (2, 2)),
    # Two sums of a branch and the stream; backward two sums of their gradients.
    OperatorKind.RESIDUAL: ((6.0, 6.0), (2, 2)),
    # 40 bytes for each two-byte logit: an fp32 copy, its largest value, exponentials and their
    # sum; backward the gradient and its two-byte copy.
    OperatorKind.LOSS: ((13.0, 7.0), (4, 2)),
}
_OWN = frozenset({OperatorKind.EMBEDDING, OperatorKind.ACTIVATION, OperatorKind.PERMUTE})


def is_law(kind: OperatorKind) -> bool:
    """Whether the bytes of an operator are known here."""
    return kind in _COUNTED or kind in _OWN


def law_time_s(operator: Operator, prior: DevicePrior) -> float:
    """Seconds of one operator on a device."""
    rate = _RATE_FRAC * prior.peaks_for(operator.element_nbytes).bytes_per_s
    _, kernels = _COUNTED.get(operator.kind, ((), (1, 1)))
    return kernels[operator.phase is Phase.BACKWARD] * _KERNEL_S + fused_nbytes(operator) / rate


def fused_nbytes(operator: Operator) -> float:
    """Bytes read and written by one operator.

    >>> norm = Operator(kind=OperatorKind.NORM, phase=Phase.FORWARD, shape=(8, 4), element_nbytes=2)
    >>> fused_nbytes(norm)
    128.0
    """
    is_backward, width = operator.phase is Phase.BACKWARD, operator.element_nbytes
    shape = operator.shape
    match operator.kind:
        case OperatorKind.EMBEDDING:
            tokens, hidden, vocab = shape
            # Backward writes a dense gradient and adds that into the fp32 buffer.
            table = (2.0 * width + 2 * _FP32_NBYTES) * vocab * hidden
            return 2.0 * tokens * hidden * width + (table if is_backward else 0.0)
        case OperatorKind.ACTIVATION:
            tokens, size_in, size_out = shape
            return float(width * tokens * (size_in * (1 + is_backward) + size_out))
        case OperatorKind.PERMUTE:
            tokens, hidden, copies = shape
            return float(width * tokens * hidden * (1 + copies))
        case _:
            passes, _ = _COUNTED[operator.kind]
            return passes[is_backward] * width * math.prod(shape)
