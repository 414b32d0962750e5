"""Scaling for people: Llama 3.1 70B on H100; one published step of it is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forerun.benchmarks.published.readers import steps_of
from forerun.calib.advice.planning import compare
from forerun.calib.advice.scaling import Scaling, compute_scaling
from forerun.calib.steps.known_steps import KnownStep
from forerun.calib.steps.step_tables import table_steps
from forerun.calib.workload.config import Batch
from forerun.launch.views.answer_tables import (
    knee_line,
)

PUBLISHED = Path(__file__).parents[3] / "recipes" / "published"
COUNTS = (64, 512, 2048, 4096, 8192)


@pytest.fixture(scope="module")
def scaling() -> Scaling:
    rows = steps_of(PUBLISHED, "steps_dgxc_scaling").rows
    row = min((r for r in rows if "llama3-70b BF16" in r.group), key=lambda r: r.num_ranks)
    par, steps = row.config.parallelism, table_steps(row, [KnownStep.of(row)])
    configs = [
        replace(
            row.config,
            parallelism=replace(par, dp=par.dp * num // par.num_ranks),
            batch=Batch(micro_batch_size=1, global_batch_size=1024),
        )
        for num in COUNTS
    ]
    return compute_scaling(compare(configs[0], configs, steps), steps)


def test_the_knee_is_told_with_what_it_may_be(scaling: Scaling) -> None:
    bent = replace(
        scaling,
        growths=tuple(
            replace(growth, past_knee_probability=chance)
            for growth, chance in zip(scaling.growths, (0.01, 0.2, 0.6, 0.7), strict=True)
        ),
    )
    assert knee_line(bent).startswith("knee at 2,048 GPUs (90 %: 512 to beyond 8,192)")
    sure = replace(
        scaling,
        growths=tuple(
            replace(growth, past_knee_probability=chance)
            for growth, chance in zip(scaling.growths, (0.01, 0.02, 0.96, 0.99), strict=True)
        ),
    )
    assert knee_line(sure).startswith("knee at 2,048 GPUs (with 90 % confidence)")
    straight = replace(
        scaling, growths=tuple(replace(g, past_knee_probability=0.0) for g in scaling.growths)
    )
    assert knee_line(straight).startswith("no knee up to 8,192 GPUs")
