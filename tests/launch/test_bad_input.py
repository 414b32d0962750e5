"""Errors of users and disks: one clear line each, and training as if nothing had happened."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from golden_copies import golden_copy
from launched import Launch

from forerun.launch.cli import ExitCode, main

ROOT = Path(__file__).parent.parent.parent
GOLDEN = golden_copy("cpu_dp2")
_BITS = re.compile(r"iteration +\d+/.*loss bits (0x[0-9a-f]{8})")


def train(directory: Path, *flags: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    words = ("--standalone", "--nproc-per-node", ranks, ROOT / "recipes" / "pretrain_gpt.py")
    small = ("--train-iters", 10, "--hidden-size", 64, "--global-batch-size", 4)
    return Launch(directory, *words, *small, *flags, num_workers=ranks).wait()


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return _BITS.findall(train(tmp_path_factory.mktemp("bare")).stdout)


@pytest.mark.slow
def test_an_unknown_flag_is_one_line_and_training_goes_on(bare: list[str], tmp_path: Path) -> None:
    done = train(tmp_path, "--calibrate", "--calibrate-stepz=8")
    assert done.returncode == 0
    taken, line = [text for text in done.stdout.splitlines() if "calibrate-stepz" in text]
    assert taken.startswith("[forerun] taken from the arguments: ")
    assert "--calibrate-steps" in line and "training goes on" in line
    assert _BITS.findall(done.stdout) == bare and len(bare) == 10


@pytest.mark.slow
def test_a_directory_that_cannot_be_written_is_one_line_and_training_goes_on(
    bare: list[str], tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    done = train(tmp_path, "--calibrate", f"--calibrate-dir={blocked}/out", "--calibrate-steps=4")
    assert done.returncode == 0
    both = (done.stdout + done.stderr).splitlines()
    lines = [text for text in both if "[forerun]" in text and str(blocked) in text]
    assert [" taken from the arguments: " in text for text in lines] == [True, False], lines
    assert not any("Traceback" in text for text in both)
    assert _BITS.findall(done.stdout) == bare


@pytest.mark.slow
def test_virtual_stages_are_forecast_and_nothing_of_them_is_left_out(tmp_path: Path) -> None:
    done = train(
        tmp_path, "--pipeline-model-parallel-size", "2",
        "--num-layers-per-virtual-pipeline-stage", "1",
        "--calibrate", f"--calibrate-dir={tmp_path}", "--calibrate-steps=4",
        "--calibrate-wandb=off", ranks=2,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert " · step " in done.stdout and "[forerun] ended " in done.stdout
    report = (tmp_path / "latest" / "report.html").read_text(encoding="utf-8")
    assert "Left out by the model" not in report


@pytest.mark.slow
def test_a_setting_that_is_not_modelled_is_named_and_forecast_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(GOLDEN / "records", tmp_path / "records")
    for path in tmp_path.glob("records/*/rank-*.jsonl"):
        text = path.read_text(encoding="utf-8")
        assert text.count('"unmodelled": []') == 1
        text = text.replace('"unmodelled": []', '"unmodelled": ["cpu_offloading"]')
        path.write_text(text, encoding="utf-8")
    assert main(["report", str(tmp_path)]) == ExitCode.ANSWER
    assert "Left out by the model: cpu_offloading." in capsys.readouterr().out
    assert main(["predict", str(tmp_path)]) == ExitCode.ANSWER
    assert "step" in capsys.readouterr().out


def test_a_run_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(GOLDEN), "--run-id", "another"]) == ExitCode.NO_DATA
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "'another'" in err


def test_a_damaged_sample_table_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (GOLDEN / "samples.parquet").read_bytes()
    (tmp_path / "samples.parquet").write_bytes(whole[: len(whole) // 2])
    assert main(["plan", str(tmp_path)]) == ExitCode.NO_DATA
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "samples.parquet" in err


def test_a_damaged_record_file_is_named_and_the_rest_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(GOLDEN / "records", tmp_path / "records")
    (path,) = tmp_path.glob("records/*/rank-00001.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    lines[40] = lines[40][: len(lines[40]) // 2] + "\n"
    path.write_text("".join(lines), encoding="utf-8")
    assert main(["predict", str(tmp_path), "--micro-batch-size", "4"]) == ExitCode.ANSWER
    out = capsys.readouterr()
    assert out.err.count("\n") == 1 and "rank-00001.jsonl:41" in out.err
    assert "step" in out.out


def test_a_file_of_another_run_is_named_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(GOLDEN / "records", tmp_path / "records")
    (path,) = tmp_path.glob("records/*/rank-00001.jsonl")
    text = path.read_text(encoding="utf-8").replace(path.parent.name, "another-run")
    path.write_text(text, encoding="utf-8")
    assert main(["predict", str(tmp_path)]) == ExitCode.ANSWER
    err = capsys.readouterr().err
    assert "belongs to run another-run" in err and "records of 1 of 2 ranks" in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--pipeline-model-parallel-size", "2", "--num-layers", "5"], "num_layers 5"),
        (["--tensor-model-parallel-size", "3", "--gpus", "3"], "is not a multiple of tp 3"),
        (["--micro-batch-size", "0"], "micro_batch_size 0"),
        (["--tensor-model-paralel-size", "2"], "--tensor-model-parallel-size"),
    ],
)
def test_an_impossible_layout_is_a_usage_error(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(GOLDEN), *argv]) == ExitCode.USAGE
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and words in err and ";" in err
