"""Tables from ``convert.py`` give the figures of the published ones, to the digit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from forerun.benchmarks.protocols.collectives import validate_collectives
from forerun.benchmarks.protocols.operators import validate_operators
from forerun.benchmarks.protocols.scores import PROTOCOLS, score_rows
from forerun.benchmarks.published.convert import main as convert
from forerun.benchmarks.published.readers import read_published, read_steps
from forerun.calib.importers import canonical_steps
from forerun.calib.importers.canonical_tables import read_table, table_kind
from forerun.launch.cli import ExitCode, main
from forerun.launch.known.table_files import read_frame

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "published" / "convert.py"
STEPS = sorted((ROOT / "tests" / "golden" / "steps").glob("*.csv"))
PAPER = {
    "operator/GPU-1_linear3_fp16.csv": "mp,b,l,dim,F_dur(us),B_dur(us)\n2,4,1024,512,30,61\n",
    "operator/GPU-1_lastStage_optimizer_fp16.csv": "mp,dim,encoders,dur(us)\n1,64,2,100\n",
    "operator/GPU-1.csv": "GPU,Function,Best_model\nGPU-1,linear3,xgboost\n",
    "nccl/GPU-1_allreduce_large_fp16_2_4.csv": "shape,nodes,GPUsPerNode,dur(us)\n512,2,4,9\n",
}


def converted(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, arguments)])
    return convert()


def test_a_converted_table_scores_like_the_published_one(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    published = ROOT / "tests" / "golden" / "published" / f"{name}.csv"
    table = read_published(read_frame(published), published.name)
    what = table_kind(table)
    is_operators = what == "operators"
    run = validate_operators if is_operators else validate_collectives
    frame = run(table, seeds=range(1), protocols=tuple(PROTOCOLS[what]))
    expected = score_rows(frame, published.name)
    assert converted(monkeypatch, published, "--out", tmp_path) == ExitCode.ANSWER
    capsys.readouterr()
    out = tmp_path / published.name
    written = read_table(read_frame(out), published.name)
    scored = run(written, seeds=range(1), protocols=tuple(PROTOCOLS[what]))
    assert score_rows(scored, out.name) == expected
    has_layers = is_operators and (table["kind"] == "layer").any()
    code = main(["import", "steps", str(out), "--out", str(tmp_path / "machine")])
    assert code == (ExitCode.USAGE if has_layers else ExitCode.ANSWER)
    other = str(tmp_path / "other")
    assert main(["import", "steps", str(published), "--out", other]) == ExitCode.USAGE
    assert "convert.py" in capsys.readouterr().err


@pytest.mark.parametrize("published", STEPS, ids=lambda path: path.stem)
def test_steps_come_back_as_they_were_published(
    published: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = read_steps(read_frame(published), published.name)
    assert converted(monkeypatch, published, "--out", tmp_path) == ExitCode.ANSWER
    messages = capsys.readouterr().err
    assert all(skip.reason in messages for skip in table.skipped)
    reread = canonical_steps.read_steps(read_frame(tmp_path / published.name), published.name)
    for row, back in zip(table.rows, reread.rows, strict=True):
        for field in ("row_id", "machine", "group", "kind", "traits", "flag"):
            assert getattr(row, field) == getattr(back, field)
        assert row.measured_s == pytest.approx(back.measured_s, rel=1e-15, nan_ok=True)


def test_raw_tables_of_the_paper_are_read_under_their_names(tmp_path: Path) -> None:
    home = tmp_path / "regressors" / "Cluster"
    for name, text in PAPER.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    command = [sys.executable, str(SCRIPT), str(home), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "no measurements" in done.stderr
    rows = pd.read_csv(tmp_path / "paper-operators.csv").set_index("group")
    assert rows.loc["linear3", "shape"].tolist() == ["4096x512x1024"] * 2
    assert rows.loc["linear3", "time_s"].tolist() == pytest.approx([30e-6, 61e-6])
    params = 2 * (12 * 64**2 + 13 * 64) + 50304 * 64 + 2 * 64
    assert str(rows.loc["lastStage_optimizer", "shape"]) == str(params)
    (transfer,) = pd.read_csv(tmp_path / "paper-collectives.csv").to_dict("records")
    assert (transfer["fabric"], transfer["nbytes"]) == ("Cluster", 1024)
    assert (transfer["num_ranks"], transfer["num_nodes"]) == (8, 2)


@pytest.mark.parametrize(
    ("name", "text", "code", "part"),
    [
        ("t.csv", "a,b\n1,2\n", ExitCode.USAGE, "which also needs"),
        ("t.csv", "", ExitCode.NO_DATA, "no rows"),
        ("GPU_linear1_fp16.csv", "a,b\n1,2\n", ExitCode.USAGE, "which also needs"),
        ("mine.csv", "mp,b,l,dim,dur(us)\n1,1,1,1,1\n", ExitCode.USAGE, "keep the names"),
        ("t.txt", "a", ExitCode.USAGE, ".parquet"),
    ],
)
def test_what_cannot_be_converted_is_one_line(
    name: str,
    text: str,
    code: int,
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_text(text)
    assert converted(monkeypatch, tmp_path / name, "--out", tmp_path / "out") == code
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and part in err and not (tmp_path / "out").exists()


def test_packed_steps_are_the_same_file_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("a", "b"):
        assert converted(monkeypatch, STEPS[0], "--out", tmp_path / folder, "--packed") == 0
    (one,), (other,) = ((tmp_path / folder).glob("steps_*.csv.gz") for folder in ("a", "b"))
    assert one.read_bytes() == other.read_bytes()
