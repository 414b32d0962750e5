"""Readers of the tables of inference simulators: aiconfigurator and vidur, forward only."""

from __future__ import annotations

import pandas as pd

from forerun.benchmarks.published.rows import (
    Operators,
    element_nbytes,
    family,
    joined,
    named_rows,
    numbers,
    operator_rows,
    texts,
)
from forerun.calib.workload.operators import OperatorKind, Phase


def read_gemm(frame: pd.DataFrame) -> pd.DataFrame:
    """Read products of aiconfigurator; collectors differ by 10 % and are groups of their own."""
    dtype = texts(frame, "dtype").replace({"bfloat16": "", "float16": "", "bf16": "", "fp16": ""})
    name = joined(frame.assign(_name="gemm", _dtype=dtype), "_name", "_dtype")
    return operator_rows(
        frame,
        kind=OperatorKind.LINEAR,
        group=name + " (" + texts(frame, "collector") + ")",
        device="system",
        sizes=("m", "k", "n"),
    )


def read_prefill_attention(frame: pd.DataFrame) -> pd.DataFrame:
    """Read causal attention over a whole prompt by aiconfigurator, keys and values of one width."""
    return operator_rows(
        frame,
        kind=OperatorKind.FLASH_ATTENTION,
        group="prefill attention (" + texts(frame, "collector") + ")",
        device="system",
        sizes=("batch", "q_heads", "kv_heads", "seq_len", "head_dim", "head_dim"),
        nbytes=element_nbytes(frame, "attn_dtype"),
    )


def read_experts(frame: pd.DataFrame) -> pd.DataFrame:
    """Read fused experts by aiconfigurator: one rank's part under tensor and expert parallelism.

    The distribution of tokens over experts changes the time: each distribution, kernel and
    collector is a group.
    """
    tp, ep = (numbers(frame, name).fillna(1) for name in ("moe_tp_size", "moe_ep_size"))
    experts = numbers(frame, "num_experts")
    which = joined(frame, "kernel_source", "distribution", "collector")
    return operator_rows(
        frame,
        kind=OperatorKind.EXPERTS,
        group="experts (" + which + ")",
        device="system",
        sizes=(
            *("num_tokens", "hidden_size", numbers(frame, "inter_size") / tp, "topk"),
            *(experts / ep, experts),
        ),
        nbytes=element_nbytes(frame, "moe_dtype"),
        tp=tp,
    )


_VIDUR: Operators = {
    "attn_pre_proj": (OperatorKind.LINEAR_QKV, "tokens d qkv"),
    "attn_post_proj": (OperatorKind.LINEAR_PROJ, "tokens d_part d"),
    "mlp_up_proj": (OperatorKind.LINEAR_FC1, "tokens d up"),
    "mlp_down_proj": (OperatorKind.LINEAR_FC2, "tokens ffn_part d"),
    "mlp_act": (OperatorKind.ACTIVATION, "tokens up ffn_part"),
    "attn_rope": (OperatorKind.POSITION, "tokens qkv"),
    "input_layernorm": (OperatorKind.NORM, "tokens d"),
    "post_attention_layernorm": (OperatorKind.NORM, "tokens d"),
    "add": (OperatorKind.ELEMENTWISE, "tokens d"),
    "emb": (OperatorKind.ELEMENTWISE, "tokens d"),
}


def read_vidur(frame: pd.DataFrame) -> pd.DataFrame:
    """Read layers of language models by vidur, median time; all models of a GPU are one group.

    The table has no vocabulary, so the embedding counts as the gather of rows that it is without
    training.  The activation's input is the output of the same model's ``mlp_up_proj`` (twice the
    activation's output if gated; assumed gated if the table lacks that operator).
    """
    names, terms = texts(frame, "op"), _vidur_terms(frame)
    times_us = {Phase.FORWARD: "time_us_median"}
    return named_rows(frame, _VIDUR, terms, names=names, times_us=times_us)


def _vidur_terms(frame: pd.DataFrame) -> pd.DataFrame:
    op, tp = texts(frame, "op"), numbers(frame, "tp").fillna(1)
    ffn, hidden = numbers(frame, "n_expanded_embd"), numbers(frame, "n_embd")
    heads, kv_heads = numbers(frame, "n_head"), numbers(frame, "n_kv_head")
    ratio = (numbers(frame, "gemm_n") * tp / ffn).where(op == "mlp_up_proj")
    gated = ratio.groupby(texts(frame, "model")).transform("median").fillna(2)
    return pd.DataFrame(
        {
            "tokens": numbers(frame, "num_tokens"),
            "d": hidden,
            "d_part": hidden / tp,
            "ffn_part": ffn / tp,
            "up": (ffn * gated / tp).round(),
            "qkv": (heads + 2 * kv_heads.fillna(heads)) / tp * (hidden / heads),
        }
    )


FAMILIES = (
    family("aiconfigurator GEMM", "system collector dtype m n k time_us", read_gemm),
    family(
        "aiconfigurator attention",
        "system collector batch seq_len q_heads kv_heads head_dim",
        read_prefill_attention,
    ),
    family(
        "aiconfigurator experts",
        "system num_tokens hidden_size inter_size topk num_experts time_us",
        read_experts,
    ),
    family("vidur operators", "gpu op num_tokens n_embd n_head time_us_median", read_vidur),
)
