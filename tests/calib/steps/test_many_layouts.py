"""The steps of many layouts together are those of each alone, to the last bit."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
from tiny_shape import of_width, run_of

from forerun.calib.search.cells import cells_of, choices_of
from forerun.calib.steps.base_times import prior_times
from forerun.calib.steps.known_steps import KnownStep
from forerun.calib.steps.model import FittedSteps, fit_steps
from forerun.calib.workload.config import (
    Experts,
    Fp8Recipe,
    Precision,
    RunConfig,
)
from forerun.calib.workload.layout_table import LayoutTable

H100 = "NVIDIA H100 80GB HBM3"
MODELS = {
    "dense": of_width(1024, num_layers=8, num_query_groups=2, is_gated=True),
    "experts": of_width(
        1024,
        num_layers=6,
        experts=Experts(
            num_experts=8,
            top_k=2,
            ffn_hidden_size=512,
            shared_ffn_hidden_size=512,
            is_grouped=True,
            layer_pattern=(False, *[True] * 5),
        ),
    ),
    "predictions": of_width(1024, num_layers=4, num_prediction_layers=1, is_tied=True),
}
RUNS = {
    **{(name, H100): {} for name in MODELS},
    ("dense", "cpu"): {"precision": Precision.FP32},
    ("experts", "fp8"): {"fp8": Fp8Recipe.BLOCKWISE, "keeps_fp8_params": True},
    ("dense", "offload"): {"optimizer_offload_frac": 0.5},
    ("dense", "torchtitan"): {"framework": "torchtitan 0.2"},
}


@cache
def run_and_steps(name: str, kind: str) -> tuple[RunConfig, FittedSteps]:
    """A run on 16 ranks, and steps fitted to two of its layouts."""
    device = "cpu" if kind == "cpu" else H100
    sharded = {"is_optimizer_distributed": True, "ranks_per_node": 8}
    settings = {"precision": Precision.BF16, **RUNS[name, kind]}
    config = run_of(
        MODELS[name], dp=16, micro=1, samples=32, device=device, par=sharded, **settings
    )
    steps = fit_steps(prior_times(device, is_attention_fused=device != "cpu"))
    other = replace(config, parallelism=replace(config.parallelism, dp=8, cp=2))
    known = [
        KnownStep(config=one, time_s=factor * float(steps.median_times([one])[0]))
        for one, factor in ((config, 1.2), (other, 0.9))
    ]
    return config, fit_steps(steps.base, known)


def drawn_layouts(config: RunConfig, number: int, rng: random.Random) -> list[RunConfig]:
    """Return layouts of a run on its ranks: any split, states and recompute."""
    cells = cells_of(config, config.parallelism.num_ranks)
    choices = choices_of(cells)
    out = []
    for _ in range(number):
        place = rng.randrange(len(cells))
        choice = choices.value(place)
        layout = rng.choice(choice.states).of(cells.layout(place))
        out.append(rng.choice(choice.recomputes).applied_to(layout))
    return out


@pytest.mark.parametrize(
    "number", [30, pytest.param(1430, marks=pytest.mark.slow)], ids=["some", "ten thousand in all"]
)
@pytest.mark.parametrize(("name", "kind"), RUNS)
def test_many_layouts_take_what_each_takes_alone(name: str, kind: str, number: int) -> None:
    config, steps = run_and_steps(name, kind)
    layouts = drawn_layouts(config, number, random.Random(number))
    together = steps.median_times(layouts).tolist()
    assert together == [float(steps.median_times([layout])[0]) for layout in layouts]
    assert together[::-1] == steps.median_times(LayoutTable.of(layouts[::-1])).tolist()
