"""The tables of choices and commands, from planted times; runs that are there are not run again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from forerun.benchmarks.cpu_choice import choice_of, commands_table
from forerun.benchmarks.runs import choice_runs
from forerun.benchmarks.runs.choice_runs import (
    CASES,
    RunResults,
    feasible,
    is_accepted,
    sweep_times,
)

pytestmark = pytest.mark.slow


def test_a_choice_that_is_as_fast_within_repetitions_is_met() -> None:
    """Slower by 8 % in the median, but by as much faster in one of three pairs."""
    times = {
        "chosen": {0: 1.08, 1: 1.10, 2: 0.92},
        "best": {0: 1.00, 1: 1.00, 2: 1.00},
        "slow": {0: 2.0, 1: 2.0, 2: 2.0},
    }
    choice = choice_of({"chosen": 0.9, "best": 1.0, "slow": 2.2}, times)
    assert (choice.chosen, choice.best) == ("chosen", "best")
    assert choice.over_best == pytest.approx(1.08)
    assert choice.low < 1 < choice.high and choice.is_met
    assert choice.error_frac == pytest.approx(0.1)


def test_a_choice_that_is_slower_every_time_is_not_met() -> None:
    times = {"a": {0: 1.10, 1: 1.21, 2: 0.99}, "b": {0: 1.0, 1: 1.1, 2: 0.9}}
    choice = choice_of({"a": 1.0, "b": 2.0}, times)
    assert choice.over_best == pytest.approx(1.1)
    assert choice.low == pytest.approx(1.1) and not choice.is_met
    alone = choice_of({"a": 1.0, "b": 2.0}, {name: {0: t[0]} for name, t in times.items()})
    assert math.isinf(alone.high) and not alone.is_met


def test_layouts_are_those_that_the_recipe_takes() -> None:
    result = feasible("recipe")
    assert len(result) == len(set(result.values())) == 66
    # Eight samples of a replica, sixteen of a model over both; interleaving wants pairs.
    assert "DP2 mbs8" in result and "DP2 mbs16" not in result
    assert "TP2 mbs16 full" in result and "PP2 VP2 mbs16" not in result
    assert not is_accepted(("--tensor-model-parallel-size", "4")) and not is_accepted(
        ("--nonsense", "1")
    )


def test_half_as_many_of_the_cases_are_another_program(tmp_path: Path) -> None:
    assert len(CASES) == 10 and sum(case.is_megatron for case in CASES.values()) == 5
    assert all("--train-iters" not in case.words for case in CASES.values())
    rows = RunResults.opened(tmp_path)
    first, second, *_ = CASES
    prediction = {"label": "DP2 mbs8", "step_time_s": 0.1, "low_s": 0.08, "high_s": 0.12}
    rows.keep(f"followed/{first}", {**prediction, "actual_s": 0.11})
    rows.keep(f"followed/{second}", {**prediction, "actual_s": None})
    table = commands_table(rows)
    assert "Inside: 1 of 2" in table and "did not run" in table


def test_what_was_run_is_kept_and_a_line_that_was_cut_off_is_not(tmp_path: Path) -> None:
    rows = RunResults.opened(tmp_path)
    for number, name in ((0, "a"), (1, "a"), (0, "b")):
        rows.keep(f"sweep/recipe/{number}/{name}", 1.0 + number)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"key": "sweep/recipe/1/b", "val')
    reopened = RunResults.opened(tmp_path)
    assert reopened.values == rows.values
    # A layout that one repetition lacks is left out.
    assert sweep_times(reopened, "recipe") == {"a": {0: 1.0, 1: 2.0}}
    reopened.keep("sweep/recipe/1/b", 3.0)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert json.loads(lines[-1]) == {"key": "sweep/recipe/1/b", "value": 3.0}
    assert RunResults.opened(tmp_path).values == reopened.values


def test_a_sweep_that_was_broken_off_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the layouts are there; only the others are launched."""
    rows = RunResults.opened(tmp_path)
    layouts = feasible("recipe")
    half = list(layouts.values())[::2]
    written = tmp_path / "swept-recipe-0.jsonl"
    written.write_text("".join(json.dumps({"options": o, "step_s": 1.0}) + "\n" for o in half))
    requests: list[list[str]] = []

    def launch(words: list[str], **_: object) -> str:
        requests.append(json.loads(Path(words[-3]).read_text()))
        with Path(words[-2]).open("a") as file:
            file.writelines(json.dumps({"options": o, "step_s": 2.0}) + "\n" for o in requests[-1])
        return ""

    monkeypatch.setattr(choice_runs, "output_of", launch)
    choice_runs.swept(rows, "recipe", 0)
    (launched,) = requests
    assert {tuple(o) for o in launched} == set(layouts.values()) - set(half)
    assert sorted(rows.values.values()) == [1.0] * 33 + [2.0] * 33
    choice_runs.swept(rows, "recipe", 0)
    assert len(requests) == 1
