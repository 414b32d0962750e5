"""Why layouts are not first: the rule, the memory or the time that is in the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from planted_steps import steps_of

from forerun.calib.advice.obstacles import WhyNot, why_not
from forerun.calib.advice.planning import Plan, plan
from forerun.calib.arguments.short_names import LayoutConstraint
from forerun.calib.memory.peak import Verdict

Explain = Callable[..., WhyNot]


@pytest.fixture
def explain(layout: Callable[..., Any], planted: Callable[..., Any]) -> Explain:
    """Explanations for a run on four ranks."""
    config, steps = layout(tp=2, dp=2), steps_of(planted())

    def make(text: str, capacity_nbytes: int | None = None, num_ranks: int = 4) -> WhyNot:
        def made(**constraints: LayoutConstraint) -> Plan:
            return plan(
                config,
                steps,
                num_ranks=num_ranks,
                memory_capacity_nbytes=capacity_nbytes,
                **constraints,
            )

        constraint = LayoutConstraint.parse(text)
        return why_not(constraint, made(), made(keep=constraint), num_ranks)

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


def test_memory_is_told_where_none_fits(explain: Explain) -> None:
    why_not = explain("recompute=none", capacity_nbytes=100 << 10)
    assert why_not.best is not None and why_not.best.verdict is Verdict.DOES_NOT_FIT
    assert "none fits in memory" in why_not.text and why_not.best.label in why_not.text


@pytest.mark.parametrize(
    ("text", "num_ranks", "rule"),
    [
        ("tp=8", 8, "num_attention_heads"),
        ("tp=8", 4, "do not split"),
        ("pp=8", 8, "num_layers"),
        ("mbs=3", 4, "micro"),
        ("tp=3", 4, "do not split"),
    ],
)
def test_the_rule_that_forbids_them_is_told(
    explain: Explain, text: str, num_ranks: int, rule: str
) -> None:
    why_not = explain(text, num_ranks=num_ranks)
    assert (why_not.num_layouts, why_not.best) == (0, None)
    assert rule in why_not.text


def test_the_running_layout_is_named_as_such(explain: Explain) -> None:
    assert explain("tp=2,dp=2,mbs=2,recompute=none,sharding=none,vpp=1").text.startswith(
        "it is the"
    )


def test_what_no_plan_tries_is_left_to_predict(explain: Explain) -> None:
    """More context on a CPU."""
    why_not = explain("cp=2,tp=2")
    assert (why_not.num_layouts, why_not.best) == (0, None)
    assert why_not.text.endswith("forerun predict estimates its step time")


@pytest.mark.parametrize(
    ("text", "option"),
    [("gpus=64", "--gpus 64"), ("gbs=32", "--global-batch-size 32"), ("seq=64", "--seq-length 64")],
)
def test_what_a_plan_is_asked_for_is_asked_by_its_option(
    explain: Explain, text: str, option: str
) -> None:
    assert explain(text).text.endswith(f"ask for {option}")


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
