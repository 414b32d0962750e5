"""Damaged and malicious files and sizes: one line, soon, and nothing is run from them."""

from __future__ import annotations

import base64
import gzip
import json
import os
import pickle
import shutil
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from golden_copies import golden_copy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.calib.answers.request import Request
from forerun.calib.arguments.megatron_args import apply_options
from forerun.calib.errors import ForerunError
from forerun.calib.marks.run_records import RankFile, SummaryFile
from forerun.calib.records.files import read_json, read_lines
from forerun.calib.samples.store import read_run, read_table, write_table
from forerun.calib.samples.table import build_table
from forerun.calib.workload.config import RunConfig
from forerun.launch.cli import main
from forerun.launch.options.config_files import read_config

GOLDEN = golden_copy("cpu_dp2")
LINES = sorted(GOLDEN.glob("records/*/rank-00000.jsonl"))[0].read_text().splitlines(keepends=True)
CONFIG = read_run(GOLDEN).configs[0]
HUGE = "1" + "0" * 30
DEEP = "[" * 200_000
HOSTILE: tuple[str, ...] = (
    *(DEEP, '{"a":' * 50_000, HUGE, "1" + "0" * 400, "-" + HUGE, "1e400", "NaN", "-1", "null"),
    *("true", '"x"', "{}", "[]", "[[1]]", '{"a": 1}', '"' + "y" * 10_000 + '"', "1" * 5000, ""),
)
FUZZ = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def run_verb(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The code and the only line that a command says."""
    try:
        code = main(words)
    except SystemExit as err:  # argparse
        code = int(err.code or 0)
    output = capsys.readouterr()
    assert "Traceback" not in output.err and len(output.err) < 2000, output.err[:2000]
    return code, output.err


@pytest.mark.parametrize(
    "option",
    (
        *("hidden-size", "num-layers", "gpus", "micro-batch-size", "global-batch-size"),
        *("seq-length", "tensor-model-parallel-size", "pipeline-model-parallel-size"),
        *("num-experts", "vocab-size", "num-attention-heads", "ffn-hidden-size", "kv-channels"),
        *("context-parallel-size", "expert-model-parallel-size", "hidden-dropout"),
        *("mtp-num-layers", "num-layers-per-virtual-pipeline-stage"),
    ),
)
@pytest.mark.parametrize("value", [HUGE, "1" + "0" * 400, "1" * 5000, "nan", "-" + HUGE])
def test_an_absurd_size_is_refused_at_once(option: str, value: str) -> None:
    with pytest.raises(ForerunError) as error:
        apply_options(CONFIG, [f"--{option}", value])
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)


@pytest.mark.parametrize("words", ["predict --gpus", "plan --gpus", "predict --num-layers"])
def test_a_command_with_an_absurd_size_says_one_line(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, option = words.split()
    code, message = run_verb([verb, str(GOLDEN), option, HUGE], capsys)
    assert code == 2 and len(message.splitlines()) == 1


def rank_file(lines: list[str]) -> RankFile:
    rank_file = RankFile("rank-0.jsonl")
    rank_file.take(lines)
    return rank_file


@FUZZ
@given(st.data())
def test_records_are_read_or_named(data: st.DataObject) -> None:
    lines = list(LINES)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(lines) - 1))
        lines[place] = data.draw(damaged(lines[place]))
    result = rank_file(lines)
    assert result.problems or result.header is not None
    SummaryFile("summaries.jsonl").take(lines)


@st.composite
def damaged(draw: st.DrawFn, line: str) -> str:
    """A line with a part replaced by what nobody expects there."""
    if draw(st.booleans()):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            inside = value.get("config") if isinstance(value.get("config"), dict) else value
            assert isinstance(inside, dict)
            key = draw(st.sampled_from(sorted(inside)))
            mark = "@@PLACE@@"
            inside[key] = mark
            return json.dumps(value).replace(f'"{mark}"', draw(st.sampled_from(HOSTILE))) + "\n"
    at = draw(st.integers(0, len(line)))
    return line[:at] + draw(st.sampled_from(HOSTILE)) + line[draw(st.integers(at, len(line))) :]


@pytest.mark.slow
def test_packed_lines_that_unfold_without_end_are_bounded() -> None:
    def packed(data: bytes) -> str:
        text = base64.b64encode(zlib.compress(data)).decode()
        return '{"type": "packed", "data": "' + text + '"}\n'

    result = rank_file([LINES[0], *([packed(b" " * (64 << 20))] * 10)])
    assert any("not read" in problem for problem in result.problems)
    result = rank_file([LINES[0], packed(b"\n" * (2 << 20))])
    assert len(result.problems) == 1 and not result.records


@pytest.mark.parametrize("text", HOSTILE)
def test_files_of_json_are_read_or_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    for whole in (text, '{"now_unix_s": ' + text + "}", text[:-1]):
        path.write_text(whole)
        for read in (read_json, read_lines):
            try:
                value: Any = read(path)
            except ForerunError as err:
                assert len(str(err)) < 400
                continue
            if isinstance(value, dict):
                assert_request(value)


def assert_request(value: dict[str, Any]) -> None:
    try:
        Request.from_json(value)
    except ForerunError as err:
        assert len(str(err)) < 400


@pytest.mark.parametrize("text", HOSTILE)
def test_a_request_in_a_directory_is_used_or_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {**Request(now_unix_s=1000.0).to_json()}
    for name in whole:
        request = json.dumps({**whole, name: "@@"}).replace('"@@"', text)
        path = tmp_path / "request.json"
        path.write_text(request)
        try:
            assert_request(dict(read_json(path)))
        except ForerunError as err:
            assert len(str(err)) < 400


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_text",
    [DEEP, '{"run_id": "golden-run"}', '{"run_id": "golden-run", "now_unix_s": 1e300}'],
)
def test_report_beside_a_hostile_request_is_one_line(
    request_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(GOLDEN / "records", tmp_path / "records")
    (tmp_path / "request.json").write_text(request_text)
    code, message = run_verb(["report", str(tmp_path)], capsys)
    assert code == 3 and len(message.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("name", ["run.json", "run.yaml"])
def test_a_description_in_a_file_is_read_or_refused(name: str, text: str, tmp_path: Path) -> None:
    config = CONFIG
    path = tmp_path / name
    whole = json.dumps({"num_layers": 2, "hidden_size": "@@"}).replace('"@@"', text)
    described = json.dumps({**config.to_json(), "batch": "@@"}).replace('"@@"', text)
    hugging = json.dumps({"model_type": "llama", "hidden_size": "@@"}).replace('"@@"', text)
    for content in (text, whole, described, hugging):
        path.write_text(content)
        try:
            read_config(path, config)
        except ForerunError as err:
            assert len(str(err)) < 1000


@pytest.mark.slow
def test_a_request_that_is_nobodys_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(GOLDEN / "records", tmp_path / "records")
    (tmp_path / "request.json").write_text("[]")
    assert run_verb(["report", str(tmp_path)], capsys) == (0, "")


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    for read in (read_json, read_lines):
        path = tmp_path / read.__name__
        os.mkfifo(path)
        with pytest.raises(ForerunError, match="is not a file"):
            read(path)


def test_aliases_that_unfold_without_end_are_refused(tmp_path: Path) -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{b}: &{b} [{', '.join(['*' + a] * 9)}]" for a, b in pairwise("abcdefghi")]
    path = tmp_path / "run.yaml"
    path.write_text("\n".join(lines) + "\nnum_layers: *i\n")
    with pytest.raises(ForerunError, match="values"):
        read_config(path, CONFIG)


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("part", ["model", "parallelism", "batch", "cadence", "hidden_dropout"])
def test_a_config_is_read_or_refused(part: str, text: str) -> None:
    whole = CONFIG.to_json()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    variants = [{**whole, part: value}]
    if isinstance(whole[part], dict):
        variants += [{**whole, part: {**whole[part], name: value}} for name in whole[part]]
    for variant in variants:
        try:
            RunConfig.from_json(variant)
        except ForerunError as err:
            assert len(str(err)) < 600


class Planted:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def with_extension(table: pa.Table, column: str, secret: bytes) -> pa.Table:
    """The table with a column of a type that old versions of PyArrow unpickle."""
    place = table.schema.get_field_index(column)
    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": secret,
    }
    field = table.schema.field(place).with_metadata(metadata)
    return table.cast(table.schema.set(place, field))


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples") / "samples.parquet"
    write_table(path, build_table(read_run(GOLDEN)))
    return path


def test_nothing_is_unpickled_from_a_table(samples: Path, tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    whole = with_extension(pq.read_table(samples), "run_id", pickle.dumps(Planted(planted)))
    path = tmp_path / "samples.parquet"
    pq.write_table(whole, path)
    try:
        read_table(path)
    except ForerunError as err:
        assert len(str(err)) < 600
    assert not planted.exists()


@pytest.mark.parametrize("column", ["run_id", "time_s", "rank", "table", "is_probe"])
def test_columns_of_other_types_are_named(samples: Path, tmp_path: Path, column: str) -> None:
    whole = pq.read_table(samples)
    for values in (
        pa.array([["a"]] * len(whole)),
        pa.array([{"a": 1}] * len(whole)),
        pa.array([b"\xff\xfe"] * len(whole)),
        pa.array(["nonsense"] * len(whole)),
        pa.array([None] * len(whole), pa.null()),
        pa.array([2**64 - 1] * len(whole), pa.uint64()),
    ):
        place = whole.schema.get_field_index(column)
        path = tmp_path / "samples.parquet"
        pq.write_table(whole.set_column(place, column, values), path)
        try:
            read_table(path)
        except ForerunError as err:
            assert len(str(err)) < 600 and "\n" not in str(err)


def test_a_table_of_billions_of_rows_is_refused_unread(tmp_path: Path) -> None:
    rows = pa.table({"table": pa.DictionaryArray.from_arrays(
        pa.array([0] * 1_000_000, pa.int8()), pa.array(["steps"]))})  # fmt: skip
    rows = rows.replace_schema_metadata({b"forerun_schema": b"1"})
    path = tmp_path / "samples.parquet"
    with pq.ParquetWriter(path, rows.schema) as writer:
        for _ in range(20):
            writer.write_table(rows)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(ForerunError, match="rows"):
        read_table(path)


def test_a_long_text_that_is_repeated_is_held_once(tmp_path: Path, samples: Path) -> None:
    many = 200_000
    whole = pq.read_table(samples).slice(0, 1)
    whole = pa.concat_tables([whole] * 1).take(pa.array([0] * many, pa.int32()))
    place = whole.schema.get_field_index("device")
    long = pa.DictionaryArray.from_arrays(
        pa.array([0] * many, pa.int32()), pa.array(["y" * 1_000_000])
    )
    path = tmp_path / "samples.parquet"
    pq.write_table(whole.set_column(place, "device", long), path)
    assert path.stat().st_size < 4 << 20
    read_table(path)  # 200 GB of text if it were not


@FUZZ
@given(st.data())
def test_a_damaged_table_is_named(samples: Path, data: st.DataObject) -> None:
    raw = bytearray(samples.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = samples.with_name("damaged.parquet")
    path.write_bytes(raw[: data.draw(st.integers(len(raw) // 2, len(raw)))])
    try:
        read_table(path)
    except ForerunError as err:
        assert len(str(err)) < 2000


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("source", ["kineto", "nccl-tests", "nccl-inspector"])
def test_imports_are_read_or_refused(
    source: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = {"In msg nelems": 8, "Group size": 2, "dtype": "Float", "stream": 7}
    event = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32", "ts": 1}
    event |= {"dur": 2, "args": args}
    path = tmp_path / "trace.json"
    variants = [text, '{"traceEvents": ' + text + "}", '{"traceEvents": [' + text + "]}"]
    for name in (*event, "args"):
        whole = json.dumps({"traceEvents": [{**event, name: "@@"}]})
        variants.append(whole.replace('"@@"', text))
    for content in variants:
        path.write_text(content)
        argv = ["import", source, str(path), "--out", str(tmp_path / "o.csv")]
        argv += ["--device", "x"] if source == "nccl-inspector" else []
        code, message = run_verb(argv, capsys)
        assert code in (0, 2, 3), message


def test_a_trace_that_unpacks_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from forerun.launch.verbs import import_tables

    monkeypatch.setattr(import_tables, "MAX_NBYTES", 1 << 20)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b" " * (4 << 20)))
    code, message = run_verb(
        ["import", "kineto", str(path), "--out", str(tmp_path / "o.csv")], capsys
    )
    assert code == 3 and "MiB" in message
