"""Canonical shapes from raw ones, held against the operators that a layout generates."""

from __future__ import annotations

import pytest

from forerun.calib.marks._shapes import canonical_shape
from forerun.calib.workload.operators import OperatorKind as K

# Sequence 16, micro-batch 2, hidden 64, 8 heads of 8, 4 query groups, ffn 128, vocabulary 96; tp 2.
SEQ, BATCH, HIDDEN = 16, 2, 64
WHOLE, LOCAL = (SEQ, BATCH, HIDDEN), (SEQ // 2, BATCH, HIDDEN)


@pytest.mark.parametrize(
    ("kind", "raw", "shape"),
    [
        (K.EMBEDDING, ((BATCH, SEQ), WHOLE, 48), (32, 64, 48)),
        (K.EMBEDDING, ((BATCH, SEQ), LOCAL, 48), (32, 64, 48)),
        (K.NORM, (WHOLE, WHOLE), (32, 64)),
        (K.NORM, (LOCAL, LOCAL), (16, 64)),
        (K.LINEAR_QKV, (WHOLE, (SEQ, BATCH, 64)), (32, 64, 64)),
        (K.LINEAR_QKV, (LOCAL, (SEQ, BATCH, 64)), (32, 64, 64)),
        (K.LINEAR_PROJ, ((SEQ, BATCH, 32), LOCAL), (32, 32, 64)),
        (K.LINEAR_FC2, ((SEQ, BATCH, 64), WHOLE), (32, 64, 64)),
        (K.LOGITS, (LOCAL, (SEQ, BATCH, 48)), (32, 64, 48)),
        (K.LOSS, ((SEQ, BATCH, 48), (BATCH, SEQ)), (32, 48)),
        (K.RESIDUAL, (LOCAL, LOCAL), (16, 64)),
        (
            K.CORE_ATTENTION,
            ((SEQ, BATCH, 4, 8), (SEQ, BATCH, 32), (SEQ, BATCH, 2, 8)),
            (2, 4, 2, 16, 8),
        ),
        (K.CORE_ATTENTION, ((SEQ, 4, 8), (SEQ, 32), (SEQ, 2, 8)), (1, 4, 2, 16, 8)),
    ],
)
def test_shapes_are_local_and_count_the_tokens_of_the_product_that_runs(
    kind: K, raw: tuple[object, ...], shape: tuple[int, ...]
) -> None:
    assert canonical_shape(kind, raw, {}) == shape


def test_containers_take_their_widths_from_the_linear_layers_inside() -> None:
    parts = {K.LINEAR_QKV: (32, 64, 96), K.LINEAR_FC1: (32, 64, 256), K.LINEAR_FC2: (32, 128, 64)}
    assert canonical_shape(K.POSITION, (LOCAL, LOCAL), parts) == (32, 96)
    assert canonical_shape(K.ACTIVATION, (LOCAL, LOCAL), parts) == (32, 256, 128)
