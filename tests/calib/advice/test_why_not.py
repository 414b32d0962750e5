"""Why layouts are not first: by how much they are slower, and which were tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from planted_steps import steps_of

from forerun.calib.advice.obstacles import WhyNot, why_not
from forerun.calib.advice.planning import plan
from forerun.calib.arguments.short_names import LayoutConstraint

Explain = Callable[..., WhyNot]


@pytest.fixture
def explain(layout: Callable[..., Any], planted: Callable[..., Any]) -> Explain:
    """Explanations for a run on four ranks."""
    config, steps = layout(tp=2, dp=2), steps_of(planted())

    def make(text: str) -> WhyNot:
        constraint = LayoutConstraint.parse(text)
        kept = plan(config, steps, num_ranks=4, keep=constraint)
        return why_not(constraint, plan(config, steps, num_ranks=4), kept, 4)

    return make


def test_a_slower_layout_is_told_by_how_much(explain: Explain) -> None:
    every = explain("dp=1|2|4")
    assert every.best is not None and "no layout does" in every.text
    slow = next(
        one
        for one in (explain(f"pp={pp},recompute=full") for pp in (1, 2, 4))
        if one.best is not None and one.best.config != every.best.config
    )
    assert slow.best is not None
    behind = slow.best.step_time_s / every.best.step_time_s - 1
    assert behind > 0 and f"+{behind * 100:.1f} %" in slow.text and every.best.label in slow.text


def test_every_set_of_modules_is_among_those_that_are_tried(explain: Explain) -> None:
    why_not = explain("recompute=mlp,tp=2")
    assert why_not.best is not None and why_not.best.config.recompute_modules == ("mlp",)
    assert why_not.text.startswith(f"the fastest, {why_not.best.label}, takes")
    allowed = explain("recompute=mlp").num_layouts
    assert 0 < why_not.num_layouts < allowed


def test_a_plan_keeps_what_it_is_told_to(
    layout: Callable[..., Any], planted: Callable[..., Any]
) -> None:
    config, steps, keep = (
        layout(tp=2, dp=2),
        steps_of(planted()),
        LayoutConstraint.parse("tp=2,recompute=none"),
    )
    free, constrained = plan(config, steps), plan(config, steps, keep=keep)
    assert constrained.candidates and all(keep.allows(one.config) for one in constrained.candidates)
    meant = {one.config for one in free.candidates if keep.allows(one.config)}
    assert meant <= {one.config for one in constrained.candidates}
