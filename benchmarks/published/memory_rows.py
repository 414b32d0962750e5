"""Memory data of published runs: peaks, out-of-memory runs, and successful runs.

A timed step implies that the layout fitted.  Uninformative rows are returned with the reason:
devices of unknown memory, or layouts whose recomputation (or another setting that decides memory)
is not stated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd

from forerun.benchmarks.published.readers import read_steps
from forerun.benchmarks.published.step_records import precision_of
from forerun.calib.arguments.megatron_namespace import from_namespace
from forerun.calib.errors import ConfigError
from forerun.calib.memory.peak import MemoryEstimate
from forerun.calib.records.step_rows import StepRow
from forerun.calib.units import GIB
from forerun.calib.workload.config import RunConfig
from forerun.launch.known.table_files import read_frame

CAPACITIES_GIB: Mapping[str, float] = {
    r"V100": 31.7,
    r"a100_40gb|A100-40GB": 39.4,
    r"A100.*80|a100_80gb": 79.2,
    r"H100-96GB": 94.5,
    r"H100": 79.1,
    r"H200": 139.8,
    r"GH-?96|GH200": 94.5,
    r"GB200": 184.0,
    r"GB300": 277.0,
    r"B300": 268.0,
    r"B200": 178.4,
}
"""GiB that the driver reports for each device (``nvidia-smi``), by its published name."""
STEP_TABLES = (
    *("e2e_simumax_b200_8gpu", "e2e_sailor", "e2e_small_tables", "e2e_llmfoundry_mpt_fsdp"),
    *("e2e_bigscience_v100", "e2e_bigscience_v100_log_iterations", "e2e_nanotron_llama1b"),
    *("e2e_vtrain_multi_node", "e2e_mcore_ci_golden"),
)
_UNTOLD = re.compile("not stated|not modelled|fine-tuning|LoRA|copied")


class Peak(Enum):
    """Kind of a published peak, by the corresponding field of ``MemoryEstimate``."""

    ALLOCATED = "allocated_nbytes"
    RESERVED = "reserved_nbytes"
    DEVICE = "device_nbytes"


PEAKS: Mapping[str, Peak] = {"e2e_sailor": Peak.DEVICE, "e2e_small_tables": Peak.RESERVED}
"""Kind of peak in tables that do not publish allocated bytes: Sailor has whole MiB of the device,
and torchtitan logs ``reserved_bytes.all.peak``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One layout and its known memory."""

    table: str
    name: str
    config: RunConfig
    capacity_nbytes: float
    ran: bool
    peak_nbytes: float | None = None
    """Published peak; None if not published, and for a run that went out of memory before its
    peak."""
    peak: Peak = Peak.ALLOCATED

    def error_frac(self, estimate: MemoryEstimate) -> float:
        """Return the error of an estimate against the published peak; NaN if there is none."""
        return getattr(estimate, self.peak.value) / (self.peak_nbytes or math.nan) - 1


def capacity_nbytes(device: str) -> float | None:
    """Return the memory of a device by its published name; None if not identifiable."""
    for pattern, gib in CAPACITIES_GIB.items():
        if re.search(pattern, device, re.IGNORECASE):
            return gib * GIB
    return None


def memory_rows(data: Path) -> tuple[list[MemoryRow], dict[str, int]]:
    """Return every informative row, and the number of others by table and reason; tables missing in
    the folder are skipped."""
    rows: list[MemoryRow] = []
    skip_counts: dict[str, int] = {}
    for table in STEP_TABLES:
        path = data / f"{table}.csv.gz"
        if not path.exists():
            continue
        step_table = read_steps(read_frame(path), table)
        _count(skip_counts, f"{table}: no layout", len(step_table.skipped))
        for row in step_table.rows:
            one = _of_step(table, row)
            if isinstance(one, str):
                _count(skip_counts, f"{table}: {one}", 1)
            else:
                rows.append(one)
    cards = data / "e2e_bridge_cards.csv.gz"
    for cells in read_frame(cards).to_dict("records") if cards.exists() else ():
        card = {str(name): value for name, value in cells.items() if not pd.isna(value)}
        try:
            rows.append(_of_card(card))
        except ConfigError as err:
            _count(skip_counts, f"e2e_bridge_cards: {re.sub(r'[0-9]+', 'N', str(err))}", 1)
    return rows, skip_counts


def _count(skip_counts: dict[str, int], reason: str, number: int) -> None:
    if number:
        skip_counts[reason] = skip_counts.get(reason, 0) + number


def _of_step(table: str, row: StepRow) -> MemoryRow | str:
    """Return a row, which fitted if it was timed, or why it is uninformative on memory."""
    capacity = capacity_nbytes(row.config.device)
    if capacity is None:
        return f"memory of {row.config.device} is not told by its name"
    flag = row.flag.replace("recomputation by operator is not modelled", "")
    if "ran out" not in flag and (match := _UNTOLD.search(flag)):
        return flag.partition(";")[0] or match.group()
    if "ran out" not in flag and not row.measured_s > 0 and not row.measured_memory_nbytes:
        return "neither time nor peak"
    return MemoryRow(
        table=table,
        name=f"{row.group} {row.row_id}",
        config=_as_it_trains(table, row.config),
        capacity_nbytes=capacity,
        ran="ran out" not in flag,
        peak_nbytes=row.measured_memory_nbytes,
        peak=PEAKS.get(table, Peak.ALLOCATED),
    )


def _as_it_trains(table: str, config: RunConfig) -> RunConfig:
    """Add the dropout of Sailor's host after blocks (OPT has none in attention, by its config)."""
    if table != "e2e_sailor":
        return config
    return replace(config, hidden_dropout=0.1, fuses_gradient_accumulation=False)


_SHAPE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "vocab_size", "mtp_num_layers", "q_lora_rank", "kv_lora_rank"),
    *("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "moe_router_topk"),
    *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "recompute_num_layers"),
)
_SAME = (
    *("recompute_method", "use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype"),
    *("main_grads_dtype", "sequence_parallel", "cross_entropy_loss_fusion"),
    *("moe_token_dispatcher_type", "cross_entropy_fusion_impl"),
    "moe_expert_rank_capacity_factor",
)


def _of_card(card: Mapping[str, Any]) -> MemoryRow:
    """Read a verification card: columns are Megatron's arguments, blanks NVIDIA's recipes."""
    if "Nemotron" in str(card["model"]):
        raise ConfigError("Mamba layers are not modelled")
    if "lora_dim" in card:
        raise ConfigError("LoRA is not modelled")
    if missing := [n for n in ("micro_batch", "seq_len", "tp", "num_layers") if n not in card]:
        raise ConfigError(f"{', '.join(missing)} not stated")
    if "recompute_granularity" not in card and "peak_memory_gb" not in card:
        raise ConfigError("the recompute is not stated")
    device = str(card["system"]).removeprefix("DGX-")
    capacity = capacity_nbytes(device)
    assert capacity is not None
    peak = card.get("peak_memory_gb") if "oom" not in card else None
    return MemoryRow(
        table="e2e_bridge_cards",
        name=f"{card['model']} {card['row_id']} {card.get('recompute_modules', '')}",
        config=_card_config(card, device),
        capacity_nbytes=capacity,
        ran="oom" not in card,
        peak_nbytes=float(peak) * GIB if peak is not None else None,
    )


def _card_config(card: Mapping[str, Any], device: str) -> RunConfig:
    values: dict[str, Any] = {name: int(card[name]) for name in _SHAPE if name in card}
    values |= {name: card[name] for name in _SAME if name in card}
    tp = int(card["tp"])
    values |= {
        "seq_length": int(card["seq_len"]),
        "max_position_embeddings": int(card["seq_len"]),
        "micro_batch_size": int(card["micro_batch"]),
        "global_batch_size": int(card["global_batch"]),
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": int(card["pp"]),
        "context_parallel_size": int(card.get("cp", 1)),
        "expert_model_parallel_size": int(card.get("ep", 1)),
        "expert_tensor_parallel_size": int(card.get("etp", 1)) if "num_experts" in card else None,
        "world_size": int(card["gpus"]),
        "ranks_per_node": int(card.get("gpus_per_node", 8)),
        "bf16": True,
        "swiglu": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "sequence_parallel": tp > 1,
        "use_distributed_optimizer": card.get("use_distributed_optimizer", True),
        "grad_reduce_in_bf16": not card.get("grad_reduce_in_fp32", False),
        "group_query_attention": "num_query_groups" in card,
        "multi_latent_attention": "kv_lora_rank" in card,
        "recompute_granularity": _granularity(card),
        "moe_paged_stash": "paged stash" in str(card.get("doubt", "")),
    }
    modules = str(card.get("recompute_modules", "")).strip("[]")
    if modules and values["recompute_granularity"] == "selective":
        values["recompute_modules"] = modules.split(",")
    if "vp" in card:
        values["num_virtual_stages_per_pipeline_rank"] = int(card["vp"])
    if "num_experts" in card:
        dense = int(card.get("first_dense_layers", 0))
        values |= {
            "num_experts": int(card["num_experts"]),
            "moe_layer_freq": f"[0]*{dense}+[1]*{values['num_layers'] - dense}",
            "moe_grouped_gemm": True,
        }
    config = from_namespace(SimpleNamespace(**values))
    _, fp8 = precision_of(str(card["precision"]))
    return replace(
        config, fp8=fp8, keeps_fp8_params=bool(card.get("fp8_param_gather")), device=device
    )


def _granularity(card: Mapping[str, Any]) -> str | None:
    """Return the granularity; ``selective`` with an empty list recomputes nothing."""
    stated = str(card.get("recompute_granularity", "none"))
    if stated == "selective" and card.get("recompute_modules") == "[]":
        return None
    return None if stated == "none" else stated


def by_table(rows: Sequence[MemoryRow]) -> Iterator[tuple[str, list[MemoryRow]]]:
    """Yield the rows of each table, in order."""
    for table in dict.fromkeys(row.table for row in rows):
        yield table, [row for row in rows if row.table == table]
