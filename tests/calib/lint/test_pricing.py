"""Gains of a lint: by the step model's own answers, closed forms, and never for the worse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lint_cases import CASES, CLEAN, FLAT, GPU, launch_of, remedied
from planted_steps import steps_of

from forerun.calib.lint._gain import Gain
from forerun.calib.lint.linter import Flaw, Lint, lint
from forerun.calib.lint.pricing import Pricing
from forerun.calib.lint.rule import StatedLaunch, stated_launch
from forerun.calib.memory.peak import memory
from forerun.calib.search.results import MemoryBudget

Planted = Callable[..., Any]
ROOMY = 10**12
QUIET = {"sigma_log": 0.001, "transfer_sigma_log": 0.001}
SAVE_S, EVAL_S, MTBF_S = 30.0, 2.0, 36_000.0


def pricing_of(launch: StatedLaunch, planted: Planted, **more: Any) -> Pricing:
    """A planted machine with room, which saw evaluations and saves; ``more`` replaces."""
    options: dict[str, Any] = {
        "budget": MemoryBudget(capacity_nbytes=ROOMY, offset_nbytes=0),
        "mtbf_s": MTBF_S,
        "eval_times_s": (EVAL_S,) * 4,
        "save_times_s": (SAVE_S,) * 4,
    }
    machine = planted(flop_per_s=1e14, bytes_per_s=1e11, **QUIET)
    return Pricing(config=launch.config, steps=steps_of(machine), **options | more)


def flaws_of(words: list[str], planted: Planted, **more: Any) -> dict[str, Flaw]:
    launch = launch_of(words)
    return {f.rule.name: f for f in lint(launch, pricing_of(launch, planted, **more)).flaws}


@pytest.mark.parametrize("name", ["async-save", "eval-interval", "save-interval"])
def test_a_rule_of_the_model_speaks_and_is_silent_after_its_remedy(
    name: str, planted: Planted
) -> None:
    words = CASES[name].words
    result = flaws_of(words, planted)
    assert name in result and result[name].gain is not None
    after = remedied(words, result[name].remedy)
    assert name not in flaws_of(after, planted)
    layout = result[name].remedy.layout
    if layout is not None:
        assert launch_of(after).config == layout


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_gain_is_the_ratio_of_two_steps(name: str, planted: Planted) -> None:
    launch = CASES[name].launch
    pricing = pricing_of(launch, planted)
    running_s = pricing.steps.estimate(launch.config).time_s
    for flaw in lint(launch, pricing).flaws:
        layout, gain = flaw.remedy.layout, flaw.gain
        if layout is None:
            continue
        if gain is None:
            assert flaw.unpriced
            continue
        ratio = pricing.steps.estimate(layout).time_s / running_s
        assert gain.time_frac == pytest.approx(ratio - 1, abs=1e-9)
        assert gain.low_frac <= gain.time_frac <= gain.high_frac
        assert (
            gain.memory_nbytes == memory(layout).total_nbytes - memory(launch.config).total_nbytes
        )


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(sorted(CASES)),
    rate=st.sampled_from([1e7, 1e9, 1e12]),
    launch_s=st.sampled_from([1e-7, 1e-4]),
    capacity_frac=st.sampled_from([0.5, 1.05, 1.5, 100.0]),
)
def test_nothing_slower_and_nothing_that_does_not_fit_is_offered(
    planted: Planted, name: str, rate: float, launch_s: float, capacity_frac: float
) -> None:
    launch = CASES[name].launch
    running_nbytes = memory(launch.config).total_nbytes
    capacity = round(capacity_frac * running_nbytes)
    machine = planted(bytes_per_s=rate, launch_s=launch_s)
    pricing = Pricing(
        config=launch.config,
        steps=steps_of(machine),
        budget=MemoryBudget(capacity_nbytes=capacity, offset_nbytes=0),
    )
    for flaw in lint(launch, pricing).flaws:
        assert (flaw.gain is None) == bool(flaw.unpriced)
        if flaw.gain is not None:
            assert flaw.gain.time_frac <= 0
        if flaw.remedy.layout is not None:
            needed = memory(flaw.remedy.layout).total_nbytes
            assert needed <= max(running_nbytes, capacity)


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_launch_has_no_flaw_with_a_model_either(name: str, planted: Planted) -> None:
    modelled: dict[str, Any] = {"budget": MemoryBudget(capacity_nbytes=ROOMY), "eval_times_s": ()}
    assert flaws_of(CLEAN[name].split(), planted, **modelled) == {}


def test_evaluations_by_hand(planted: Planted) -> None:
    words = CASES["eval-interval"].words
    launch = launch_of(words)
    flaw = flaws_of(words, planted)["eval-interval"]
    step_s = pricing_of(launch, planted).current.step_time_s
    wanted = int(flaw.remedy.put[0][1])
    assert flaw.gain is not None and flaw.gain.of_run
    expected = (step_s + EVAL_S / wanted) / (step_s + EVAL_S / 2) - 1
    assert flaw.gain.time_frac == pytest.approx(expected)
    assert EVAL_S / wanted / (step_s + EVAL_S / wanted) <= 0.02
    assert flaw.gain.low_frac < expected < flaw.gain.high_frac < 0


def test_saves_beside_training_are_spared(planted: Planted) -> None:
    words = CASES["async-save"].words
    launch = launch_of(words)
    gain = flaws_of(words, planted)["async-save"].gain
    step_s = pricing_of(launch, planted).current.step_time_s
    assert gain is not None
    assert gain.time_frac == pytest.approx(step_s / (step_s + SAVE_S / 1000) - 1)


def test_the_save_interval_is_where_least_is_lost(planted: Planted) -> None:
    """Against every interval tried one by one: saves, and half an interval for each failure."""
    words = CASES["save-interval"].words
    launch = launch_of(words)
    step_s = pricing_of(launch, planted).current.step_time_s
    wanted = int(flaws_of(words, planted)["save-interval"].remedy.put[0][1])

    def lost(steps: int) -> float:
        return SAVE_S / (steps * step_s) + steps * step_s / (2 * MTBF_S)

    near = range(max(1, wanted // 2), 2 * wanted, max(1, wanted // 1000))
    best = min(near, key=lost)
    assert wanted == pytest.approx(best, rel=0.01)


def test_a_restart_leaves_less_time_to_fail_in(planted: Planted) -> None:
    """Failures that come half as often: the interval is longer, and a short one loses as much."""
    words = CASES["save-interval"].words
    first, late = (
        flaws_of(words, planted, restart_s=restart_s, **more)["save-interval"]
        for restart_s, more in ((MTBF_S, {}), (0.0, {"mtbf_s": 2 * MTBF_S}))
    )
    assert first.remedy == late.remedy and first.gain == late.gain


def test_without_a_time_between_failures_no_interval_of_saves_is_advised(planted: Planted) -> None:
    assert "save-interval" not in flaws_of(CASES["save-interval"].words, planted, mtbf_s=None)


def test_the_line_says_the_best_that_is_sure(planted: Planted) -> None:
    launch = launch_of([*CASES["eval-interval"].words, "--log-interval", "1"])
    lint_result = lint(launch, pricing_of(launch, planted))
    assert lint_result.best is not None and lint_result.best.rule.name == "eval-interval"
    more = len(lint_result.flaws) - 1
    assert lint_result.line().startswith("launch: --eval-interval 2 with --eval-iters 10 · about ")
    assert lint_result.line().endswith(f" · forerun doctor DIR lists {more} more")


def gain(time_frac: float, low_frac: float = 0.0, high_frac: float = 0.0) -> Gain:
    return Gain(time_frac=time_frac, low_frac=low_frac or time_frac, high_frac=high_frac)


def test_gains_that_hold_each_other_are_not_added_up() -> None:
    """Overlapped gathers bring overlapped reductions with them: both together are no more."""
    flaws = lint(launch_of(CASES["overlap-grad-reduce"].words)).flaws
    gains = (gain(-0.06, -0.08, -0.04), gain(-0.05, -0.08, -0.03), gain(-0.5, -0.9, 0.1))
    priced = [replace(flaws[0], gain=one, unpriced="") for one in gains]
    assert Lint(flaws=tuple(priced)).sure_frac == pytest.approx(0.04)
    assert Lint(flaws=tuple(priced[2:])).sure_frac == Lint(flaws=flaws).sure_frac == 0.0


@pytest.mark.parametrize(
    ("estimate", "is_reported"),
    [
        (gain(-0.06, -0.08, -0.04), True),
        (gain(-0.06, -0.08, 0.01), False),
        (gain(-0.009, -0.01, -0.008), False),
    ],
)
def test_what_is_not_sure_or_too_little_is_no_line(estimate: Gain, is_reported: bool) -> None:
    launch = launch_of(CASES["overlap-grad-reduce"].words)
    (flaw, *_) = lint(launch).flaws
    whole = Lint(flaws=(replace(flaw, gain=estimate, unpriced=""),))
    assert bool(whole.line()) == is_reported
    if is_reported:
        assert "about 6 % less per step (4 to 8)" in whole.line()


def test_memory_that_is_saved_is_told() -> None:
    result = replace(gain(-0.001, -0.01, 0.01), memory_nbytes=-(5 << 30), memory_frac=-0.2)
    assert result.text == (
        "cannot tell (1.0 % more to 1.0 % less per step), -0.1 % expected, 5.0 GiB less memory"
    )


def test_a_measured_step_of_the_launch_is_where_gains_begin(planted: Planted) -> None:
    launch = launch_of(CASES["overlap-grad-reduce"].words)
    machine = planted()
    steps = steps_of(machine, launch.config, 2 * steps_of(machine).estimate(launch.config).time_s)
    pricing = Pricing(config=launch.config, steps=steps)
    assert pricing.current.step_time_s == pytest.approx(steps.measured_s(launch.config), rel=1e-3)


def test_words_alone_are_enough_for_a_launch() -> None:
    config = launch_of(FLAT.split()).config
    assert stated_launch((), config).given == {} and config.device == GPU
