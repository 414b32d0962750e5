"""Readers of the tables of inference simulators: aiconfigurator and vidur, forward only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from ..importers.columns import MICROSECOND_S, element_nbytes, flags, joined, numbers, texts
from ..importers.own_format import TableFamily, canonical_operators, operator_rows
from ..workload.operators import OperatorKind, Phase


def read_gemm(frame: pd.DataFrame) -> pd.DataFrame:
    """Products of aiconfigurator; collectors differ by 10 % and are groups of their own."""
    dtype = texts(frame, "dtype").replace({"bfloat16": "", "float16": "", "bf16": "", "fp16": ""})
    name = joined(frame.assign(_name="gemm", _dtype=dtype), ["_name", "_dtype"])
    return operator_rows(
        frame,
        kind=OperatorKind.LINEAR,
        phase=Phase.FORWARD,
        group=name + " (" + texts(frame, "collector") + ")",
        device=texts(frame, "system"),
        sizes=(numbers(frame, "m"), numbers(frame, "k"), numbers(frame, "n")),
        element_nbytes=element_nbytes(frame),
        time_s=numbers(frame, "time_us") * MICROSECOND_S,
        flag=flags(frame),
    )


def read_prefill_attention(frame: pd.DataFrame) -> pd.DataFrame:
    """Causal attention over a whole prompt by aiconfigurator, keys and values of one width."""
    channels = numbers(frame, "head_dim")
    return operator_rows(
        frame,
        kind=OperatorKind.FLASH_ATTENTION,
        phase=Phase.FORWARD,
        group="prefill attention (" + texts(frame, "collector") + ")",
        device=texts(frame, "system"),
        sizes=(
            numbers(frame, "batch"),
            numbers(frame, "q_heads"),
            numbers(frame, "kv_heads"),
            numbers(frame, "seq_len"),
            channels,
            channels,
        ),
        element_nbytes=element_nbytes(frame, "attn_dtype"),
        time_s=numbers(frame, "time_us") * MICROSECOND_S,
        flag=flags(frame),
    )


def read_experts(frame: pd.DataFrame) -> pd.DataFrame:
    """Fused experts by aiconfigurator, the part of one rank under tensor and expert parallelism.

    How tokens spread over the experts changes the time: each distribution, kernel and collector is
    a group.
    """
    tp = numbers(frame, "moe_tp_size").fillna(1)
    ep = numbers(frame, "moe_ep_size").fillna(1)
    experts = numbers(frame, "num_experts")
    which = joined(frame, ["kernel_source", "distribution", "collector"])
    return operator_rows(
        frame,
        kind=OperatorKind.EXPERTS,
        phase=Phase.FORWARD,
        group="experts (" + which + ")",
        device=texts(frame, "system"),
        sizes=(
            numbers(frame, "num_tokens"),
            numbers(frame, "hidden_size"),
            numbers(frame, "inter_size") / tp,
            numbers(frame, "topk"),
            experts / ep,
            experts,
        ),
        element_nbytes=element_nbytes(frame, "moe_dtype"),
        time_s=numbers(frame, "time_us") * MICROSECOND_S,
        flag=flags(frame),
        tp=tp,
    )


_VIDUR: dict[str, tuple[OperatorKind, Callable[[pd.DataFrame], Sequence[pd.Series]]]] = {
    "attn_pre_proj": (
        OperatorKind.LINEAR_QKV,
        lambda t: (t["m"], t["k"].fillna(t["d"]), t["n"].fillna(t["qkv"])),
    ),
    "attn_post_proj": (
        OperatorKind.LINEAR_PROJ,
        lambda t: (t["m"], t["k"].fillna(t["d"] / t["tp"]), t["n"].fillna(t["d"])),
    ),
    "mlp_up_proj": (
        OperatorKind.LINEAR_FC1,
        lambda t: (t["m"], t["k"].fillna(t["d"]), t["n"].fillna(t["up"])),
    ),
    "mlp_down_proj": (
        OperatorKind.LINEAR_FC2,
        lambda t: (t["m"], t["k"].fillna(t["ffn"] / t["tp"]), t["n"].fillna(t["d"])),
    ),
    "mlp_act": (OperatorKind.ACTIVATION, lambda t: (t["tokens"], t["up"], t["ffn"] / t["tp"])),
    "attn_rope": (OperatorKind.POSITION, lambda t: (t["tokens"], t["qkv"])),
    "input_layernorm": (OperatorKind.NORM, lambda t: (t["tokens"], t["d"])),
    "post_attention_layernorm": (OperatorKind.NORM, lambda t: (t["tokens"], t["d"])),
    "add": (OperatorKind.ELEMENTWISE, lambda t: (t["tokens"], t["d"])),
    "emb": (OperatorKind.ELEMENTWISE, lambda t: (t["tokens"], t["d"])),
}


def read_vidur(frame: pd.DataFrame) -> pd.DataFrame:
    """Layers of language models by vidur, median time; all models of a GPU are one group.

    The table has no vocabulary, so that the embedding counts as the gather of its rows that it is
    when nothing is learned.  The activation's input is what the same model's ``mlp_up_proj`` gives
    (twice the output where it is gated; taken as gated where the table lacks that operator).
    """
    op, terms = texts(frame, "op"), _vidur_terms(frame)
    parts = []
    for name, (kind, sizes) in _VIDUR.items():
        rows = frame[op == name]
        if rows.empty:
            continue
        parts.append(
            operator_rows(
                rows,
                kind=kind,
                phase=Phase.FORWARD,
                group=name,
                device=texts(rows, "gpu"),
                sizes=sizes(terms.loc[rows.index]),
                element_nbytes=element_nbytes(rows),
                time_s=numbers(rows, "time_us_median") * MICROSECOND_S,
                flag=flags(rows),
                tp=numbers(rows, "tp"),
            )
        )
    return canonical_operators(parts)


def _vidur_terms(frame: pd.DataFrame) -> pd.DataFrame:
    op, tp = texts(frame, "op"), numbers(frame, "tp").fillna(1)
    ffn, hidden = numbers(frame, "n_expanded_embd"), numbers(frame, "n_embd")
    heads, kv_heads = numbers(frame, "n_head"), numbers(frame, "n_kv_head")
    columns = numbers(frame, "gemm_n")
    ratio = (columns * tp / ffn).where(op == "mlp_up_proj")
    gated = ratio.groupby(texts(frame, "model")).transform("median").fillna(2)
    return pd.DataFrame(
        {
            "tokens": numbers(frame, "num_tokens"),
            "tp": tp,
            "d": hidden,
            "ffn": ffn,
            "up": (ffn * gated / tp).round(),
            "qkv": (heads + 2 * kv_heads.fillna(heads)) / tp * (hidden / heads),
            "m": numbers(frame, "gemm_m").fillna(numbers(frame, "num_tokens")),
            "k": numbers(frame, "gemm_k"),
            "n": columns,
        }
    )


FAMILIES = (
    TableFamily(
        name="aiconfigurator GEMM",
        columns=frozenset({"system", "collector", "dtype", "m", "n", "k", "time_us"}),
        read=read_gemm,
    ),
    TableFamily(
        name="aiconfigurator attention",
        columns=frozenset(
            {"system", "collector", "batch", "seq_len", "q_heads", "kv_heads", "head_dim"}
        ),
        read=read_prefill_attention,
    ),
    TableFamily(
        name="aiconfigurator experts",
        columns=frozenset(
            {"system", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "time_us"}
        ),
        read=read_experts,
    ),
    TableFamily(
        name="vidur operators",
        columns=frozenset({"gpu", "op", "num_tokens", "n_embd", "n_head", "time_us_median"}),
        read=read_vidur,
    ),
)
