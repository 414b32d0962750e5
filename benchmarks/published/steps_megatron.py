"""Step tables of Megatron-LM and Megatron-DeepSpeed: vTrain, SimuMax, papers, BigScience, CI."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pandas as pd

from forerun.benchmarks.published.model_shapes import public_shape
from forerun.benchmarks.published.step_records import (
    Record,
    Stack,
    family,
    gpt_shape,
    joined_flags,
    layout,
    llama_like,
    padded_vocab,
    step_row,
    with_torch_states,
)
from forerun.calib.arguments._torch_stacks import on_stack
from forerun.calib.errors import ConfigError
from forerun.calib.records.step_rows import StepKind, StepRow, Trait
from forerun.calib.units import GIB
from forerun.calib.workload.config import Attention, Recompute
from forerun.calib.workload.model_shape import ModelShape
from forerun.calib.workload.parallelism import ContextComm, Parallelism

_GPT2_VOCAB = 50257
_BLOOM_VOCAB = 250880
_VTRAIN_NODE = 8
_MS = 1e-3
_UNFUSED = Stack(framework="Megatron-LM", attention=Attention.UNFUSED)


def read_vtrain(record: Record) -> StepRow:
    """Read vTrain's ground truth: full recompute, 1F1B, fp16, GPT-2's vocabulary.

    Single-node times are a simulator's output: every increment is a sum of entries of the source's
    own tables.  They are identified by a ``gpus`` of at most one node, and round the vocabulary
    down to a multiple of tp, where Megatron pads it.
    """
    is_one_node = record.whole("gpus") <= _VTRAIN_NODE
    place = "one node, synthetic" if is_one_node else "cluster"
    tp = record.whole("tp")
    cut, padded = _GPT2_VOCAB // tp * tp, padded_vocab(_GPT2_VOCAB, tp)
    model = gpt_shape(record, vocab=cut if is_one_node else padded)
    is_full = record.is_true("recompute_full_in_config")
    return step_row(
        record,
        model=model,
        stack=replace(_UNFUSED, framework="Megatron-DeepSpeed"),
        device=record.text("gpu"),
        precision="fp16",
        recompute=Recompute.FULL if is_full else Recompute.NONE,
        machine=f"{record.text('gpu')} vTrain {place} fp16",
        label=f"h{model.hidden_size} L{model.num_layers}",
        measured_s=_MS * record.number("iteration_time_ms"),
        kind=StepKind.SYNTHETIC if is_one_node else StepKind.MEASURED,
    )


def read_simumax(record: Record) -> StepRow:
    """Read SimuMax's runs of Megatron-LM on a node: no overlap, distributed optimizer, cut layers.

    Settings without a column are from the launch scripts published with the source: one dense
    layer, capacity factor 1 with padding, all-to-all dispatch, ``a2a`` context parallelism, and a
    fused cross-entropy if the case ends in ``_cef``.
    """
    model = _simumax_shape(record)
    stack = Stack(
        framework="Megatron-LM",
        is_sequence_parallel=record.is_true("sequence_parallel"),
        is_optimizer_distributed=record.is_true("distributed_optimizer"),
        overlaps=record.is_true("comm_overlap"),
    )
    par = replace(layout(record, model, stack), context_comm=ContextComm.ALL_TO_ALL)
    return step_row(
        record,
        model=model,
        stack=stack,
        device=record.text("gpu"),
        precision=record.text("precision"),
        recompute=Recompute(record.text("recompute") or "none"),
        parallelism=par,
        is_loss_fused=record.text("case").endswith("cef"),
        machine=f"{record.text('gpu')} SimuMax {record.text('precision')}",
        label=f"{record.text('model')} L{model.num_layers} s{model.seq_length}",
        measured_s=_MS * record.number("real_step_time_ms"),
        memory_nbytes=GIB * record.number("real_max_alloc_gib", default=0) or None,
    )


def _simumax_shape(record: Record) -> ModelShape:
    name, ep = record.text("model"), record.whole("ep", default=1)
    seq_length, layers = record.whole("seq_len"), record.whole("layers")
    if "deepseek" not in name.lower() and "moe" not in name.lower() and ep == 1:
        return llama_like(gpt_shape(record, vocab=_simumax_vocab(record)))
    shape = public_shape(name, seq_length=seq_length, num_layers=layers, num_dense_layers=1)
    if shape.experts is None:
        raise ConfigError(f"model {name!r} has no experts, but ep is {ep}; give ep 1")
    experts = replace(shape.experts, capacity_factor=1.0, is_padded_to_capacity=True)
    return replace(shape, vocab_size=_simumax_vocab(record), experts=experts)


def _simumax_vocab(record: Record) -> int:
    return padded_vocab(record.whole("vocab"), record.whole("tp"))


def read_small_tables(record: Record) -> StepRow:
    """Read tables of papers and READMEs, one machine for each source, device and precision.

    Before 2023 attention was unfused.  Rows without a stated micro-batch or recompute are read
    with 1 and none, and flagged; ZeRO-3 in a name or a note refuses a row, and so does InternEvo,
    whose optimizer broadcasts each rank's share.
    """
    source, device, precision = (record.text(c) for c in ("source", "gpu", "precision"))
    if source == "InternEvo" or _is_zero3(record):
        raise ConfigError("ZeRO as DeepSpeed and InternEvo run it is not modelled; leave it out")
    micro = record.whole("micro_batch_size", default=0)
    flag = joined_flags(
        (micro == 0, "the micro-batch is not stated"),
        (record.is_empty("recompute"), "the recompute is not stated"),
        (_is_by_operator(record), _BY_OPERATOR),
    )
    if not record.text("step_time_s") or not record.text("global_batch_size"):
        raise ConfigError("no step time or global batch is stated; only a rate")
    model, stack = _paper_shape(record), _paper_stack(record)
    is_measured = record.text("step_time_kind").startswith("reported")
    row = step_row(
        record,
        row_id=f"{record.text('table')} {record.text('model')} {record.row_id}",
        model=model,
        stack=stack,
        parallelism=layout(record, model, stack),
        device=device,
        precision=precision,
        recompute=_recompute(record.text("recompute")),
        micro_batch_size=max(micro, 1),
        machine=f"{device} {source} {precision}",
        label=f"{record.text('model')} {_note_stack(record)}".strip(),
        measured_s=record.number("step_time_s"),
        memory_nbytes=_memory_gib(record),
        kind=StepKind.MEASURED if is_measured else StepKind.DERIVED,
        flag=flag,
    )
    if source == "torchtitan":
        row = _as_in_torchtitan(record, row)
    return with_torch_states(row) if row.config.parallelism.shards_weights else row


def _as_in_torchtitan(record: Record, row: StepRow) -> StepRow:
    """Return the row with FSDP2, the loss and the checkpoints of PyTorch."""
    is_compiled = bool(_note_stack(record))
    config = replace(
        on_stack(row.config, row.config.framework),
        is_compiled=is_compiled,
        # Every second of seven products is saved, and no activation: the nearest in time is the
        # MLP.
        recompute_modules=("mlp",) if _is_by_operator(record) else (),
    )
    traits = row.traits | ({Trait.COMPILED} if is_compiled else set())
    return replace(row, config=config, traits=traits)


_BY_OPERATOR = "recomputation by operator is not modelled"


def _is_by_operator(record: Record) -> bool:
    """Return True for torchtitan's selective activation checkpointing, which picks operators."""
    is_selective = "selective" in record.text("recompute").lower()
    return record.text("source") == "torchtitan" and is_selective


def _paper_stack(record: Record) -> Stack:
    source = record.text("source")
    is_old = _is_unfused(source)
    return Stack(
        framework=source,
        attention=Attention.UNFUSED if is_old else Attention.FUSED,
        is_sequence_parallel="sequence parallel" in record.text("recompute"),
        is_optimizer_distributed=not is_old,
        overlaps=not is_old,
    )


def _paper_shape(record: Record) -> ModelShape:
    """Return the shape from the columns if they have heads, else by the name."""
    vocab = record.whole("vocab", default=51200)
    if record.text("heads") and "llama" not in record.text("model").lower():
        return gpt_shape(record, vocab=vocab)
    return public_shape(
        record.text("model"),
        seq_length=record.whole("seq_len"),
        num_layers=record.whole("layers", default=0),
    )


def _is_unfused(source: str) -> bool:
    low = source.lower()
    years = [int(year) for year in re.findall(r"20[12]\d", low)]
    old = ("korthikanti", "sc'21", "sc21", "mt-nlg", "megatron-lm readme", "selene")
    return (bool(years) and min(years) < 2023) or (not years and any(o in low for o in old))


def _is_zero3(record: Record) -> bool:
    text = " ".join(record.text(column) for column in ("table", "model", "note"))
    return bool(re.search(r"zero[- ]?3", text.lower()))


def _note_stack(record: Record) -> str:
    note = record.text("note").lower()
    return "compiled" if "torch.compile" in note else ""


def _memory_gib(record: Record) -> float | None:
    return GIB * record.number("peak_mem_gib") if record.text("peak_mem_gib") else None


def _recompute(text: str) -> Recompute:
    low = text.lower()
    if low.startswith("none") or not low:
        return Recompute.NONE
    return Recompute.SELECTIVE if "selective" in low else Recompute.FULL


_BIGSCIENCE_SIZES = {
    "18B": (40, 6144, 32),
    "30B": (48, 7168, 32),
    "52B": (64, 8192, 32),
    "65B": (64, 9216, 32),
    "116B": (64, 12288, 32),
    "206B": (64, 16384, 32),
}
"""Layers, hidden, heads by size label: from the logs published with BigScience's notes (2021)."""


def read_bigscience(record: Record) -> StepRow:
    """Read BigScience's notes: full recompute, unfused attention; four or eight GPUs a node.

    Sizes come from columns if there are any, else from the label of the model.
    """
    device = record.text("gpu", "gpu_type") or ("V100" if "_v100" in record.row_id else "A100-80GB")
    usual = 1024 if "V100" in device else 2048
    seq_length = record.whole("seq_len", "seq_length", default=usual)
    model = _bigscience_shape(record, seq_length)
    section = record.text("section")
    if not record.text("pp"):
        raise ConfigError("pp is not stated (ZeRO or offload); give tp and pp")
    tp = record.whole("tp", default=4)
    stack = replace(_UNFUSED, ranks_per_node=4 if "V100" in device else 8)
    shaped = replace(model, vocab_size=padded_vocab(model.vocab_size, tp))
    return step_row(
        record,
        model=shaped,
        stack=stack,
        device=device,
        parallelism=_bigscience_layout(record, tp, shaped, stack),
        precision=record.text("precision", "dtype") or "fp16",
        recompute=Recompute.FULL,
        machine=f"{device} BigScience {section}",
        label=f"{section} h{model.hidden_size} L{model.num_layers}",
        measured_s=record.number("step_time_s", "sec_per_iteration", default=float("nan")),
        flag=joined_flags(
            (record.is_true("oom"), "ran out of memory"),
            ("bnb" in section.lower(), "8-bit optimizer is not modelled"),
        ),
    )


def _bigscience_layout(record: Record, tp: int, model: ModelShape, stack: Stack) -> Parallelism:
    cells = {"tp": tp, "pp": record.whole("pp", default=1), "gpus": record.whole("gpus", default=0)}
    if not cells["gpus"]:
        cells["dp"] = record.whole("dp")
    text = f"{record.text('section')} {record.text('caption')}".lower()
    is_zero1 = bool(re.search(r"zero stage 1|_z1_", text))
    return layout(record.only(cells), model, replace(stack, is_optimizer_distributed=is_zero1))


def _bigscience_shape(record: Record, seq_length: int) -> ModelShape:
    if record.text("hidden", "hidden_size", "nhidden"):
        usual = _GPT2_VOCAB if seq_length == 1024 else _BLOOM_VOCAB
        vocab = record.whole("vocab", "vocab_size", default=usual)
        return gpt_shape(record, vocab=vocab, seq_length=seq_length)
    size = record.text("size_label")
    if size not in _BIGSCIENCE_SIZES:
        raise ConfigError(f"size {size!r} has no published layers and width; give hidden, layers")
    layers, hidden, heads = _BIGSCIENCE_SIZES[size]
    cells = {"layers": layers, "hidden": hidden, "heads": heads}
    return gpt_shape(Record(cells), vocab=_GPT2_VOCAB, seq_length=seq_length)


def first_iterations(frame: pd.DataFrame) -> pd.DataFrame:
    """Return training logs as notes: the median of iterations after the first, one row per log."""
    files = frame["source_file"].astype(str)
    later = frame[frame.groupby(files).cumcount() > 0]
    medians = later.groupby(files)["step_time_ms"].median()
    heads = frame.groupby(files, sort=False).head(1).copy()
    heads["step_time_s"] = _MS * heads["source_file"].map(medians).astype(np.float64)
    heads = heads.rename(
        columns={
            "arg_num_layers": "layers",
            "arg_hidden_size": "hidden",
            "arg_num_attention_heads": "heads",
            "arg_seq_length": "seq_len",
            "arg_micro_batch_size": "micro_batch",
            "arg_tensor_model_parallel_size": "tp",
            "arg_pipeline_model_parallel_size": "pp",
            "arg_world_size": "gpus",
        }
    )
    heads["section"] = "logs"
    heads["row_id"] = heads["source_file"]
    return heads


FAMILIES = (
    family("vTrain", "recompute_full_in_config pp_schedule_in_config hidden", read_vtrain),
    family(
        "SimuMax", "case real_step_time_ms real_max_alloc_gib ep cp", read_simumax, id_column="case"
    ),
    family("tables of papers", "source table model step_time_kind step_time_s", read_small_tables),
    family("BigScience notes", "section pp step_time_s", read_bigscience),
    family(
        "BigScience logs",
        "source_file iteration step_time_ms arg_num_layers",
        read_bigscience,
        prepare=first_iterations,
    ),
)
