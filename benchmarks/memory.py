"""Predicted against measured peak memory, and how fast layouts are evaluated.

    python benchmarks/memory.py DATA_FOLDER [--repetitions 5]

Tables: ``e2e_simumax_b200_8gpu`` (peak of the allocator) and ``e2e_sailor`` (fp32
Megatron-DeepSpeed, unfused; its values are whole MiB of the device in use, so that context and
communicators count).  Nothing is fitted, but the last figure of a table takes an offset from the
first row, as a calibrated run does.  Shapes
that a table has no columns for are those of the published models.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from forerun.benchmarks.markdown_text import markdown_head, markdown_row
from forerun.calib.errors import ConfigError
from forerun.calib.memory.layout_table import peaks_nbytes
from forerun.calib.memory.peak import memory
from forerun.calib.units import GIB
from forerun.calib.workload.config import (
    Attention,
    Batch,
    ContextComm,
    Dispatcher,
    Experts,
    LatentAttention,
    ModelShape,
    Normalization,
    Parallelism,
    PositionEmbedding,
    Precision,
    Recompute,
    RunConfig,
)

HEADER = ["layout", "predicted GiB", "measured GiB", "error %"]
DEEPSEEK = {
    "deepseekv2": {"num_experts": 160, "top_k": 6, "ffn_hidden_size": 1536, "shared": 3072},
    "deepseekv3": {"num_experts": 256, "top_k": 8, "ffn_hidden_size": 2048, "shared": 2048},
}
"""DeepSeek-AI 2024 (V2, section 3.1.2; V3, section 4.2)."""
LATENT = LatentAttention(
    q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Score peak memory against measured peaks.")
    parser.add_argument("data", type=Path)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    score(
        arguments.data / "e2e_simumax_b200_8gpu.csv.gz",
        "real_max_alloc_gib",
        simumax,
        GIB,
        "allocated_nbytes",
    )
    score(arguments.data / "e2e_sailor.csv.gz", "max_mem_bytes", sailor, 1, "total_nbytes")
    speed(arguments.repetitions)


def score(
    path: Path, column: str, read: Callable[[pd.Series], RunConfig], unit: int, kind: str
) -> None:
    """Print one row for each measured peak, and the mean and worst error."""
    table = pd.read_csv(path)
    pairs = []
    print(f"\n{path.name}\n\n{markdown_head(HEADER)}")
    for _, row in table[table[column].notna()].iterrows():
        config = read(row)
        par, measured = config.parallelism, row[column] * unit
        predicted = getattr(memory(config), kind)
        pairs.append((predicted, measured))
        name = f"{row['model']} TP{par.tp} PP{par.pp} CP{par.cp} EP{par.ep} DP{par.dp} "
        name += f"mbs{config.batch.micro_batch_size} m{config.num_microbatches}"
        error = 100 * (predicted / measured - 1)
        cells = (f"{predicted / GIB:.2f}", f"{measured / GIB:.2f}", f"{error:+.2f}")
        print(markdown_row([name, *cells]))
    predicted, measured = np.array(pairs).T
    print_errors("no row", predicted / measured - 1)
    offset = measured[0] - predicted[0]
    print_errors("offset of the first row", (predicted + offset)[1:] / measured[1:] - 1)


def print_errors(name: str, errors: NDArray[np.float64]) -> None:
    """Print one line of errors."""
    absolute = 100 * np.abs(errors)
    print(
        f"\n{name}: {len(errors)} rows, mean error {absolute.mean():.2f} %, worst "
        f"{absolute.max():.2f} %, signed {100 * np.mean(errors):+.2f} %"
    )


def simumax(row: pd.Series) -> RunConfig:
    """Megatron-Core with Transformer Engine; the settings are those of the source's scripts."""
    family = next((name for name in DEEPSEEK if name in str(row["model"]).replace("-", "")), None)
    family = family or next((name for name in DEEPSEEK if name in str(row["case"])), None)
    tp, layers = int(row["tp"]), int(row["layers"])
    return RunConfig(
        model=ModelShape(
            num_layers=layers,
            hidden_size=int(row["hidden"]),
            ffn_hidden_size=int(row["ffn"]),
            num_attention_heads=int(row["heads"]),
            num_query_groups=int(row["heads"] if family else row["kv_heads"]),
            kv_channels=128,
            seq_length=int(row["seq_len"]),
            vocab_size=_padded(int(row["vocab"]), tp),
            is_gated=True,
            has_bias=False,
            is_tied=False,
            normalization=Normalization.RMS_NORM,
            position_embedding=PositionEmbedding.ROPE,
            experts=_experts(family, layers) if family else None,
            latent_attention=LATENT if family else None,
        ),
        parallelism=Parallelism(
            tp=tp,
            pp=int(row["pp"]),
            vp=int(row["vp"]),
            dp=int(row["dp"]),
            cp=int(row["cp"]),
            ep=int(row["ep"]),
            context_comm=ContextComm.ALL_TO_ALL,
            is_sequence_parallel=bool(row["sequence_parallel"]) and tp > 1,
            is_optimizer_distributed=bool(row["distributed_optimizer"]),
        ),
        batch=Batch(
            micro_batch_size=int(row["micro_batch_size"]),
            global_batch_size=int(row["global_batch_size"]),
        ),
        precision=Precision.BF16,
        is_loss_fused="cef" in str(row["case"]),
        keeps_fp32_logits="cef" not in str(row["case"]),
        device=str(row["gpu"]),
    )


def sailor(row: pd.Series) -> RunConfig:
    """Pieces per stage count embedding and head; OPT has no dropout in attention (its config)."""
    tp, pieces = int(row["tp"]), [int(n) for n in str(row["layers_per_stage"]).split("|")]
    pieces[0] -= 1
    pieces[-1] -= 1
    return RunConfig(
        model=ModelShape(
            num_layers=int(row["layers"]),
            hidden_size=int(row["hidden"]),
            ffn_hidden_size=4 * int(row["hidden"]),
            num_attention_heads=int(row["heads"]),
            num_query_groups=int(row["heads"]),
            kv_channels=int(row["hidden"]) // int(row["heads"]),
            seq_length=int(row["seq_len"]),
            vocab_size=_padded(int(row["vocab"]), tp),
        ),
        parallelism=Parallelism(
            tp=tp, pp=int(row["pp"]), dp=int(row["dp"]), chunk_layers=tuple(pieces)
        ),
        batch=Batch(
            micro_batch_size=int(row["micro_batch_size"]),
            global_batch_size=int(row["global_batch_size"]),
        ),
        precision=Precision.FP32,
        hidden_dropout=0.1,
        attention=Attention.UNFUSED,
        fuses_gradient_accumulation=False,
        device=str(row["gpus_types"]),
    )


def speed(repetitions: int) -> None:
    """Print layouts per second of ``peaks_nbytes`` on one model, all that split 1,024 ranks."""
    large = simumax(pd.Series(_LARGE))
    par = replace(large.parallelism, context_comm=ContextComm.P2P)
    base = replace(large, parallelism=par)
    layouts = [c for row in product(*_DEGREES) if (c := _layout(base, *row)) is not None]
    times = []
    for _ in range(repetitions):
        begin = time.process_time()
        peaks_nbytes(layouts)
        times.append(time.process_time() - begin)
    num = len(layouts)
    print(
        f"\npeaks_nbytes: {num} distinct layouts, {num / np.median(times):,.0f}/s; "
        f"first call {times[0]:.3f} s, others {np.median(times):.3f} s"
    )


_DEGREES = ((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 5), (1, 2, 4, 8), (1, 2, 4, 8), Recompute)
_LARGE = {
    "case": "cef",
    "model": "llama3-70b",
    "layers": 80,
    "hidden": 8192,
    "ffn": 28672,
    "heads": 64,
    "kv_heads": 8,
    "vocab": 128256,
    "seq_len": 8192,
    "gpu": "H100",
    "micro_batch_size": 1,
    "global_batch_size": 2048,
    "sequence_parallel": True,
    "distributed_optimizer": True,
    **dict.fromkeys(("tp", "pp", "vp", "dp", "cp", "ep"), 1),
}


def _layout(
    base: RunConfig, tp: int, pp: int, vp: int, cp: int, micro: int, recompute: Recompute
) -> RunConfig | None:
    """None where it cannot run."""
    degrees = {"tp": tp, "pp": pp, "vp": vp, "cp": cp, "dp": 1024 // (tp * pp * cp)}
    try:
        par = replace(base.parallelism, **degrees, is_sequence_parallel=tp > 1)
        batch = Batch(micro_batch_size=micro, global_batch_size=2048)
        return replace(base, parallelism=par, batch=batch, recompute=recompute)
    except ConfigError:
        return None


def _experts(family: str, layers: int) -> Experts:
    """The first layer is dense; each expert takes its capacity, padded."""
    shape = DEEPSEEK[family]
    return Experts(
        num_experts=shape["num_experts"],
        top_k=shape["top_k"],
        ffn_hidden_size=shape["ffn_hidden_size"],
        shared_ffn_hidden_size=shape["shared"],
        layer_pattern=(False,) + (True,) * (layers - 1),
        dispatcher=Dispatcher.ALL_TO_ALL,
        capacity_factor=1.0,
        is_padded_to_capacity=True,
        is_grouped=True,
    )


def _padded(vocab_size: int, tp: int) -> int:
    """Rows that Megatron rounds up to a multiple of 128 x tp."""
    unit = 128 * tp
    return -(-vocab_size // unit) * unit


if __name__ == "__main__":
    main()
