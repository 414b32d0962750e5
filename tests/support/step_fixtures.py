"""Layouts to plant step times on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tiny_shape import of_width

from forerun.calib.records.step_rows import StepRow
from forerun.calib.workload.config import (
    Batch,
    Parallelism,
    Precision,
    Recompute,
    RunConfig,
)


def layout(tp: int, pp: int, dp: int, micro: int, *, num_layers: int = 16) -> RunConfig:
    """Return a layout of a GPT of width 2,048 on A100, global batch 64."""
    shape = of_width(2048, num_layers=num_layers, seq_length=1024, vocab_size=51200)
    return RunConfig(
        model=shape,
        parallelism=Parallelism(tp=tp, pp=pp, dp=dp, ranks_per_node=8),
        batch=Batch(micro_batch_size=micro, global_batch_size=64),
        precision=Precision.FP16,
        reduces_grads_in_bf16=True,
        recompute=Recompute.FULL,
        device="A100",
    )


def row(config: RunConfig, measured_s: float, name: str = "") -> StepRow:
    """Return one row of one machine; layouts on equally many ranks are ranked together."""
    ranks = config.parallelism.num_ranks
    return StepRow(
        table="t",
        row_id=name or f"{config.parallelism.tp}-{config.parallelism.pp}-{ranks}",
        config=config,
        measured_s=measured_s,
        machine="m",
        group=f"L{config.model.num_layers} x{ranks}",
    )


def grid(
    time: Callable[[RunConfig], float] = lambda _: 1.0, depths: Sequence[int] = (16,)
) -> list[StepRow]:
    """Return every layout of 8 and 16 ranks with two micro-batch sizes, all times distinct."""
    rows = []
    for depth in depths:
        for ranks in (8, 16):
            for tp in (1, 2, 4, 8):
                for pp in (1, 2, 4, 8):
                    if ranks % (tp * pp):
                        continue
                    for micro in (1, 4):
                        dp = ranks // (tp * pp)
                        config = layout(tp, pp, dp, micro, num_layers=depth)
                        name = f"tp{tp} pp{pp} dp{dp} mb{micro} L{depth}"
                        rows.append(row(config, time(config), name))
    return rows


def timed(rows: Sequence[StepRow], times: Sequence[float]) -> list[StepRow]:
    """Return the rows with other times."""
    return [replace(one, measured_s=float(t)) for one, t in zip(rows, times, strict=True)]
