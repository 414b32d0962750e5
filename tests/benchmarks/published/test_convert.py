"""Tables from ``convert.py`` give the figures of the published ones, to the digit."""

from __future__ import annotations

import sys
from pathlib import Path

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

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "published" / "convert.py"
STEPS = sorted((ROOT / "tests" / "golden" / "steps").glob("*.csv"))


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


@pytest.mark.parametrize(
    ("name", "text", "code", "part"),
    [
        ("t.csv", "a,b\n1,2\n", ExitCode.USAGE, "which also needs"),
        ("t.csv", "", ExitCode.NO_DATA, "no rows"),
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
