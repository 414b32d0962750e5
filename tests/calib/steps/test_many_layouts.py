"""The steps of many layouts together are those of each alone, to the last bit."""

from __future__ import annotations

import random

import pytest
from drawn_layouts import changed_in_one_field, drawn_layouts

from forerun.calib.steps.base_times import prior_times
from forerun.calib.steps.known_steps import KnownStep
from forerun.calib.steps.model import FittedSteps, fit_steps
from forerun.calib.workload.config import RunConfig
from forerun.calib.workload.layout_table import LayoutTable


def drawn_run(seed: int, number: int) -> tuple[list[RunConfig], FittedSteps]:
    """Layouts of one run whose operators all have a law, and steps fitted to two of them."""
    while True:
        layouts = drawn_layouts(seed, 1, number)
        if not layouts[0].model.opaque_layers:
            break
        seed += 1000
    first = layouts[0]
    steps = fit_steps(prior_times(first.device, is_attention_fused=first.is_attention_fused))
    rng = random.Random(seed)
    known = [
        KnownStep(config=one, time_s=rng.uniform(0.7, 1.5) * float(steps.median_times([one])[0]))
        for one in layouts[:2]
    ]
    return layouts, fit_steps(steps.base, known)


@pytest.mark.parametrize(
    ("seed", "number"),
    [
        *((seed, 25) for seed in range(8)),
        *(pytest.param(seed, 250, marks=pytest.mark.slow) for seed in range(8, 12)),
        *(pytest.param(seed, 250, marks=pytest.mark.nightly) for seed in range(12, 48)),
    ],
)
def test_many_layouts_take_what_each_takes_alone(seed: int, number: int) -> None:
    layouts, steps = drawn_run(seed, number)
    together = steps.median_times(layouts).tolist()
    assert together == [float(steps.median_times([layout])[0]) for layout in layouts]
    assert together[::-1] == steps.median_times(LayoutTable.of(layouts[::-1])).tolist()


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(8, 200))]
)
def test_layouts_that_differ_in_one_field_take_what_each_takes_alone(seed: int) -> None:
    layouts, steps = drawn_run(seed, 40)
    layouts = changed_in_one_field(layouts)
    together = steps.median_times(layouts).tolist()
    assert together == [float(steps.median_times([layout])[0]) for layout in layouts]
