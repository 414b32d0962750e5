"""``forerun diff`` on recorded runs: as text, Markdown and JSON, exit codes, what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from json_schema import check
from planted_runs import planted_run

from forerun.calib.samples.store import write_table
from forerun.launch.cli import ExitCode, main

RECORDED = Path(__file__).parents[2] / "golden" / "cpu_dp2"
Out = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories with the sample table of a run: the same twice, and one with a slow rank."""
    top, draw = tmp_path_factory.mktemp("runs"), np.random.default_rng(1)
    planted: dict[str, dict[str, Any]] = {"one": {}, "same": {}, "slow": {"slow_rank_s": 0.3}}
    for name, effects in planted.items():
        write_table(top / name / "samples.parquet", planted_run(draw, name=name, **effects))
    return {name: str(top / name) for name in planted}


def schema_of(capsys: Out) -> dict[str, Any]:
    with pytest.raises(SystemExit):
        main(["diff", "--json-schema"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("pair", [("one", "slow"), ("one", "same"), ("slow", "one")])
def test_json_is_what_the_schema_says(
    pair: tuple[str, str], homes: dict[str, str], capsys: Out
) -> None:
    schema = schema_of(capsys)
    assert main(["diff", *(homes[name] for name in pair), "--json"]) == ExitCode.ANSWER
    value = json.loads(capsys.readouterr().out)
    check(value, schema)
    assert (value["first"]["run_id"], value["second"]["run_id"]) == pair
    assert value["verdict"] == {"slow": "slower", "same": "no difference shown"}.get(
        pair[1], "faster"
    )


@pytest.mark.slow
def test_the_threshold_is_of_what_is_shown(homes: dict[str, str]) -> None:
    def code(first: str, second: str, frac: str) -> int:
        return main(["diff", homes[first], homes[second], "--fail-over", frac])

    assert code("one", "slow", "0.1") == ExitCode.THRESHOLD
    assert code("one", "slow", "0.5") == ExitCode.ANSWER
    assert code("one", "same", "0") == ExitCode.ANSWER
    assert code("slow", "one", "0") == ExitCode.ANSWER


@pytest.mark.slow
def test_records_that_are_damaged_are_named_and_skipped(tmp_path: Path, capsys: Out) -> None:
    home = tmp_path / "run"
    shutil.copytree(RECORDED, home)
    path = next((home / "records").glob("*/rank-*.jsonl"))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:40], '{"type": "step", "step": "x"}\n', "}{\n", *lines[40:]]))
    assert main(["diff", str(RECORDED), str(home)]) == ExitCode.ANSWER
    output = capsys.readouterr()
    assert f"{path.name}:41: " in output.err and f"{path.name}:42: " in output.err
    assert "no difference that these runs could show" in " ".join(output.out.split())
    path.write_text("noise\n" * 10)
    for other in path.parent.glob("rank-*.jsonl"):
        other.write_text("noise\n")
    assert main(["diff", str(RECORDED), str(home)]) == ExitCode.ANSWER


@pytest.mark.slow
def test_windows_are_chosen_by_either_way(homes: dict[str, str], capsys: Out) -> None:
    answers = []
    for words in (
        [homes["one"], "--windows", "0", "3"],
        [f"{homes['one']}@0", f"{homes['one']}@3"],
    ):
        assert main(["diff", *words, "--json"]) == ExitCode.ANSWER
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    assert [answers[0][side]["windows"] for side in ("first", "second")] == [[0], [3]]
    assert main(["diff", f"{homes['one']}@0,1", homes["one"]]) == ExitCode.ANSWER
