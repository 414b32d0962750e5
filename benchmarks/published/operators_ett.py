"""Readers of estimate-train-time: the paper's operators with forward and backward, optimizers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from forerun.benchmarks.published.columns import numbers, texts
from forerun.benchmarks.published.rows import (
    Operators,
    Sizes,
    family,
    named_rows,
    operator_rows,
    together,
)
from forerun.calib.workload.operators import OPTIMIZER_ELEMENT_NBYTES, OperatorKind, Phase

VOCAB_SIZE = 50257
"""The sampling code of the source works with this vocabulary and records none."""
VOCAB_MULTIPLE = 128

Size = Callable[[pd.DataFrame], pd.Series]


def padded_vocab_part(tp: pd.Series) -> pd.Series:
    """Vocabulary entries of one tensor-parallel rank, padded as Megatron pads them.

    >>> padded_vocab_part(pd.Series([1.0, 4.0])).tolist()
    [50304.0, 12672.0]
    """
    multiple = VOCAB_MULTIPLE * tp
    num_multiples = pd.Series(np.ceil(VOCAB_SIZE / multiple), index=tp.index)
    return num_multiples * multiple / tp


def _linear(k: Size, n: Size) -> Sizes:
    """Sizes of a product: the published ones, else those of a GPT layer."""
    return lambda t: (
        t["gemm_m"].fillna(t["tokens"]),
        t["gemm_k"].fillna(k(t)),
        t["gemm_n"].fillna(n(t)),
    )


_OPERATORS: Operators = {
    "embedding": (OperatorKind.EMBEDDING, lambda t: (t["tokens"], t["d"], t["vocab"])),
    "layernorm": (OperatorKind.NORM, lambda t: (t["tokens"], t["d"])),
    "RMSlayernorm": (OperatorKind.RMS_NORM, lambda t: (t["tokens"], t["d"])),
    "linear1": (OperatorKind.LINEAR_QKV, _linear(lambda t: t["d"], lambda t: 3 * t["d"] / t["tp"])),
    "linear2": (OperatorKind.LINEAR_PROJ, _linear(lambda t: t["d"] / t["tp"], lambda t: t["d"])),
    "linear3": (OperatorKind.LINEAR_FC1, _linear(lambda t: t["d"], lambda t: 4 * t["d"] / t["tp"])),
    "linear4": (OperatorKind.LINEAR_FC2, _linear(lambda t: 4 * t["d"] / t["tp"], lambda t: t["d"])),
    "linear_final": (OperatorKind.LOGITS, _linear(lambda t: t["d"], lambda t: t["vocab"])),
    "RoPE": (OperatorKind.ROTARY, lambda t: (t["l"], t["b"], t["h"] / t["tp"], t["d"] / t["h"])),
    "baddbmm": (
        OperatorKind.BATCHED_PRODUCT,
        lambda t: (t["matrices"], t["l"], t["d"] / t["h"], t["l"]),
    ),
    "bmm": (
        OperatorKind.BATCHED_PRODUCT,
        lambda t: (t["matrices"], t["l"], t["l"], t["d"] / t["h"]),
    ),
    "fillmask": (OperatorKind.MASK, lambda t: (t["matrices"] * t["l"], t["l"])),
    "softmax": (OperatorKind.SOFTMAX, lambda t: (t["matrices"] * t["l"], t["l"])),
    "ScaledUpperTriangMaskedSoftmax": (
        OperatorKind.FUSED_SOFTMAX,
        lambda t: (t["matrices"], t["l"], t["l"]),
    ),
    "flash_atten": (
        OperatorKind.FLASH_ATTENTION,
        lambda t: (
            *(t["b"], t["h"] / t["tp"], t["h"] / t["tp"], t["l"]),
            *(t["d"] / t["h"], t["d"] / t["h"]),
        ),
    ),
    "gelu": (
        OperatorKind.ACTIVATION,
        lambda t: (t["tokens"], 4 * t["d"] / t["tp"], 4 * t["d"] / t["tp"]),
    ),
    "res_add": (OperatorKind.RESIDUAL, lambda t: (t["tokens"], t["d"])),
    "parallel_cross_entropy_128": (OperatorKind.LOSS, lambda t: (t["tokens"], t["vocab"])),
}
"""Canonical sizes of each operator, from the shapes that the source samples (b micro-batch, l
sequence, h heads and d hidden size of the whole model)."""


def read_operators(frame: pd.DataFrame) -> pd.DataFrame:
    """Two canonical rows, forward and backward, for each published row of a known operator.

    A missing tensor-parallel degree counts as 1.
    """
    times_us = {Phase.FORWARD: "fwd_time_us", Phase.BACKWARD: "bwd_time_us"}
    names, terms = texts(frame, "op"), _terms(frame)
    return together([*named_rows(frame, _OPERATORS, terms, names=names, times_us=times_us)])


def _terms(frame: pd.DataFrame) -> pd.DataFrame:
    terms = pd.DataFrame(
        {
            "tp": numbers(frame, "tp").fillna(1),
            "b": numbers(frame, "micro_batch"),
            "l": numbers(frame, "seq_len"),
            "h": numbers(frame, "heads"),
            "d": numbers(frame, "hidden"),
            **{name: numbers(frame, name) for name in ("gemm_m", "gemm_k", "gemm_n")},
        }
    )
    terms["tokens"] = terms["b"] * terms["l"]
    terms["matrices"] = terms["b"] * terms["h"] / terms["tp"]
    terms["vocab"] = padded_vocab_part(terms["tp"])
    return terms


def read_optimizers(frame: pd.DataFrame) -> pd.DataFrame:
    """Optimizer steps by the number of parameters that one rank updates.

    Where ``params`` is missing it is estimated for a GPT stage of ``encoders`` layers:
    ``12 d^2/tp + (13 d)`` a layer, the part of the vocabulary (``V/tp d``) on the first and the
    last stage, a final norm (``2 d``) on the last.  A row without ``params`` and without ``tp``
    is flagged: the same hidden size and layers then stand for times that differ by the degree.
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
