"""Cost of fits and estimates on one core, in seconds of processor time, on planted samples.

    python benchmarks/speed.py [--repetitions 5]

A refit from the sample table (400 windows of 25 operators: 10,000 rows), a fit of 10,000 distinct
shapes, 100,000 estimates with intervals after either, and the same for transfers.  Each row is the
median and minimum of the repetitions.  The last column is the median over that of a product of two
2,048 x 2,048 fp64 matrices in the same run: the figure to compare between machines.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from forerun.benchmarks.markdown_text import markdown_head, markdown_row
from forerun.benchmarks.published.model_shapes import public_shape
from forerun.calib.fit.batches import ShapeBatch, Timed
from forerun.calib.fit.calibration import Calibration, calibrate
from forerun.calib.fit.laws import columns
from forerun.calib.fit.machine import fit_machine
from forerun.calib.network.collective_times import fit_transfers
from forerun.calib.network.curves import Samples
from forerun.calib.network.groups import Group
from forerun.calib.network.systems import network_prior
from forerun.calib.samples.columns import FRAMES, normalise, shape_text
from forerun.calib.samples.table import SampleTable
from forerun.calib.search.cells import cells_of
from forerun.calib.steps.known_steps import KnownStep
from forerun.calib.steps.live import live_times
from forerun.calib.steps.model import fit_steps
from forerun.calib.workload.collectives import Collective
from forerun.calib.workload.config import Batch as RunBatch
from forerun.calib.workload.config import Precision, RunConfig
from forerun.calib.workload.operators import Operator, OperatorKind, Phase
from forerun.calib.workload.parallelism import Parallelism

DEVICE = "NVIDIA A100-SXM4-80GB"
ELEMENT_NBYTES = 2
UNIT_S = np.array([2e-6, 1 / 240e12, 1 / 1.5e12])
"""Planted seconds of a launch, a FLOP and a byte."""
NOISE_LOG = 0.03
EFFICIENCIES = (0.5, 1.0)
NUM_ROWS, NUM_WINDOWS, NUM_ESTIMATES = 10_000, 400, 100_000
NUM_GROUPS, NUM_LAYOUTS = 10, 20
RUNNING = RunConfig(
    model=public_shape("LLAMA3_8B", seq_length=4096),
    parallelism=Parallelism(tp=2, pp=2, dp=4, is_sequence_parallel=True, ranks_per_node=8),
    batch=RunBatch(micro_batch_size=1, global_batch_size=256),
    precision=Precision.BF16,
    device=DEVICE,
)
FIT_BAR_S, ESTIMATE_BAR_S = 0.5, 0.2
MATRIX_SIZE = 2048
HEADER = ["what", "median s", "least s", "bar s", "median / bar", "matrix products"]
Case = tuple[str, float, Callable[[], object]]
"""Name, bar in seconds, and the timed call."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Time fits and estimates on planted samples.")
    parser.add_argument("--repetitions", type=int, default=5)
    repetitions = parser.parse_args().repetitions
    with threadpool_limits(1):
        matrix = np.random.default_rng(0).normal(size=(MATRIX_SIZE, MATRIX_SIZE))
        reference_s = statistics.median(process_times(lambda: matrix @ matrix, repetitions))
        print(markdown_head(HEADER))
        for what, bar_s, act in (*operator_cases(), *transfer_cases()):
            times_s = process_times(act, repetitions)
            middle = statistics.median(times_s)
            ratios = [f"{middle / bar_s:.2f}", f"{middle / reference_s:.2f}"]
            cells = [what, f"{middle:.3f}", f"{min(times_s):.3f}", f"{bar_s:g}", *ratios]
            print(markdown_row(cells), flush=True)
    print(f"\nOne matrix product: {reference_s:.3f} s.")


def process_times(act: Callable[[], object], repetitions: int) -> list[float]:
    """Return processor seconds of each repetition, after an uncounted warm-up."""
    act()
    times_s = []
    for _ in range(repetitions):
        begin = time.process_time()
        act()
        times_s.append(time.process_time() - begin)
    return times_s


def operator_cases() -> list[Case]:
    """Return cases of a refit, a fit of many shapes, and estimates after each."""
    groups = planted_groups(NUM_ROWS, seed=0)
    batches = {name: timed.batch for name, timed in planted_groups(NUM_ESTIMATES, seed=1).items()}
    windows = window_table(groups)
    model = fit_machine(groups, device=DEVICE)
    few = {name: timed.take(np.arange(min(24, len(timed)))) for name, timed in groups.items()}
    calibration = calibrate(windows, device=DEVICE)
    known = known_steps(calibration)
    return [
        (
            f"refit from that table, and the step model with {len(known)} known layouts",
            FIT_BAR_S,
            lambda: fit_steps(live_times(calibrate(windows, device=DEVICE), RUNNING), known),
        ),
        (
            f"refit from a table of {len(windows.samples):,} rows ({NUM_WINDOWS} windows)",
            FIT_BAR_S,
            lambda: calibrate(windows, device=DEVICE),
        ),
        (
            f"fit of 24 shapes of each of {len(groups)} operators and phases",
            FIT_BAR_S,
            lambda: fit_machine(few, device=DEVICE),
        ),
        (
            f"fit of {NUM_ROWS:,} distinct shapes, {len(groups)} operators and phases",
            FIT_BAR_S,
            lambda: fit_machine(groups, device=DEVICE),
        ),
        (
            f"{NUM_ESTIMATES:,} estimates after that fit, from arrays",
            ESTIMATE_BAR_S,
            lambda: [model.predict(name, batch) for name, batch in batches.items()],
        ),
    ]


def known_steps(calibration: Calibration) -> list[KnownStep]:
    """Return layouts of 16 GPUs with the model's predictions plus noise."""
    layouts = [*cells_of(RUNNING, RUNNING.parallelism.num_ranks).plain.configs()]
    chosen = layouts[:: len(layouts) // NUM_LAYOUTS][:NUM_LAYOUTS]
    times_s = fit_steps(live_times(calibration, RUNNING)).median_times(chosen)
    noise = np.exp(NOISE_LOG * np.random.default_rng(4).normal(size=len(chosen)))
    timed_configs = zip(chosen, (times_s * noise).tolist(), strict=True)
    return [KnownStep(config=config, time_s=time_s) for config, time_s in timed_configs]


def transfer_cases() -> list[Case]:
    """Return cases of fit and estimates of collectives on four and on eight ranks."""
    samples = planted_transfers()
    prior = network_prior(DEVICE)
    model = fit_transfers(samples, prior)
    payload_nbytes = np.geomspace(256, 2**32, NUM_ESTIMATES // NUM_GROUPS)
    return [
        (
            f"fit of {sum(map(len, samples.values())):,} transfers, {len(samples)} groups",
            FIT_BAR_S,
            lambda: fit_transfers(samples, prior),
        ),
        (
            f"{NUM_ESTIMATES:,} estimates of transfers",
            ESTIMATE_BAR_S,
            lambda: [model.estimate(group, payload_nbytes) for group in samples],
        ),
    ]


def planted_groups(number: int, *, seed: int) -> dict[str, Timed]:
    """Return ``number`` rows of 18 kinds, forward and backward, each shape of a kind once."""
    rng = np.random.default_rng(seed)
    phases = (Phase.FORWARD, Phase.BACKWARD)
    pairs = [(kind, phase) for kind in drawn_shapes(rng, 1) for phase in phases]
    groups = {}
    for i, (kind, phase) in enumerate(pairs):
        share = number * (i + 1) // len(pairs) - number * i // len(pairs)
        distinct = np.unique(drawn_shapes(rng, 4 * share)[kind], axis=0)
        batch = ShapeBatch(
            kind=kind,
            phase=phase,
            sizes=rng.permutation(distinct)[:share].astype(np.float64),
            element_nbytes=np.full(min(share, len(distinct)), float(ELEMENT_NBYTES)),
        )
        groups[f"{kind.value}/{phase.value}"] = planted_times(batch, rng)
    return groups


def drawn_shapes(rng: np.random.Generator, number: int) -> Mapping[OperatorKind, NDArray[np.int64]]:
    """Return canonical sizes of ``number`` random layouts, by kind, ``(number, sizes)``."""
    tp = 2 ** rng.integers(0, 4, number)
    rows, seq = rng.integers(1, 17, number), 64 * rng.integers(8, 129, number)
    heads, key = 8 * rng.integers(1, 11, number), 16 * rng.integers(4, 11, number)
    tokens, hidden, here, vocab = rows * seq, heads * key, heads // np.minimum(tp, 8), 50304 // tp
    qkv, ffn = 3 * hidden // tp, 4 * hidden // tp
    kind = OperatorKind
    sizes = {
        kind.EMBEDDING: (tokens, hidden, vocab),
        kind.NORM: (tokens, hidden),
        kind.RMS_NORM: (tokens, hidden),
        kind.LINEAR_QKV: (tokens, hidden, qkv),
        kind.ROTARY: (seq, rows, here, key),
        kind.BATCHED_PRODUCT: (rows * here, seq, key, seq),
        kind.MASK: (rows * here * seq, seq),
        kind.SOFTMAX: (rows * here * seq, seq),
        kind.FUSED_SOFTMAX: (rows * here, seq, seq),
        kind.CORE_ATTENTION: (rows, here, here, seq, key),
        kind.FLASH_ATTENTION: (rows, here, here, seq, key, key),
        kind.LINEAR_PROJ: (tokens, hidden // tp, hidden),
        kind.RESIDUAL: (tokens, hidden),
        kind.LINEAR_FC1: (tokens, hidden, ffn),
        kind.ACTIVATION: (tokens, ffn, ffn),
        kind.LINEAR_FC2: (tokens, ffn, hidden),
        kind.LOGITS: (tokens, hidden, vocab),
        kind.LOSS: (tokens, vocab),
    }
    return {name: np.column_stack(size_columns) for name, size_columns in sizes.items()}


def planted_times(batch: ShapeBatch, rng: np.random.Generator) -> Timed:
    """Return the law's time at the planted rates, one efficiency per batch, and noise."""
    law_s = columns(batch).totals() @ UNIT_S / rng.uniform(*EFFICIENCIES)
    noise = NOISE_LOG * rng.normal(size=len(batch))
    return Timed(batch=batch, time_s=law_s * np.exp(noise), weight=np.ones(len(batch)))


def operators_of(batch: ShapeBatch) -> list[Operator]:
    """Return the rows of a batch as single operators."""
    return [
        Operator(
            kind=batch.kind,
            phase=batch.phase,
            shape=tuple(int(size) for size in row),
            element_nbytes=ELEMENT_NBYTES,
        )
        for row in batch.sizes
    ]


def window_table(groups: Mapping[str, Timed]) -> SampleTable:
    """Return the first shape of some groups, measured anew in every window: 10,000 rows."""
    rng = np.random.default_rng(2)
    seen = [timed.take(np.arange(1)) for timed in groups.values()][: NUM_ROWS // NUM_WINDOWS]
    operators = [operators_of(timed.batch)[0] for timed in seen]
    windows = pd.DataFrame(
        {
            "row": "operator",
            "kind": [o.kind.value for o in operators],
            "phase": [o.phase.value for o in operators],
            "shape": [shape_text(o.shape) for o in operators],
            "element_nbytes": ELEMENT_NBYTES,
            "time_s": [float(timed.time_s[0]) for timed in seen],
            "num_steps": 10,
            "num_seen": 2,
            "spread_log": NOISE_LOG,
        }
    )
    samples = windows.merge(pd.DataFrame({"window": range(NUM_WINDOWS)}), how="cross")
    samples["time_s"] *= np.exp(NOISE_LOG * rng.normal(size=len(samples)))
    rows = {"samples": samples.assign(run_id="r"), "runs": pd.DataFrame({"run_id": ["r"]})}
    empty = pd.DataFrame()
    return SampleTable(**{name: normalise(name, rows.get(name, empty)) for name in FRAMES})


def planted_transfers() -> dict[Group, Samples]:
    """Return five collectives on four and on eight ranks: 10,000 payloads."""
    rng = np.random.default_rng(3)
    sizes = np.geomspace(256, 2**30, NUM_ROWS // NUM_GROUPS)
    kinds = [Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER]
    kinds += [Collective.ALL_TO_ALL, Collective.BROADCAST]
    return {
        Group(collective=kind, num_ranks=ranks): Samples(
            nbytes=sizes,
            time_s=(2e-5 + sizes / 3e11) * np.exp(NOISE_LOG * rng.normal(size=len(sizes))),
            weight=np.ones(len(sizes)),
        )
        for kind in kinds
        for ranks in (4, 8)
    }


if __name__ == "__main__":
    main()
