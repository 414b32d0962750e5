"""Convert the cells of one row of a published table to a ``StepRow``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from forerun.benchmarks.published.rows import TableFamily
from forerun.calib.arguments._torch_stacks import with_torch_states as torch_states
from forerun.calib.errors import ConfigError
from forerun.calib.importers.canonical_steps import SPLIT_COLUMNS, refuse_unread, with_split_columns
from forerun.calib.records.step_rows import SkippedRow, StepKind, StepRow, StepTable
from forerun.calib.workload.config import (
    Attention,
    Batch,
    Fp8Recipe,
    Precision,
    Recompute,
    RunConfig,
)
from forerun.calib.workload.model_shape import ModelShape, Normalization, PositionEmbedding
from forerun.calib.workload.parallelism import Parallelism

_NOT_SET = frozenset({"", "nan", "none", "<na>", "nat"})
_FALSE = frozenset({"false", "0", "0.0", "no", "off", "n"})


class Record:
    """The cells of one row; of the columns that a reader names, the first one present wins."""

    def __init__(self, cells: Mapping[str, Any], table: str = "", row_id: str = "") -> None:
        self._cells = cells
        self._requested_columns: set[str] = set()
        self.table = table
        self.row_id = row_id

    def only(self, cells: Mapping[str, Any]) -> Record:
        """Return the row with ``cells`` in place of all that do not describe its sharding."""
        split_cells = {name: cell for name, cell in self._cells.items() if name in SPLIT_COLUMNS}
        return self._with_cells({**split_cells, **cells})

    def and_also(self, cells: Mapping[str, Any]) -> Record:
        """Return the row with ``cells`` in addition to its own."""
        return self._with_cells({**self._cells, **cells})

    def _with_cells(self, cells: Mapping[str, Any]) -> Record:
        record = Record(cells, self.table, self.row_id)
        record._requested_columns = self._requested_columns
        return record

    @property
    def requested_columns(self) -> frozenset[str]:
        """Columns looked up so far, present or not."""
        return frozenset(self._requested_columns)

    def text(self, *names: str) -> str:
        """Return the cell as text, "" if missing."""
        for name in names:
            self._requested_columns.add(name)
            text = str(self._cells.get(name, "")).strip()
            if text.lower() not in _NOT_SET:
                return text
        return ""

    def texts(self) -> dict[str, str]:
        """Return every non-empty cell as text."""
        return {name: text for name in self._cells if (text := self.text(name))}

    def is_empty(self, name: str) -> bool:
        """Return True if the column exists and the cell is blank; ``none`` is not blank."""
        self._requested_columns.add(name)
        cell = self._cells.get(name, "none")
        return cell is None or str(cell).strip().lower() in _NOT_SET - {"none"}

    def number(self, *names: str, default: float | None = None) -> float:
        """Return the cell as a number; raise ``ConfigError`` if it and a default are missing."""
        text = self.text(*names)
        if not text and default is not None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ConfigError(f"{names[0]} {text!r} is no number; give one")
        return value

    def whole(self, *names: str, default: int | None = None) -> int:
        """Return the cell as a whole number; errors as in ``number``."""
        value = self.number(*names, default=default)
        if value != round(value):
            raise ConfigError(f"{names[0]} {value} is not whole; give a whole number")
        return round(value)

    def is_true(self, *names: str) -> bool:
        """Return True if the cell is true, False if it is missing."""
        text = self.text(*names).lower()
        return bool(text) and text not in _FALSE

    def unstated(self, *columns: str) -> str:
        """Return an error text with those of the columns that exist and are empty; "" if none.

        >>> Record({"tp": 4, "pp": None, "cp": None}).unstated("tp", "pp", "cp", "ep")
        'pp, cp not stated; give them'
        """
        missing = [name for name in columns if name in self._cells and not self.text(name)]
        return f"{', '.join(missing)} not stated; give them" if missing else ""

    def flag(self) -> str:
        """Return the text of columns that mark bad rows, "" if none."""
        flags = []
        for name in self._cells:
            low = str(name).lower()
            is_mark = low in ("flag", "flags") or low.endswith("_flag") or low.startswith("exclude")
            text = self.text(str(name)) if is_mark else ""
            if text and text.lower() not in _FALSE:
                flags.append(str(name) if text.lower() in ("true", "1", "1.0") else text)
        return "; ".join(flags)


def family(
    name: str,
    columns: str,
    read: Callable[[Record], StepRow],
    *,
    id_column: str = "row_id",
    prepare: Callable[[pd.DataFrame], pd.DataFrame] | None = None,
) -> TableFamily:
    """Return a family of step tables read row by row; ``ConfigError`` says why a row is skipped.

    ``id_column`` names the rows; ``prepare`` reduces a table with several rows per layout to one
    each.
    """

    def read_rows(frame: pd.DataFrame, table: str) -> StepTable:
        rows: list[StepRow] = []
        skipped: list[SkippedRow] = []
        requested: set[str] = {id_column}
        prepared = prepare(frame) if prepare else frame
        cells: Iterable[dict[Any, Any]] = prepared.to_dict("records")
        for position, values in enumerate(cells):
            named = {str(column): value for column, value in values.items()}
            row_id = Record(named).text(id_column) or f"row {position + 1}"
            record = Record(named, table, row_id)
            try:
                row = read(record)
                refuse_unread(Record(named).texts(), record.requested_columns)
                rows.append(row)
            except ConfigError as err:
                skipped.append(SkippedRow(row_id=row_id, reason=str(err)))
            requested |= record.requested_columns
        unused = tuple(name for name in map(str, prepared.columns) if name not in requested)
        return StepTable(name=table, rows=tuple(rows), skipped=tuple(skipped), unused=unused)

    return TableFamily(name=name, columns=frozenset(columns.split()), read=read_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Defaults of a family of tables for all of its runs."""

    framework: str
    attention: Attention = Attention.FUSED
    reduces_grads_in_bf16: bool = False
    keeps_fp8_params: bool = False
    """True if weights are gathered in 8 bits when products run in 8 bits."""
    is_sequence_parallel: bool = False
    is_optimizer_distributed: bool = False
    overlaps: bool = False
    """True if gradient reduction and parameter gathering overlap the passes."""
    overlaps_tp: bool = False
    """True if dense layers split their products, so that TP transfers overlap the pieces."""
    ranks_per_node: int = 8


def layout(record: Record, model: ModelShape, stack: Stack, etp: int = 0) -> Parallelism:
    """Return degrees by their usual column names; dp is ranks over the other degrees' product.

    A missing column means no such parallelism; an empty cell is refused, except for vp (none) and,
    without experts, ep.  ``etp`` is the default if the record has none.
    """
    needed = ("tp", "pp", "cp", "ep") if model.experts else ("tp", "pp", "cp")
    if missing := record.unstated(*needed):
        raise ConfigError(missing)
    tp, pp, cp, ep = (record.whole(name, default=1) for name in ("tp", "pp", "cp", "ep"))
    vp = max(1, record.whole("vp", default=1)) if pp > 1 else 1
    etp = record.whole("etp", default=etp)
    rest = tp * pp * cp
    num_ranks = record.whole("gpus", "num_gpus", "world_size", default=0)
    num_ranks = num_ranks or rest * record.whole("dp")
    if num_ranks % rest:
        raise ConfigError(f"{num_ranks} GPUs do not split over tp x pp x cp {rest}; check degrees")
    par = Parallelism(
        tp=tp,
        pp=pp,
        vp=vp,
        cp=cp,
        ep=ep,
        etp=0 if etp == tp else etp,
        dp=num_ranks // rest,
        chunk_layers=spread_layers(model.num_layers, pp * vp),
        is_sequence_parallel=stack.is_sequence_parallel and tp > 1,
        is_optimizer_distributed=stack.is_optimizer_distributed,
        overlaps_grad_reduce=stack.overlaps,
        overlaps_param_gather=stack.overlaps,
        overlaps_tp=stack.overlaps_tp and tp > 1 and model.experts is None,
        ranks_per_node=stack.ranks_per_node,
    )
    return with_split_columns(par, record.text)


def with_torch_states(row: StepRow) -> StepRow:
    """Return the row with the states of PyTorch's own FSDP."""
    return replace(row, config=torch_states(row.config))


def spread_layers(num_layers: int, num_chunks: int) -> tuple[int, ...]:
    """Return layers of each chunk, () if even; uneven chunks have fewer layers at the ends.

    Embedding and head count as a layer each if that makes chunks even, as with Megatron's
    ``--account-for-embedding-in-pipeline-split`` and its counterpart for the loss.

    >>> spread_layers(126, 32)[:2], spread_layers(126, 32)[-1], spread_layers(61, 4)
    ((3, 4), 3, (15, 16, 16, 14))
    """
    if num_layers % num_chunks == 0:
        return ()
    if num_layers + 2 < num_chunks:
        raise ConfigError(f"{num_layers} layers do not fill {num_chunks} chunks; lower pp or vp")
    each, rest = divmod(num_layers + 2, num_chunks)
    sizes = [each + (chunk < rest) for chunk in range(num_chunks)]
    sizes[0] -= 1
    sizes[-1] -= 1
    return tuple(sizes)


def padded_vocab(vocab: int, tp: int, multiple: int = 128) -> int:
    """Return rows of the embedding as Megatron pads them for a layout."""
    return -(-vocab // (multiple * tp)) * multiple * tp


def gpt_shape(record: Record, *, vocab: int, seq_length: int = 0) -> ModelShape:
    """Return a GPT of given sizes: biases, LayerNorm, learned positions, tied, 4 x hidden GELU."""
    hidden = record.whole("hidden", "hidden_size", "nhidden", "d_model", "arg_hidden_size")
    heads = record.whole("heads", "num_attention_heads", "nheads", "n_heads")
    return ModelShape(
        num_layers=record.whole(
            "layers", "num_layers", "nlayers", "n_layers", "layers_derived_from_reported_tflops"
        ),
        hidden_size=hidden,
        ffn_hidden_size=record.whole("ffn", "ffn_hidden_size", default=4 * hidden),
        num_attention_heads=heads,
        num_query_groups=record.whole("kv_heads", "num_query_groups", default=heads),
        kv_channels=record.whole("kv_channels", default=hidden // heads),
        seq_length=seq_length or record.whole("seq_len", "seq_length", "seqlen"),
        vocab_size=vocab,
    )


def llama_like(shape: ModelShape) -> ModelShape:
    """Return the same sizes without biases: gated, RMSNorm, rotary positions, untied output."""
    return replace(
        shape,
        is_gated=True,
        has_bias=False,
        is_tied=False,
        normalization=Normalization.RMS_NORM,
        position_embedding=PositionEmbedding.ROPE,
    )


def step_row(
    record: Record,
    *,
    row_id: str = "",
    model: ModelShape,
    stack: Stack,
    device: str,
    machine: str,
    label: str,
    measured_s: float,
    precision: str = "bf16",
    recompute: Recompute = Recompute.NONE,
    parallelism: Parallelism | None = None,
    micro_batch_size: int = 0,
    is_loss_fused: bool = False,
    unmodelled: tuple[str, ...] = (),
    kind: StepKind = StepKind.MEASURED,
    memory_nbytes: float | None = None,
    flag: str = "",
) -> StepRow:
    """Return the row of a layout; raise ``ConfigError`` if Megatron would not run it.

    ``label`` is the model in the name of its ranking group.  Degrees, batch and ``row_id`` default
    to the record's.  Rows without a time get a flag, as do those marked by a column.
    """
    par = parallelism or layout(record, model, stack)
    width, fp8 = precision_of(precision)
    batch = Batch(
        micro_batch_size=micro_batch_size or record.whole("micro_batch_size", "micro_batch", "mbs"),
        global_batch_size=record.whole("global_batch_size", "global_batch", "gbs"),
    )
    config = RunConfig(
        model=replace(model, vocab_size=_split(model.vocab_size, par.tp)),
        parallelism=par,
        batch=batch,
        precision=width,
        fp8=fp8,
        attention=stack.attention,
        recompute=recompute,
        is_loss_fused=is_loss_fused,
        keeps_fp32_logits=not is_loss_fused,
        # In fp16 Megatron reduces gradients in their own precision; in bf16 it accumulates them in
        # fp32.
        reduces_grads_in_bf16=width is Precision.FP16 or stack.reduces_grads_in_bf16,
        keeps_fp8_params=stack.keeps_fp8_params and fp8 is not Fp8Recipe.NONE,
        device=device,
        framework=stack.framework.strip(),
        unmodelled=unmodelled,
    )
    flags = (flag, record.flag(), "" if 0 < measured_s < math.inf else "no step time")
    return StepRow(
        table=record.table,
        row_id=row_id or record.row_id,
        config=config,
        measured_s=measured_s,
        measured_memory_nbytes=memory_nbytes,
        machine=machine,
        group=f"{label.strip()} x{par.num_ranks} batch {batch.global_batch_size}",
        kind=kind,
        flag="; ".join(text for text in flags if text),
    )


def joined_flags(*flags: tuple[bool, str]) -> str:
    """Return the texts whose condition holds, as one flag.

    >>> joined_flags((True, "copied"), (False, "wrong"), (True, "rounded"))
    'copied; rounded'
    """
    return "; ".join(text for is_set, text in flags if is_set)


def precision_of(text: str) -> tuple[Precision, Fp8Recipe]:
    """Return the arithmetic of a published name.

    >>> [p.value for p in precision_of("FP8-MX")]
    ['bf16', 'mxfp8']
    """
    low = text.lower()
    for part, recipe in _FP8.items():
        if part in low:
            return Precision.BF16, recipe
    if "fp32" in low or "tf32" in low:
        return Precision.FP32, Fp8Recipe.NONE
    if "bf16" in low or not low:
        return Precision.BF16, Fp8Recipe.NONE
    if "fp16" in low or "half" in low:
        return Precision.FP16, Fp8Recipe.NONE
    raise ConfigError(f"precision {text!r} is not known; give fp32, fp16, bf16 or fp8")


_FP8 = {
    "nvfp4": Fp8Recipe.NVFP4,
    "fp4": Fp8Recipe.NVFP4,
    "mxfp8": Fp8Recipe.MXFP8,
    "fp8-mx": Fp8Recipe.MXFP8,
    "fp8_mx": Fp8Recipe.MXFP8,
    "fp8-sc": Fp8Recipe.BLOCKWISE,
    "fp8-cs": Fp8Recipe.TENSORWISE,
    "fp8_cs": Fp8Recipe.TENSORWISE,
    "fp8": Fp8Recipe.DELAYED,
    "float8": Fp8Recipe.TENSORWISE,
}


def _split(vocab: int, tp: int) -> int:
    """Return the vocabulary as given if tp divides it, else padded as Megatron would."""
    return vocab if vocab % tp == 0 else padded_vocab(vocab, tp)
