"""Readers of estimate-train-time (arXiv:2509.22832): the paper's operators, and optimizers."""

from __future__ import annotations

import numpy as np
import pandas as pd

from forerun.benchmarks.published.rows import (
    Operators,
    family,
    named_rows,
    numbers,
    operator_rows,
    texts,
)
from forerun.calib.workload.operators import OPTIMIZER_ELEMENT_NBYTES, OperatorKind, Phase

VOCAB_SIZE = 50257
"""The vocabulary in the sampling code of the source, which records none."""
VOCAB_MULTIPLE = 128


def padded_vocab_part(tp: pd.Series) -> pd.Series:
    """Return vocabulary entries of one tensor-parallel rank, padded as Megatron pads them.

    >>> padded_vocab_part(pd.Series([1.0, 4.0])).tolist()
    [50304.0, 12672.0]
    """
    multiple = VOCAB_MULTIPLE * tp
    num_multiples = pd.Series(np.ceil(VOCAB_SIZE / multiple), index=tp.index)
    return num_multiples * multiple / tp


_OPERATORS: Operators = {
    "embedding": (OperatorKind.EMBEDDING, "tokens d vocab"),
    "layernorm": (OperatorKind.NORM, "tokens d"),
    "RMSlayernorm": (OperatorKind.RMS_NORM, "tokens d"),
    "linear1": (OperatorKind.LINEAR_QKV, "tokens d 3d_part"),
    "linear2": (OperatorKind.LINEAR_PROJ, "tokens d_part d"),
    "linear3": (OperatorKind.LINEAR_FC1, "tokens d 4d_part"),
    "linear4": (OperatorKind.LINEAR_FC2, "tokens 4d_part d"),
    "linear_final": (OperatorKind.LOGITS, "tokens d vocab"),
    "RoPE": (OperatorKind.ROTARY, "l b h_part channels"),
    "baddbmm": (OperatorKind.BATCHED_PRODUCT, "matrices l channels l"),
    "bmm": (OperatorKind.BATCHED_PRODUCT, "matrices l l channels"),
    "fillmask": (OperatorKind.MASK, "score_rows l"),
    "softmax": (OperatorKind.SOFTMAX, "score_rows l"),
    "ScaledUpperTriangMaskedSoftmax": (OperatorKind.FUSED_SOFTMAX, "matrices l l"),
    "flash_atten": (OperatorKind.FLASH_ATTENTION, "b h_part h_part l channels channels"),
    "gelu": (OperatorKind.ACTIVATION, "tokens 4d_part 4d_part"),
    "res_add": (OperatorKind.RESIDUAL, "tokens d"),
    "parallel_cross_entropy_128": (OperatorKind.LOSS, "tokens vocab"),
}
"""Canonical sizes of each operator, from the shapes that the source samples (b micro-batch, l
sequence, h heads and d hidden size of the whole model)."""


def read_operators(frame: pd.DataFrame) -> pd.DataFrame:
    """Return two canonical rows, forward and backward, for each published row of a known operator.

    A missing tensor-parallel degree counts as 1.
    """
    times_us = {Phase.FORWARD: "fwd_time_us", Phase.BACKWARD: "bwd_time_us"}
    names, terms = texts(frame, "op"), _terms(frame)
    return named_rows(frame, _OPERATORS, terms, names=names, times_us=times_us)


def _terms(frame: pd.DataFrame) -> pd.DataFrame:
    tp = numbers(frame, "tp").fillna(1)
    b, seq, h, d = (numbers(frame, n) for n in ("micro_batch", "seq_len", "heads", "hidden"))
    matrices = b * h / tp
    return pd.DataFrame(
        {
            "b": b,
            "l": seq,
            "h_part": h / tp,
            "d": d,
            "channels": d / h,
            "d_part": d / tp,
            "3d_part": 3 * d / tp,
            "4d_part": 4 * d / tp,
            "tokens": b * seq,
            "matrices": matrices,
            "score_rows": matrices * seq,
            "vocab": padded_vocab_part(tp),
        }
    )


def read_optimizers(frame: pd.DataFrame) -> pd.DataFrame:
    """Read optimizer steps by the number of parameters that one rank updates.

    If ``params`` is missing, it is estimated for a GPT stage of ``encoders`` layers: ``12 d^2/tp +
    (13 d)`` a layer, the part of the vocabulary (``V/tp d``) on the first and the last stage, a
    final norm (``2 d``) on the last.  A row without ``params`` and without ``tp`` is flagged: the
    same hidden size and layers then stand for times that depend on the degree.
    """
    op, tp, d = texts(frame, "op"), numbers(frame, "tp"), numbers(frame, "hidden")
    layers = numbers(frame, "encoders", "layers")
    has_vocab = op.str.startswith(("firstStage", "lastStage")).astype(float)
    estimated = layers * (12 * d**2 / tp + 13 * d) + has_vocab * padded_vocab_part(tp) * d
    estimated += op.str.startswith("lastStage") * 2 * d
    return operator_rows(
        frame,
        kind=OperatorKind.OPTIMIZER,
        phase=Phase.STEP,
        group=op,
        sizes=(numbers(frame, "params").fillna(estimated.round()),),
        nbytes=OPTIMIZER_ELEMENT_NBYTES,
        tp=tp,
    ).reset_index(drop=True)


FAMILIES = (
    family(
        "estimate-train-time operators", "gpu op micro_batch seq_len fwd_time_us", read_operators
    ),
    family("estimate-train-time optimizers", "gpu op hidden encoders time_us", read_optimizers),
)
