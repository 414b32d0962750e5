"""One answer file that cannot be made or written is left out and named; all the others come."""

from __future__ import annotations

import json
import os
import re
import shutil
from itertools import cycle
from pathlib import Path

import pytest
from companion_settings import companion_settings

from forerun.calib.answers.analysis import analyse
from forerun.calib.answers.answer import Answer
from forerun.calib.answers.request import Request
from forerun.calib.records import files
from forerun.calib.records import files as json_files
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.launch.companion._companion_loop import CompanionLoop
from forerun.launch.companion._log_lines import WriteGuard
from forerun.launch.store.place import Place
from forerun.launch.views import answers
from forerun.launch.views.answers import write_answer

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
FILES = (
    *("samples.parquet", "request.json", "answer.json", "forecast.json", "decision.json"),
    *("timeline.json.gz", "forecasts.jsonl", "report.html"),
)
FAULTS = (
    UnicodeEncodeError("utf-8", "d\udcff", 1, 2, "surrogates not allowed"),
    *(ValueError("a\x1bb"), KeyError("k"), MemoryError(), RecursionError("deep")),
    *(RuntimeError("r"), AttributeError("a"), ZeroDivisionError("z"), StopIteration()),
    IsADirectoryError(21, "Is a directory"),
)


@pytest.fixture(scope="module")
def answered() -> tuple[Request, Answer]:
    table, request = build_table(read_run(GOLDEN)), Request(now_unix_s=1e9, last_step=11)
    return request, analyse(table, request)


def written_files(directory: Path) -> set[str]:
    return {path.name for path in directory.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault"), list(zip(cycle(FILES), FAULTS, strict=False)))
def test_any_fault_in_writing_one_file_costs_that_file_alone(
    answered: tuple[Request, Answer],
    tmp_path: Path,
    name: str,
    fault: Exception,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = files.os.replace

    def replace(source: Path, target: Path) -> None:
        if target.name == name:
            raise fault
        real(source, target)

    def refuse(path: Path) -> None:
        raise fault

    monkeypatch.setattr(files.os, "replace", replace)
    if name == "forecasts.jsonl":
        monkeypatch.setattr(json_files, "open_owned", refuse)
    writing, place = WriteGuard(), Place(directory=tmp_path, launch_id="one", run_id="r")
    for _ in range(2):
        writing(lambda: write_answer(place, *answered))
    assert set(FILES) - written_files(tmp_path) == {name}
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("[forerun] cannot write ") and name in line and line.isprintable()
    assert re.search(r"\(.+\); .*(all other answers are written|remove )", line)


@pytest.mark.parametrize("maker", ["figures", "render", "page_of", "forecast_json", "step_trace"])
def test_what_cannot_be_made_leaves_the_others(
    answered: tuple[Request, Answer],
    tmp_path: Path,
    maker: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a case that nobody thought of")

    owner = next(one for one in (answers, Answer) if hasattr(one, maker))
    monkeypatch.setattr(owner, maker, fail)
    place = Place(directory=tmp_path, launch_id="one", run_id="r")
    WriteGuard()(lambda: write_answer(place, *answered))
    lost = {
        "forecast_json": {"forecast.json", "decision.json", "answer.json"},
        "step_trace": {"timeline.json.gz"},
    }.get(maker, {"report.html"})
    assert set(FILES) - written_files(tmp_path) == lost & set(FILES)
    output = capsys.readouterr().out
    assert all(name in output for name in lost) and "Traceback" not in output


def test_a_directory_whose_name_is_no_text_has_all_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes of another encoding; what is shown of the name are their numbers."""
    home = tmp_path / os.fsdecode(b"d\xff\xe9")
    shutil.copytree(GOLDEN / "records", home / "records")
    loop = CompanionLoop(companion_settings(home))
    for step in range(13):
        event = {"event": "step", "step": step, "time_s": 0.15, "gap_s": 0.0, "is_hooked": False}
        event |= {"window": 0 if 3 <= step < 11 else None, "is_after_window": step >= 11}
        loop.handle({**event, "flags": [], "unix_s": 1000.0 + step}, 1000.0)
    loop.handle({"event": "window_closed", "window": 0, "last_step": 10}, 1000.0)
    loop.poll(1001.0)
    loop.finish(1002.0)
    assert set(FILES) | {"score.json", "steps.parquet"} <= written_files(home)
    assert r"d\377\351" in (home / "latest" / "report.html").read_text(encoding="utf-8")
    assert json.loads((home / "latest" / "decision.json").read_text())["run_id"]
    out = capsys.readouterr().out
    assert "cannot write" not in out and r"[forerun] report: " in out and r"\udcff" in out
