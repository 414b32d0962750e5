"""Files in, tables out: damage is named and skipped, the rest survives."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.calib.errors import RecordError
from forerun.calib.records.files import read_json, write_json
from forerun.calib.records.record_kinds import SCHEMA, StepRecord, to_dict
from forerun.calib.samples.columns import FRAMES, normalise
from forerun.calib.samples.store import read_run, read_table, run_ids, write_table
from forerun.calib.samples.table import SampleTable, build_table
from forerun.calib.workload.config import RunConfig


def _rank_file(directory: Path, rank: int) -> Path:
    return directory / "records" / "run-a" / f"rank-{rank:05d}.jsonl"


def test_a_clean_run_is_read_whole(write_run, config: RunConfig) -> None:
    run = read_run(write_run())
    assert run.problems == ()
    assert (run.run_id, run.world_size, list(run.records)) == ("run-a", 2, [0, 1])
    assert run.configs == {0: config, 1: config}
    assert len(run.records[0]) == len(run.records[1]) > 50


def test_the_newest_run_is_the_default(write_run) -> None:
    write_run(run_id="z-old", started_unix_s=10.0)
    directory = write_run(run_id="a-new", started_unix_s=20.0)
    assert run_ids(directory) == ("z-old", "a-new")
    assert read_run(directory).run_id == "a-new"
    assert read_run(directory, "z-old").run_id == "z-old"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not json\n", "not JSON"),
        ('{"type":"step","step":1', "cut off"),
        ("[1, 2]\n", "holds a list"),
        ('{"type":"later"}\n', "record type 'later'"),
        ('{"type":"step","step":1}\n', "damaged"),
    ],
)
def test_a_damaged_line_is_named_and_the_rest_survives(write_run, line: str, reason: str) -> None:
    directory = write_run()
    whole = read_run(directory)
    path = _rank_file(directory, 0)
    lines = path.read_text().splitlines(keepends=True)
    position = len(lines) if not line.endswith("\n") else 10
    path.write_text("".join([*lines[:position], line, *lines[position:]]))
    run = read_run(directory)
    assert run.records == whole.records
    (problem,) = run.problems
    assert problem.startswith(f"run-a/rank-00000.jsonl:{position + 1}: ")
    assert reason in problem


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("duration_ns", float("nan")),
        ("duration_ns", -5),
        ("step", -1),
        ("duration_ns", 1.5),
        ("step", "7"),
        ("is_hooked", None),
    ],
)
def test_values_that_cannot_be_are_never_used(write_run, field: str, value: object) -> None:
    directory = write_run()
    step = StepRecord(step=99, window=0, start_ns=1, duration_ns=1, gap_ns=0, is_hooked=True)
    record = {**to_dict(step), field: value}
    with _rank_file(directory, 0).open("a") as file:
        file.write(json.dumps(record) + "\n")
    run = read_run(directory)
    assert len(run.problems) == 1
    assert not build_table(run).steps["step"].eq(99).any()


def test_a_foreign_file_is_named_and_skipped(write_run) -> None:
    directory = write_run(run_id="run-b", ranks=[1], folder="run-a")
    write_run(run_id="run-a", ranks=[0])
    run = read_run(directory, "run-a")
    assert list(run.records) == [0]
    assert "run-a/rank-00001.jsonl: belongs to run run-b; skipped" in run.problems
    assert "records of 1 of 2 ranks" in run.problems


def test_a_file_of_another_world_size_is_named_and_skipped(write_run) -> None:
    write_run(ranks=[0, 1])
    directory = write_run(ranks=[3], world_size=4)
    run = read_run(directory)
    assert list(run.records) == [0, 1]
    assert any("world_size 4 differs from 2" in problem for problem in run.problems)


def test_a_newer_schema_is_refused_by_name(write_run) -> None:
    directory = write_run(schema=SCHEMA + 1)
    with pytest.raises(RecordError, match=f"schema {SCHEMA + 1} is newer.*upgrade"):
        read_run(directory, "run-a")
    with pytest.raises(RecordError, match="--calibrate"):
        read_run(directory)


def test_an_empty_file_is_named(write_run) -> None:
    directory = write_run()
    _rank_file(directory, 1).write_text("")
    assert any("rank-00001.jsonl:1: file is empty" in p for p in read_run(directory).problems)


def test_nothing_recorded_says_what_to_do(tmp_path: Path, write_run) -> None:
    with pytest.raises(RecordError, match="start the training run with --calibrate"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(RecordError, match="runs there: run-a"):
        read_run(write_run(), "run-x")


def test_a_table_is_read_as_it_was_written(write_run, tmp_path: Path) -> None:
    table = build_table(read_run(write_run()))
    path = tmp_path / "samples.parquet"
    write_table(path, table)
    reread = read_table(path)
    assert reread.equals(table)
    assert reread.sha256 == table.sha256
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".tmp"] == []


_VALUES = {
    "str": st.text(alphabet="abcx123", max_size=6),
    "int64": st.integers(min_value=-(2**62), max_value=2**62),
    "float64": st.floats(allow_nan=False, allow_infinity=False),
    "bool": st.booleans(),
}


@st.composite
def _tables(draw: st.DrawFn) -> SampleTable:
    frames = {}
    for name, types in FRAMES.items():
        rows = draw(
            st.lists(st.fixed_dictionaries({c: _VALUES[k] for c, k in types.items()}), max_size=3)
        )
        frames[name] = normalise(name, pd.DataFrame(rows, columns=list(types)))
    return SampleTable(**frames)


@pytest.mark.slow
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(table=_tables())
def test_any_table_survives_writing(table: SampleTable, tmp_path: Path) -> None:
    write_table(tmp_path / "any.parquet", table)
    assert read_table(tmp_path / "any.parquet").equals(table)


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "samples.parquet"
    with pytest.raises(RecordError, match="does not exist"):
        read_table(path)
    path.write_text("no parquet")
    with pytest.raises(RecordError, match="not a sample table"):
        read_table(path)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(RecordError, match="no schema"):
        read_table(path)
    newer = pa.table({"table": ["steps"]}).replace_schema_metadata({"forerun_schema": "99"})
    pq.write_table(newer, path)
    with pytest.raises(RecordError, match="schema 99, newer"):
        read_table(path)


def test_json_is_replaced_whole_and_damage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "plan.json"
    write_json(path, {"schema": 1, "b": [1.5, None], "a": "x"})
    assert read_json(path) == {"schema": 1, "b": [1.5, None], "a": "x"}
    with pytest.raises(ValueError):
        write_json(path, {"time_s": float("nan")})
    assert read_json(path)["schema"] == 1
    path.write_text("{")
    with pytest.raises(RecordError, match="cannot be read"):
        read_json(path)
    assert [p.name for p in path.parent.iterdir()] == ["plan.json"]
