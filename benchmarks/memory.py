"""Predicted against measured peak memory, and how fast layouts are evaluated.

    python benchmarks/memory.py DATA_FOLDER [--repetitions 5]

Tables: ``e2e_simumax_b200_8gpu`` (peak of the allocator) and ``e2e_sailor`` (fp32
Megatron-DeepSpeed, unfused; its values are whole MiB of the device in use, so that context and
communicators count).  Nothing is fitted, but the last figure of a table takes an offset from the
first row, as a calibrated run does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forerun.benchmarks.markdown_text import markdown_head, markdown_row
from forerun.benchmarks.published.model_shapes import public_shape
from forerun.benchmarks.published.readers import read_steps
from forerun.calib.errors import ConfigError
from forerun.calib.memory.layout_table import peaks_nbytes
from forerun.calib.memory.peak import memory
from forerun.calib.units import GIB
from forerun.calib.workload.config import Batch, Parallelism, Recompute, RunConfig
from forerun.launch.known.table_files import read_frame

HEADER = ["layout", "predicted GiB", "measured GiB", "error %"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Score peak memory against measured peaks.")
    parser.add_argument("data", type=Path)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    score(arguments.data / "e2e_simumax_b200_8gpu.csv.gz", "allocated_nbytes")
    score(arguments.data / "e2e_sailor.csv.gz", "total_nbytes", without_fusions)
    speed(arguments.repetitions)


def score(
    path: Path, kind: str, change: Callable[[RunConfig], RunConfig] = lambda config: config
) -> None:
    """Print one row for each measured peak, and the mean and worst error."""
    pairs = []
    print(f"\n{path.name}\n\n{markdown_head(HEADER)}")
    for row in read_steps(read_frame(path), path.name).rows:
        config, measured = change(row.config), row.measured_memory_nbytes
        if not measured:
            continue
        par, predicted = config.parallelism, getattr(memory(config), kind)
        pairs.append((predicted, measured))
        name = f"{row.group.rpartition(' x')[0]} TP{par.tp} PP{par.pp} CP{par.cp} EP{par.ep} "
        name += f"DP{par.dp} "
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


def without_fusions(config: RunConfig) -> RunConfig:
    """As Sailor's host trains: dropout behind blocks (OPT has none in attention, by its config)."""
    return replace(config, hidden_dropout=0.1, fuses_gradient_accumulation=False)


def speed(repetitions: int) -> None:
    """Print layouts per second of ``peaks_nbytes`` on one model, all that split 1,024 ranks."""
    base = RunConfig(
        model=public_shape("Llama 3 70B", seq_length=8192),
        parallelism=Parallelism(is_optimizer_distributed=True),
        batch=Batch(micro_batch_size=1, global_batch_size=2048),
        is_loss_fused=True,
        keeps_fp32_logits=False,
        device="H100",
    )
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


if __name__ == "__main__":
    main()
