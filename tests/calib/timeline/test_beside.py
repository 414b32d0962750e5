"""Shared experts beside the exchange: two streams that join, by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from forerun.calib.timeline.compiled import compile_layouts
from forerun.calib.timeline.evaluation import evaluate, step_times
from forerun.calib.timeline.items import Part, part_of
from forerun.calib.workload.collectives import CollectiveCall
from forerun.calib.workload.config import Dispatcher, Experts, RunConfig

GPU = "NVIDIA H100 80GB HBM3"
EXPERTS = Experts(
    num_experts=8,
    top_k=2,
    ffn_hidden_size=32,
    shared_ffn_hidden_size=48,
    is_grouped=True,
    dispatcher=Dispatcher.ALL_TO_ALL,
)
WORK_S = 3 * 1e-3
"""Two products and the activation of the shared experts, in either pass."""


def exchange_s(config: RunConfig, each_s: float) -> tuple[float, float]:
    """The step with so much for each transfer of experts, other work 1 ms an operator; and what of
    the step these transfers take."""
    compiled = compile_layouts([config])
    times_s = np.full((len(compiled.items), 1), 1e-3)
    for place, item in enumerate(compiled.items):
        if isinstance(item, CollectiveCall):
            times_s[place] = each_s if part_of(item.role) is Part.EP else 0.0
    groups = evaluate(compiled, times_s, contention=1.0)
    return step_times(compiled, groups).item(), groups[0].parts_s(0)[Part.EP]


@pytest.fixture
def pair(layout: Callable[..., RunConfig]) -> tuple[RunConfig, RunConfig]:
    """The exchange before and after the shared experts, and beside them."""
    out = []
    for is_overlapped in (False, True):
        experts = replace(EXPERTS, overlaps_shared=is_overlapped)
        config = layout(model={"experts": experts}, dp=2, par={"ep": 2})
        out.append(replace(config, device=GPU))
    return out[0], out[1]


def test_a_long_exchange_hides_all_work_of_the_shared_experts(
    pair: tuple[RunConfig, RunConfig],
) -> None:
    (apart, after), (together, overlapped) = (exchange_s(config, 2e-3) for config in pair)
    passes = 2 * pair[0].num_microbatches * pair[0].model.num_layers
    assert after - overlapped == pytest.approx(passes * WORK_S, rel=1e-6)
    assert apart - together == pytest.approx(after - overlapped, rel=1e-6)


def test_a_short_exchange_is_hidden_itself(pair: tuple[RunConfig, RunConfig]) -> None:
    (apart, after), (together, overlapped) = (exchange_s(config, 1e-4) for config in pair)
    assert after > 0.0 == pytest.approx(overlapped, abs=1e-12)
    assert apart - together == pytest.approx(after, rel=1e-6)


def test_gathers_of_the_shared_input_hide_behind_the_sort(layout: Callable[..., RunConfig]) -> None:
    """Over tp 2 the input is gathered and the result scattered while two permutes of rows run."""
    steps = []
    for is_overlapped in (False, True):
        experts = replace(EXPERTS, overlaps_shared=is_overlapped)
        par = {"ep": 2, "etp": 1, "is_sequence_parallel": True}
        config = layout(model={"experts": experts}, tp=2, dp=2, par=par)
        compiled = compile_layouts([replace(config, device=GPU)])
        times_s = np.full((len(compiled.items), 1), 1e-3)
        groups = evaluate(compiled, times_s, contention=1.0)
        steps.append(groups[0].parts_s(0)[Part.TP])
    assert steps[1] < steps[0]
