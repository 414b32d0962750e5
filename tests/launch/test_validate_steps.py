"""``forerun validate steps`` and ``design`` as a shell sees them, on the tables that ship."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from forerun.launch.cli import ExitCode, main

PUBLISHED = Path(__file__).parents[2] / "recipes" / "published"
GOLDEN = Path(__file__).parents[1] / "golden" / "steps"
MULTI = str(PUBLISHED / "steps_vtrain_multi_node.csv.gz")
SIMUMAX = str(PUBLISHED / "steps_simumax_b200_8gpu.csv.gz")
FIGURES = {
    *("mape_frac", "median_ape_frac", "p90_ape_frac", "bias_frac", "coverage_90_frac"),
    *("interval_width_frac", "kendall_tau", "regret_median_frac", "regret_p95_frac"),
    "memory_mape_frac",
}


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["validate", *argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def validate_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    code, out, _ = run(capsys, *argv, "--json")
    assert code == ExitCode.ANSWER
    value = json.loads(out)
    assert value["schema"] == 1
    return value


def test_json_has_results_and_rows(capsys: pytest.CaptureFixture[str]) -> None:
    value = validate_json(capsys, "steps", MULTI, "--calibrate-on", "5", "--draws", "3")
    whole = value["results"][0]
    assert (whole["protocol"], whole["group"], whole["n"]) == ("calibrate_5", "all", 3 * 10)
    assert set(whole) >= {"table", *FIGURES}
    assert len(value["rows"]) == 30
    for row in value["rows"]:
        assert row["low_s"] <= row["predicted_s"] <= row["high_s"] and row["measured_s"] > 0
    assert value["model"] == "ours" and len(value["worst"]) == 10
    repeated = validate_json(capsys, "steps", MULTI, "--calibrate-on", "5", "--draws", "3")
    assert repeated == value


def test_no_rows_all_subsets_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    cold = validate_json(capsys, "steps", SIMUMAX, "--calibrate-on", "0")
    assert cold["results"][0]["n"] == 12 and cold["results"][0]["memory_mape_frac"] < 0.02
    warm = validate_json(capsys, "steps", SIMUMAX, "--calibrate-on", "1", "--draws", "2")
    assert warm["results"][0]["n"] == 12 * 11
    assert warm["results"][0]["memory_mape_frac"] < 0.02


@pytest.mark.slow
def test_protocols_by_name_and_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    default = validate_json(capsys, "steps", MULTI)
    assert {row["protocol"] for row in default["results"]} == {"calibrate_0", "leave_one_out"}
    named = validate_json(capsys, "steps", MULTI, "--protocol", "leave_one_out")
    assert {row["protocol"] for row in named["results"]} == {"leave_one_out"}
    assert named["results"] == [r for r in default["results"] if r["protocol"] == "leave_one_out"]


def test_text_names_groups_and_worst_rows(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "steps", MULTI, SIMUMAX, "--calibrate-on", "0")
    assert code == ExitCode.ANSWER
    for part in ("all", "h6144 L40 x256", "worst rows", "MAPE", "tau"):
        assert part in out


def test_the_design_names_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    value = validate_json(capsys, "design", MULTI, "--rows", "4")
    assert [row["place"] for row in value["results"]] == [1, 2, 3, 4]
    errors = [row["expected_error_frac"] for row in value["results"]]
    assert errors == sorted(errors, reverse=True)
    code, out, _ = run(capsys, "design", MULTI, "--rows", "2")
    two = validate_json(capsys, "design", MULTI, "--rows", "2")["results"]
    assert code == ExitCode.ANSWER and all(row["layout"] in out for row in two)


def test_a_design_needs_no_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = pd.read_csv(MULTI)
    frame["step_time_s"] = frame["step_time_s"].sample(frac=1, random_state=1).to_numpy()
    frame.to_csv(tmp_path / "t.csv", index=False)
    one = validate_json(capsys, "design", MULTI, "--rows", "3")["results"]
    other = validate_json(capsys, "design", str(tmp_path / "t.csv"), "--rows", "3")["results"]
    assert [row["row_id"] for row in one] == [row["row_id"] for row in other]


@pytest.mark.parametrize(
    ("argv", "code", "part"),
    [
        (("steps", MULTI, "--draws", "0"), ExitCode.USAGE, "--draws 0"),
        (("steps", MULTI, "--calibrate-on", "-1"), ExitCode.USAGE, "--calibrate-on -1"),
        (("steps", MULTI, "--protocol", "random"), ExitCode.USAGE, "leave_one_out"),
        (("steps", MULTI, "--calibrate-on", "15"), ExitCode.NO_DATA, "no protocol"),
        (("steps", "none.csv"), ExitCode.USAGE, "does not exist"),
        (("design", MULTI, "--rows", "0"), ExitCode.USAGE, "--rows 0"),
        (
            ("steps", str(PUBLISHED / "example_operators.csv")),
            ExitCode.USAGE,
            "is not a table of steps, which also needs",
        ),
    ],
)
def test_a_wrong_call_is_one_line(
    argv: tuple[str, ...], code: int, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    number, out, err = run(capsys, *argv)
    assert (number, out) == (code, "") and part in err.splitlines()[-1]
