"""``forerun diff`` on recorded runs: as text, Markdown and JSON, exit codes, what it refuses."""

from __future__ import annotations

import json
import re
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


def test_text_names_the_verdict_the_rank_and_the_terms(homes: dict[str, str], capsys: Out) -> None:
    assert main(["diff", homes["one"], homes["slow"]]) == ExitCode.ANSWER
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    flat_text = " ".join(text.split())
    assert re.search(
        r"B is slower by \d+\.\d % \(\d+\.\d to \d+\.\d, 90 %\) in time per", flat_text
    )
    assert "mainly: straggling rank: rank 1: own compute" in flat_text
    assert re.search(r"^rank 0 waiting .* \*$", text, re.MULTILINE)


def test_columns_add_up(homes: dict[str, str], capsys: Out) -> None:
    main(["diff", homes["one"], homes["slow"]])
    cell = r" +([-+]?[\d.]+)"
    results = re.findall(rf"^(\S.*?){cell}{cell}{cell}", capsys.readouterr().out, re.MULTILINE)
    rows = [(name.strip(), [*map(float, cells)]) for name, *cells in results]
    names = [name for name, _ in rows]
    *terms, (_, step) = rows[: names.index("step") + 1]
    for place, total in enumerate(step):
        assert sum(cells[place] for _, cells in terms) == pytest.approx(total, abs=0.02 * total)


def test_markdown_has_the_verdict_first_and_one_table(homes: dict[str, str], capsys: Out) -> None:
    assert main(["diff", homes["one"], homes["slow"], "--markdown"]) == ExitCode.ANSWER
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("**forerun diff**: B is slower by ")
    table = [line for line in lines if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1 and len(table) > 5


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
def test_runs_of_another_model_are_not_judged(
    homes: dict[str, str], capsys: Out, tmp_path: Path
) -> None:
    assert main(["diff", str(RECORDED), homes["one"], "--fail-over", "0.1"]) == ExitCode.NO_DATA
    text = capsys.readouterr().out
    assert "not comparable: another model (B has " in " ".join(text.split())
    assert main(["diff", str(RECORDED), str(tmp_path)]) == ExitCode.NO_DATA


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["DIR"], "give B, --windows N M, or --run-id twice"),
        (["DIR", "DIR", "--windows", "0", "1"], "give no B"),
        (["DIR", "--windows", "0", "9"], "it has 0, 1, 2, 3"),
        (["DIR@x", "DIR"], "write DIR@1"),
        (["DIR", "DIR", "--fail-over", "-1"], "give 0 or more"),
        (["DIR", "DIR", "--fail-over", "nan"], "give 0 or more"),
        (["DIR", "DIR", "--run-id", "one"], "give it twice"),
    ],
)
def test_what_cannot_be_asked_has_a_remedy(
    words: list[str], remedy: str, homes: dict[str, str], capsys: Out
) -> None:
    argv = [word.replace("DIR", homes["one"]) for word in words]
    assert main(["diff", *argv]) == ExitCode.USAGE
    assert remedy in capsys.readouterr().err
