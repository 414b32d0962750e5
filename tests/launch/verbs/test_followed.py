"""A plan for a script with a parser of its own: what is offered, that very parser takes."""

from __future__ import annotations

import json
import runpy
import shlex
import shutil
from pathlib import Path

import pytest

from forerun.calib.arguments.taken_options import (
    TRANSFORMER_ENGINE,
    absent_options,
    options_in,
)
from forerun.calib.records.run_values import NAME, Launch
from forerun.launch.cli import ExitCode, main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "cpu_dp2"
Out = pytest.CaptureFixture[str]


parse_args = runpy.run_path(str(ROOT / "recipes" / "gpt_arguments.py"))["parse_args"]
ABSENT = (*absent_options(options_in(vars(parse_args([])))), TRANSFORMER_ENGINE)


@pytest.fixture
def noted(tmp_path: Path) -> Path:
    """A calibrated run whose rank 0 noted what its script takes."""
    return with_note(tmp_path / "noted", ABSENT)


def with_note(directory: Path, absent: tuple[str, ...]) -> Path:
    shutil.copytree(GOLDEN, directory)
    launch = Launch(
        argv=("pretrain_gpt.py", "--train-iters", "20"), absent=absent, ranks_per_node=2
    )
    (directory / "records" / "golden-run" / NAME).write_text(json.dumps(launch.to_json()))
    return directory


def plan(directory: Path, capsys: Out, *words: object) -> str:
    assert main(["plan", str(directory), *map(str, words)]) == ExitCode.ANSWER
    return capsys.readouterr().out


def test_every_row_is_taken_by_the_parser(noted: Path, capsys: Out) -> None:
    rows = len(json.loads(plan(noted, capsys, "--json", "--top", 100))["candidates"])
    assert rows > 5
    for row in range(1, rows + 1):
        shown = json.loads(plan(noted, capsys, "--show", row, "--json"))["launch"]
        words = shlex.split(shown["command"])
        place = words.index("pretrain_gpt.py")
        assert shown["refused"] == []
        parse_args(words[place + 1 :])


def test_rows_of_a_run_without_the_note_are_as_before(tmp_path: Path, capsys: Out) -> None:
    """And the parser refuses some of them, which is what the note is for."""
    directory = with_note(tmp_path / "free", ())
    # Memory is so short that layers are recomputed.
    free = json.loads(plan(directory, capsys, "--json", "--top", 100, "--memory-gib", 0.4))
    options = {word for row in free["candidates"] for word in row["options"]}
    assert "--recompute-modules" in options and "--recompute-modules" in ABSENT
    with pytest.raises(SystemExit, match="2"):
        parse_args(["--recompute-modules", "layernorm"])


def test_another_layout_is_told_but_not_how(noted: Path, capsys: Out) -> None:
    assert main(["predict", str(noted), "--recompute", "layernorm"]) == ExitCode.ANSWER
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "pretrain_gpt.py takes no --recompute-modules; its options are not printed"


def test_why_tells_that_the_script_cannot_be_asked(noted: Path, capsys: Out) -> None:
    out = plan(noted, capsys, "--why", "recompute=layernorm")
    _, _, reason = " ".join(out.split()).partition("why not recompute=layernorm: ")
    assert reason.startswith("pretrain_gpt.py takes no --recompute-modules")
