"""A row of a plan as a command: what is printed is what runs, on a shell and as a file."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from forerun.calib.records.run_values import NAME, Launch
from forerun.launch.cli import ExitCode, main

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
RUN = "golden-run"
ARGV = (
    *("train.py", "--num-layers", "2", "--micro-batch-size", "2", "--global-batch-size", "16"),
    *("--train-iters", "20", "--hub-token", "***"),
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A calibrated run with what its rank 0 noted; torchrun is a script that prints its words."""
    directory = tmp_path / "run"
    shutil.copytree(GOLDEN, directory)
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$CUDA_DEVICE_MAX_CONNECTIONS" "$@"\n')
    torchrun.chmod(0o755)
    launch = Launch(
        argv=ARGV,
        launcher=(str(torchrun), "--standalone", "--nproc-per-node", "2"),
        folder=str(tmp_path),
        ranks_per_node=2,
    )
    (directory / "records" / RUN / NAME).write_text(json.dumps(launch.to_json()))
    return directory


def plan_output(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["plan", *map(str, words)]) == ExitCode.ANSWER
    return capsys.readouterr().out


def row_of(home: Path, label: str, capsys: pytest.CaptureFixture[str]) -> int:
    result = json.loads(plan_output(capsys, home, "--json", "--top", 100))
    return 1 + [one["label"] for one in result["candidates"]].index(label)


def test_the_script_runs_what_was_shown_once_all_is_set(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, path = row_of(home, "TP2 mbs4", capsys), home.parent / "go.sh"
    value = json.loads(plan_output(capsys, home, "--show", row, "--write", path, "--json"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700 and value["script"] == str(path)
    text = path.read_text()
    assert f"for run {RUN}" in text and "90 %" in text and "\nset -eu\n" in text
    stopped = subprocess.run([path], capture_output=True, text=True, check=False)
    assert stopped.returncode != 0 and "the value of --hub-token" in stopped.stderr
    environ = {**os.environ, "ARG_HUB_TOKEN": "my secret"}
    ran = subprocess.run([path], capture_output=True, text=True, check=True, env=environ)
    words = ran.stdout.splitlines()
    assert words[:5] == [str(home.parent), "1", "--standalone", "--nproc-per-node", "2"]
    assert words[words.index("--hub-token") + 1] == "my secret"
    assert words[words.index("--micro-batch-size") + 1] == "4"
    assert words[words.index("--tensor-model-parallel-size") + 1] == "2"
    assert "my secret" not in text


@pytest.mark.slow
def test_what_others_wrote_into_the_note_is_never_run_nor_obeyed_by_a_terminal(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names and values of variables, words and the folder, with what a shell or a screen obeys."""
    path, note = home.parent / "go.sh", home / "records" / RUN / NAME
    value = json.loads(note.read_text())
    (folder := home.parent / "with\ttab").mkdir()
    odd = ["--title", "\x1b]0;x\x07", "--note", "\u202etxt.exe", "--end", "a\n", "--b", "\udcff"]
    value["environment"] = {
        **{"X=1; touch PWNED; Y": "1", "\x1b[2J": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "a\tb"},
        **{"PATH": "/usr/bin:/bin", "NUL": "a\0b"},
    }
    value |= {"folder": str(folder), "argv": ["train.py", *odd, "--x$(touch PWNED)", "***"]}
    note.write_text(json.dumps(value))
    out = plan_output(capsys, home, "--show", 0, "--write", path)
    assert all(line.isprintable() for line in (*out.split("\n"), *path.read_text().split("\n")))
    assert "the variable X=1; touch PWNED; Y is left out" in out and "\\x1b[2J is left out" in out
    for shell in ("sh", "bash"):
        command = [shell, path]
        done = subprocess.run(command, capture_output=True, check=False)
        assert done.returncode != 0 and b"not kept" in done.stderr
        environ = {**os.environ, "ARG_X_TOUCH_PWNED": "my own"}
        ran = subprocess.run(command, capture_output=True, check=True, env=environ)
        begin = "\n".join(
            (str(folder), "a\tb", "--standalone", "--nproc-per-node", "2", "train.py")
        )
        whole = "\n".join((begin, *odd, "--x$(touch PWNED)", "my own", ""))
        assert ran.stdout == os.fsencode(whole)
    assert not list(home.parent.rglob("*PWNED*"))


@pytest.mark.slow
def test_a_note_with_words_that_no_process_was_given_is_damaged(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = home / "records" / RUN / NAME
    value = json.loads(note.read_text())
    note.write_text(json.dumps({**value, "argv": ["train.py", "a\0b"]}))
    assert "recipes/pretrain_gpt.py" in plan_output(capsys, home, "--show", 1)


@pytest.mark.slow
def test_a_file_of_somebody_else_s_stays(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home.parent / "mine.sh"
    path.write_text("echo mine\n")
    assert main(["plan", str(home), "--write", str(path)]) == ExitCode.USAGE
    assert "mine.sh: exists and was not written" in capsys.readouterr().err
    assert path.read_text() == "echo mine\n"
    other = home.parent / "ours.sh"
    plan_output(capsys, home, "--show", 1, "--write", other)
    first = other.read_text()
    plan_output(capsys, home, "--show", 2, "--write", other)
    assert other.read_text() != first


@pytest.mark.slow
def test_without_the_note_the_request_of_the_companion_tells_the_arguments(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "records" / RUN / NAME).write_text("damaged")
    out = plan_output(capsys, home, "--show", 1)
    assert "torchrun \\\n    --standalone" in out and "recipes/pretrain_gpt.py" in out
    (home / "request.json").unlink()
    assert '"${SCRIPT:?' in plan_output(capsys, home, "--show", 1)
