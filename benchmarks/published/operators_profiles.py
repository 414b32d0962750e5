"""Readers of profiles by planners and simulators (Aceso, Sailor, SimuMax), and of peak tables."""

from __future__ import annotations

import pandas as pd

from forerun.benchmarks.published.rows import (
    Operators,
    add_flag,
    element_nbytes,
    family,
    named_rows,
    numbers,
    operator_rows,
    texts,
    together,
)
from forerun.calib.importers.canonical_tables import MICROSECOND_S
from forerun.calib.units import MIB
from forerun.calib.workload.operators import OperatorKind, Phase

_TERA = 1e12
_ACESO: Operators = {
    "embedding": (OperatorKind.EMBEDDING, "tokens d vocab_part"),
    "layernorm": (OperatorKind.NORM, "tokens d"),
    "attention-qkv": (OperatorKind.LINEAR_QKV, "tokens qkv_inputs qkv_outputs"),
    "attention-score": (OperatorKind.BATCHED_PRODUCT, "matrices l channels l"),
    "attention-softmax": (OperatorKind.SOFTMAX, "score_rows l"),
    "attention-dropout": (OperatorKind.ELEMENTWISE, "score_rows l"),
    "attention-context": (OperatorKind.BATCHED_PRODUCT, "matrices l l channels"),
    "attention-dense": (OperatorKind.LINEAR_PROJ, "tokens width_part d"),
    "post-attention-dropout": (OperatorKind.RESIDUAL, "tokens d"),
    "MLP-GEMM-1": (OperatorKind.LINEAR_FC1, "tokens d ffn_part"),
    "MLP-gelu": (OperatorKind.ACTIVATION, "tokens ffn_part ffn_part"),
    "MLP-GEMM-2": (OperatorKind.LINEAR_FC2, "tokens ffn_part d"),
    "post-MLP-dropout": (OperatorKind.RESIDUAL, "tokens d"),
    "post-process": (OperatorKind.LOGITS, "tokens d vocab_part"),
}
"""Kind and sizes by the end of the operator's name; ``layernorm`` and ``embedding`` occur in
several places."""


def read_aceso(frame: pd.DataFrame) -> pd.DataFrame:
    """Read operators of GPT and T5 by Aceso's profiler, forward and backward.

    Each operator name, partitioning (``tp_algo``) and element type is a group.  With tensor
    parallelism the times of linears include their all-reduce.  T5's decoder has a sequence length
    that the table does not give: its operators are flagged.
    """
    op = texts(frame, "op_name")
    algo = texts(frame, "tp_algo").map(lambda a: f" algo {a}" if a not in ("", "0", "0.0") else "")
    stem = op.str.replace(r"-\d$", "", regex=True).where(~op.str.contains("GEMM"), op)
    out = named_rows(
        frame,
        _ACESO,
        _aceso_terms(frame, op),
        names=stem.map(_longest_ending),
        times_us={Phase.FORWARD: "fwd_us", Phase.BACKWARD: "bwd_us"},
        group=op + algo + " (" + texts(frame, "dtype") + ")",
    )
    is_decoder = out["group"].str.startswith(("dec", "t5-post"))
    add_flag(out, is_decoder, "length of the decoder's sequence unknown")
    return out


def _longest_ending(name: str) -> str:
    """Return the key of ``_ACESO`` that a name ends with, "" if none."""
    return max((ending for ending in _ACESO if name.endswith(ending)), key=len, default="")


def _aceso_terms(frame: pd.DataFrame, op: pd.Series) -> pd.DataFrame:
    tp, heads = numbers(frame, "tp").fillna(1), numbers(frame, "heads")
    batch, seq, hidden = (numbers(frame, n) for n in ("micro_batch_size", "seq_len", "hidden"))
    # T5's projections are wider than its hidden size; the width follows from the weights of qkv.
    is_qkv = op.str.contains("attention-qkv")
    weights_nbytes = numbers(frame, "weights_mib") * MIB
    width = (weights_nbytes * tp / (3 * hidden * element_nbytes(frame))).where(is_qkv)
    width = width.groupby([texts(frame, "model"), hidden]).transform("median")
    width = width.where(width > 0).fillna(hidden).round()
    is_row_parallel = is_qkv & (numbers(frame, "tp_algo") == 1)
    matrices = batch * heads / tp
    return pd.DataFrame(
        {
            "tokens": batch * seq,
            "matrices": matrices,
            "score_rows": matrices * seq,
            "l": seq,
            "d": hidden,
            "ffn_part": numbers(frame, "ffn") / tp,
            "vocab_part": numbers(frame, "vocab") / tp,
            "width_part": width / tp,
            "channels": width / heads,
            "qkv_inputs": hidden / tp.where(is_row_parallel, 1),
            "qkv_outputs": 3 * width / tp.where(~is_row_parallel, 1),
        }
    )


def read_sailor(frame: pd.DataFrame) -> pd.DataFrame:
    """Read whole transformer layers by Sailor, forward and backward, including TP all-reduces.

    Embeddings and heads are flagged, since they are not single operators: steps include them, fits
    do not.  Some published heads are faster than any device.
    """
    kinds = texts(frame, "layer_kind")
    return together(
        [
            _sailor_rows(frame[kinds == name], kind=kind, phase=phase, group=name)
            for name, kind in _SAILOR.items()
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        ]
    )


_SAILOR = {
    "layer": OperatorKind.LAYER,
    "embedding": OperatorKind.EMBEDDING,
    "head": OperatorKind.LOGITS,
}


def _sailor_rows(
    rows: pd.DataFrame, *, kind: OperatorKind, phase: Phase, group: str
) -> pd.DataFrame:
    number, seq, vocab = (numbers(rows, n) for n in ("micro_batch_size", "seq_len", "vocab"))
    tp = numbers(rows, "tp").fillna(1)
    layer = ("micro_batch_size", "heads", "seq_len", "hidden", tp)
    is_layer = kind is OperatorKind.LAYER
    part = operator_rows(
        rows,
        kind=kind,
        phase=phase,
        group=group,
        sizes=layer if is_layer else (number * seq, "hidden", (vocab / tp).round()),
        nbytes=texts(rows, "precision").str.startswith("fp32").map({True: 4, False: 2}),
        time_s=numbers(rows, "fwd_s" if phase is Phase.FORWARD else "bwd_s"),
        tp=tp,
    )
    if not is_layer:
        add_flag(part, part["flag"].notna(), f"a whole {group}, not one operator")
    return part


_GROUPED = OperatorKind.GROUPED_LINEAR
_ATTENTION = "b heads kv_heads seq_len qk_head_dim v_head_dim"
_SIMUMAX = {
    "matmul TN": (OperatorKind.LINEAR, Phase.FORWARD, "m k n"),
    "matmul NN": (OperatorKind.LINEAR, Phase.INPUT_GRADIENT, "m n k"),
    "matmul NT": (OperatorKind.LINEAR, Phase.WEIGHT_GRADIENT, "k n m"),
    "group_matmul fwd": (_GROUPED, Phase.FORWARD, "b _tokens k n"),
    "group_matmul bwd_grad_act": (_GROUPED, Phase.INPUT_GRADIENT, "b _tokens k n"),
    "group_matmul bwd_grad_w": (_GROUPED, Phase.WEIGHT_GRADIENT, "b _tokens k n"),
    "sdp_fwd": (OperatorKind.FLASH_ATTENTION, Phase.FORWARD, _ATTENTION),
    "sdp_bwd": (OperatorKind.FLASH_ATTENTION, Phase.BACKWARD, _ATTENTION),
}
"""Pass and size columns by operator with layout or stage; those of a product are (tokens, in, out)
of its layer."""


def read_simumax(frame: pd.DataFrame) -> pd.DataFrame:
    """Read efficiency tables of SimuMax as times: products by pass, grouped products, attention.

    Weight gradients accumulated in fp32 are a group of their own.
    """
    op, layout, stage = (texts(frame, n) for n in ("op", "layout", "stage"))
    is_fp32 = texts(frame, "out_dtype") == "fp32"
    group = op.replace({"sdp_fwd": "attention", "sdp_bwd": "attention"})
    group = group.where(~is_fp32, group + " (fp32 accumulation)")
    which = layout.where(op == "matmul", stage.where(op == "group_matmul", ""))
    frame = frame.assign(
        _name=(op + " " + which).str.strip(), _tokens=numbers(frame, "b") * numbers(frame, "m")
    )
    parts = []
    for name, (kind, phase, columns) in _SIMUMAX.items():
        rows = frame[frame["_name"] == name]
        part = operator_rows(
            rows,
            kind=kind,
            phase=phase,
            group=group.loc[rows.index],
            sizes=columns.split(),
            nbytes=2,
            time_s=numbers(rows, "time_us_from_efficiency") * MICROSECOND_S,
        )
        parts.append(part)
    return together(parts)


FAMILIES = (
    family("Aceso operators", "gpu op_name hidden heads seq_len fwd_us", read_aceso),
    family("Sailor layers", "gpu layer_kind micro_batch_size fwd_s", read_sailor),
    family("SimuMax operators", "gpu op b m n k time_us_from_efficiency", read_simumax),
)
