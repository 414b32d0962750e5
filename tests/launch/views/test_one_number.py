"""One run, one number: every stored answer says the same of a layout against the running one.

``benchmarks/golden_answers.py`` holds what verbs and a companion answer against these files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ANSWERS = Path(__file__).parents[2] / "golden" / "answers"
RUNS = ("cpu", "quick", "tp2", "pp2", "ep2", "mixed8")
GAIN = ("label", "step_time_s", "time_frac", "time_frac_low", "time_frac_high")

TIMES = ("time (s)", "time per step (s)", "for the transfer (s)", "for later ranks (s)")
SHARES = {
    "step_parts": "of the modelled step (frac)",
    "work": "of the simulated step (frac)",
    "waiting": "of the measured step (frac)",
}
"""The step that the shares of a table are of."""


def stored(name: str) -> dict[str, Any]:
    return json.loads((ANSWERS / f"{name}.json").read_text(encoding="utf-8"))


def near(value: float) -> Any:
    """As it is but for the last digits of a sum."""
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def column_text(row: Mapping[str, Any]) -> str:
    """As a column of text has a gain, from its numbers alone."""
    is_unsure = row["time_frac_low"] < 0 < row["time_frac_high"]
    return "cannot tell" if is_unsure else f"{100 * row['time_frac']:+.1f} %"


@pytest.mark.parametrize("run", RUNS)
def test_plan_report_and_explain_say_the_same(run: str) -> None:
    plan, report = stored(f"{run}_plan"), stored(f"{run}_report")["answer"]["plan"]
    shown, plan = plan["text"], plan["answer"]
    running, *others = plan["own"], *plan["candidates"]
    assert running["step_time_s"] == pytest.approx(plan["measured_step_time_s"], rel=1e-3)
    assert running["time_frac"] == running["time_frac_low"] == running["time_frac_high"] == 0.0
    for row, same in zip(others, report["candidates"], strict=False):
        assert row["time_frac"] == near(row["step_time_s"] / running["step_time_s"] - 1)
        assert [row[name] for name in GAIN] == [same[name] for name in GAIN]
        if any("against" in line for line in shown[:3]):
            (line,) = [line for line in shown if f"  {row['label']}  " in line]
            assert column_text(row) in line
    assert plan["best"] == report["best"]
    explained = stored(f"{run}_explain")["answer"]
    sides = (explained["layout"], running), (explained["other"], others[0])
    for side, row in sides:
        assert (side["label"], side["step_time_s"]) == (row["label"], near(row["step_time_s"]))
    ratio = running["step_time_s"] / others[0]["step_time_s"]
    assert explained["difference"]["time_frac"] == near(ratio - 1)


def test_hours_and_cost_of_tokens_are_those_of_the_best_step() -> None:
    """A device on which nothing was measured has the memory of its kind."""
    plans = stored("pp2_prices")["answer"]["plans"]
    assert [plan["memory_capacity_nbytes"] >> 30 for plan in plans] == [79, 179]
    for plan, price in zip(plans, (2.5, 4.0), strict=True):
        config, rows = plan["config"], plan["candidates"]
        best_s = min(row["step_time_s"] for row in rows if row["verdict"] != "does not fit")
        tokens = config["batch"]["global_batch_size"] * config["model"]["seq_length"]
        hours = plan["num_ranks"] * best_s * 1e9 / tokens / 3600
        assert plan["gpu_hours_per_giga_token"] == near(hours)
        assert plan["cost_per_giga_token"] == near(price * hours)


@pytest.mark.parametrize("run", RUNS[1:])
def test_a_table_of_a_companion_has_shares_of_its_running_step(run: str) -> None:
    replayed = stored(f"replay_{run}")
    for tables in replayed["tables"]:
        if "layouts" in tables:
            running_s = tables["layouts"][0]["step (s)"]
            for row in tables["layouts"]:
                if isinstance(frac := row["against running (frac)"], float):
                    assert frac == near(row["step (s)"] / running_s - 1)
        shares = [row["of the modelled step (frac)"] for row in tables.get("step_parts", ())]
        assert not shares or sum(shares) == pytest.approx(1.0, abs=1e-3)
        for key, share in SHARES.items():
            rows = [row for row in tables.get(key, ()) if row[share] > 1e-6]
            steps_s = [sum(row.get(name, 0.0) for name in TIMES) / row[share] for row in rows]
            assert steps_s == pytest.approx(steps_s[:1] * len(steps_s), rel=1e-9), key
