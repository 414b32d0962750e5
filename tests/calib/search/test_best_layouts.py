"""The best layouts are those of timing every one; nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from every_layout import best_of_every, every_layout, row
from planted_steps import steps_of
from tiny_shape import of_width, run_of

from forerun.calib.arguments.short_names import LayoutConstraint
from forerun.calib.memory.pipelines import needed_nbytes
from forerun.calib.search._rough_times import rough_times
from forerun.calib.search.best_layouts import best_layouts
from forerun.calib.search.cells import cells_of
from forerun.calib.search.results import NUM_LACKING, TOP, Effort, MemoryBudget, SearchResult
from forerun.calib.steps.base_times import prior_times
from forerun.calib.steps.known_steps import KnownStep
from forerun.calib.steps.model import FittedSteps, fit_steps
from forerun.calib.workload.config import Experts, ModelShape, Precision, RunConfig
from forerun.calib.workload.layout_table import LayoutTable

Layout = Callable[..., RunConfig]
H100 = "NVIDIA H100 80GB HBM3"
ZERO1 = dict.fromkeys(
    ("is_optimizer_distributed", "overlaps_grad_reduce", "overlaps_param_gather"), True
)
GPU = fit_steps(prior_times(H100, is_attention_fused=True))


def some_model(rng: random.Random) -> ModelShape:
    experts = Experts(
        num_experts=rng.choice((4, 8)),
        top_k=2,
        ffn_hidden_size=512,
        shared_ffn_hidden_size=rng.choice((0, 512)),
        is_grouped=True,
    )
    return of_width(
        1024,
        num_layers=rng.choice((4, 6, 8)),
        num_query_groups=rng.choice((2, 8)),
        seq_length=rng.choice((1024, 2048)),
        is_gated=rng.random() < 0.5,
        experts=experts if rng.random() < 0.4 else None,
    )


@cache
def some_run(seed: int) -> tuple[RunConfig, FittedSteps, int, MemoryBudget]:
    """A small run on H100s, what is known of its steps, and a memory that some layouts exceed."""
    rng = random.Random(seed)
    model = some_model(rng)
    num_ranks = rng.choice((4, 8)) if model.experts is None else 4
    config = run_of(
        model,
        dp=num_ranks,
        micro=1,
        par={**ZERO1, "ranks_per_node": rng.choice((2, 8))},
        samples=rng.choice((8, 16)),
        precision=Precision.BF16,
        device=H100,
    )
    steps = GPU
    if rng.random() < 0.5:
        time_s = float(GPU.median_times([config])[0]) * rng.uniform(0.7, 1.5)
        steps = fit_steps(GPU.base, [KnownStep(config=config, time_s=time_s)])
    layouts = random.Random(seed).sample(every_layout(config, num_ranks), 50)
    needed = sum(needed_nbytes(LayoutTable.of(layouts)))
    budget = MemoryBudget(capacity_nbytes=int(np.quantile(needed, rng.choice((0.1, 0.5, 1.0)))))
    return config, steps, num_ranks, budget


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 8))]
)
def test_the_best_are_those_of_timing_every_layout(seed: int) -> None:
    config, steps, num_ranks, budget = some_run(seed)
    search_result = best_layouts(config, steps, num_ranks, budget=budget)
    expected = best_of_every(config, steps, num_ranks, budget, 20)
    assert [one.time_s for one in search_result.best] == pytest.approx(
        [s for s, _ in expected], rel=1e-8
    )
    rows = [row(layout) for _, layout in expected]
    assert {row(one.config) for one in search_result.best[:-1]} <= set(rows)
    assert search_result.tried.num_layouts == len(every_layout(config, num_ranks))
    assert not search_result.tried.not_tried


@pytest.mark.parametrize("seed", range(8, 12))
def test_no_step_is_shorter_than_its_rough_time(seed: int) -> None:
    """By a layout's own passes, and by those of its split of the ranks without recompute."""
    config, steps, num_ranks, _ = some_run(seed)
    cells = cells_of(config, num_ranks)
    rough_s = dict(
        zip(map(_key, cells.table.configs()), rough_times(cells.plain, steps), strict=True)
    )
    layouts = random.Random(seed).sample(every_layout(config, num_ranks), 400)
    times_s = steps.median_times(layouts)
    assert (times_s >= [rough_s[_key(layout)] for layout in layouts]).all()
    own_s = rough_times(LayoutTable.of(layouts), steps)
    assert (times_s >= own_s).all()
    assert own_s == pytest.approx(
        [rough_times(LayoutTable.of([layout]), steps)[0] for layout in layouts], rel=1e-12
    )


@pytest.mark.parametrize("seed", range(12, 15))
def test_a_split_of_which_nothing_fits_is_seen_at_its_lightest(seed: int) -> None:
    config, steps, num_ranks, budget = some_run(seed)
    every = every_layout(config, num_ranks)
    fits = budget.holds(*needed_nbytes(LayoutTable.of(every)))
    search_result = best_layouts(config, steps, num_ranks, budget=budget)
    able = {_key(layout) for layout, is_fitting in zip(every, fits, strict=True) if is_fitting}
    assert {_key(layout) for layout in search_result.lacking}.isdisjoint(able)
    assert search_result.tried.over_memory <= (~fits).sum()


def _key(layout: RunConfig) -> tuple[object, ...]:
    par = layout.parallelism
    splits = (par.chunk_layers, par.is_sequence_parallel, par.shards_weights, par.shards_grads)
    return (*row(layout)[:-1], *splits)


def test_a_measured_step_is_found_where_no_bound_holds(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    """A layout that ran faster than the model thinks possible is the best."""
    config, quick = layout(tp=2, dp=2), layout(dp=4)
    modelled = steps_of(planted()).median_times([quick])[0]
    known = [KnownStep(config=quick, time_s=float(modelled) / 3)]
    steps = fit_steps(steps_of(planted()).base, known)
    search_result = best_layouts(config, steps, 4)
    assert search_result.best[0].config == quick


def stopped(seed: int) -> SearchResult:
    """The fastest layout of a run after one round of the search."""
    config, steps, num_ranks, _ = some_run(seed)
    calls: list[int] = []
    effort = Effort(is_stopped=lambda: bool(calls.append(1)) or len(calls) > 1, top=1)
    return best_layouts(config, steps, num_ranks, effort=effort)


@pytest.mark.slow
def test_what_is_stopped_says_how_many_are_left() -> None:
    """Before its second round, of a run whose first leaves some."""
    seed = next(seed for seed in range(20) if stopped(seed).tried.not_tried)
    tried = stopped(seed).tried
    assert 0 < tried.not_tried < tried.num_layouts and "stopped before" in tried.text
    assert tried.slower >= 0


def test_only_what_is_kept_is_found(layout: Layout, planted: Callable[..., Any]) -> None:
    keep = LayoutConstraint.parse("tp=2,recompute=full")
    search_result = best_layouts(layout(dp=4), steps_of(planted()), 4, keep=keep)
    assert search_result.best and all(keep.allows(one.config) for one in search_result.best)
    free = best_layouts(layout(dp=4), steps_of(planted()), 4)
    assert any(not keep.allows(one.config) for one in free.best)


@pytest.mark.parametrize(
    "text", ["recompute=none", "recompute=mlp", "sharding=none", "sp=on", "mbs=1|2,recompute=full"]
)
def test_what_is_kept_is_the_best_of_all_that_is_asked_for(text: str) -> None:
    config, steps, num_ranks, budget = some_run(1)
    keep = LayoutConstraint.parse(text)
    search_result = best_layouts(config, steps, num_ranks, budget=budget, keep=keep)
    expected = best_of_every(config, steps, num_ranks, budget, TOP, keep)
    assert [one.time_s for one in search_result.best] == pytest.approx(
        [s for s, _ in expected], rel=1e-8
    )
    assert all(keep.allows(one.config) for one in search_result.best) and expected


@pytest.mark.parametrize("text", ["recompute=none", "sharding=none", "sp=on"])
def test_what_does_not_fit_was_asked_for_too(text: str) -> None:
    config, steps, num_ranks, _ = some_run(1)
    keep = LayoutConstraint.parse(text)
    search_result = best_layouts(
        config, steps, num_ranks, budget=MemoryBudget(capacity_nbytes=1), keep=keep
    )
    assert search_result.best == () and len(search_result.lacking) == NUM_LACKING
    assert all(keep.allows(one) for one in search_result.lacking)


def test_where_nothing_can_be_nothing_is_found() -> None:
    config, steps, num_ranks, _ = some_run(1)
    search_result = best_layouts(config, steps, num_ranks, keep=LayoutConstraint.parse("tp=3"))
    assert search_result.layouts == ()
    assert (search_result.tried.num_cells, search_result.tried.num_layouts) == (0, 0)
    tight = best_layouts(config, steps, num_ranks, budget=MemoryBudget(capacity_nbytes=1))
    assert tight.best == ()
    assert tight.tried.over_memory == tight.tried.num_layouts > 0
