"""Every file that a run leaves is what its published schema says, no name more and none less."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from companion_settings import companion_settings
from json_schema import Mismatch, check
from written_files import check_written_files, written_files

from forerun.calib.records.run_values import Launch
from forerun.launch.cli import main
from forerun.launch.companion._companion_loop import CompanionLoop
from forerun.launch.sinks.sink import Sink
from forerun.launch.store.launch_files import LaunchFiles
from forerun.launch.store.place import place_of
from forerun.launch.verbs.arguments import FILE_NAMES, file_schema

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
WINDOW_END, TRAIN_ITERS, DRIFT_AT = 11, 90, 50
OF_A_RUN = {
    *("answer", "decision", "forecast", "score", "drift", "request"),
    *("launch", "command", "forecasts", "stop-request"),
}
FilesByName = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a completed run of two ranks, with a drift on its way."""
    home = tmp_path_factory.mktemp("run")
    shutil.copytree(GOLDEN / "records", home / "records")
    for path in (home / "records" / "golden-run").glob("*.jsonl"):
        text = path.read_text(encoding="utf-8")
        longer = text.replace('"train_iters": 20', f'"train_iters": {TRAIN_ITERS}')
        path.write_text(longer, encoding="utf-8")
    noted = json.dumps(Launch(argv=("t.py", "--x"), launcher=("torchrun",)).to_json())
    (home / "records" / "golden-run" / "command.json").write_text(noted, encoding="utf-8")
    settings = companion_settings(home, launch_id="first", deadline_unix_s=2e9)
    place_of(settings).note_run()
    loop = CompanionLoop(settings, open_sink=lambda _: Sink("nowhere"))
    for step in range(TRAIN_ITERS):
        time_s = 0.15 if step < DRIFT_AT else 0.3
        loop.handle(_step(step, time_s), 1000.0 + step)
        if step == WINDOW_END - 1:
            closed = {"event": "window_closed", "window": 0, "last_step": step}
            loop.handle(closed, 1000.0 + step)
            loop.poll(1001.0 + step)
    loop.handle({"event": "end", "unix_s": 1000.0 + TRAIN_ITERS}, 1000.0 + TRAIN_ITERS)
    loop.finish(1001.0 + TRAIN_ITERS)
    LaunchFiles(home, "first").ask("the limit is near")
    return home


def _step(step: int, time_s: float) -> dict[str, Any]:
    return {
        "event": "step", "step": step, "time_s": time_s, "gap_s": 0.0, "is_hooked": False,
        "window": 0 if 3 <= step < WINDOW_END else None, "is_after_window": step >= WINDOW_END,
        "flags": ["warmup"] if step < 3 else [], "unix_s": 1000.0 + step,
    }  # fmt: skip


@pytest.fixture(scope="module")
def files_by_name(directory: Path) -> FilesByName:
    values: FilesByName = {}
    for name, value in written_files(directory):
        values.setdefault(name, []).append(value)
    return values


def test_every_file_is_there_and_is_what_its_schema_says(directory: Path) -> None:
    assert check_written_files(directory) == OF_A_RUN


def test_a_drift_and_an_end_were_among_what_was_looked_at(files_by_name: FilesByName) -> None:
    assert files_by_name["drift"][0]["events"]
    assert {line["kind"] for line in files_by_name["forecasts"]} == {"forecast", "end"}
    assert files_by_name["score"][0]["track"]["is_complete"]


@pytest.mark.parametrize("name", sorted(OF_A_RUN))
def test_an_unknown_name_and_a_missing_one_are_told(files_by_name: FilesByName, name: str) -> None:
    schema, value = file_schema(name), files_by_name[name][0]
    needed = _needed(schema, value)
    assert "schema" in needed
    for gone in needed:
        lacking = {key: field_value for key, field_value in value.items() if key != gone}
        with pytest.raises(Mismatch):
            check(lacking, schema)
    with pytest.raises(Mismatch):
        check({**value, "unheard_of": 1}, schema)
    with pytest.raises(Mismatch):
        check({**value, "schema": 99}, schema)


def _needed(schema: dict[str, Any], value: dict[str, Any]) -> set[str]:
    """Names that the file cannot do without: those that it has and its schema requires."""
    named: set[str] = set()
    pending: list[Any] = [schema["$defs"][schema["$ref"].rpartition("/")[2]]]
    while pending:
        one = pending.pop()
        if "$ref" in one:
            pending.append(schema["$defs"][one["$ref"].rpartition("/")[2]])
        named |= set(one.get("required", ()))
        pending += [*one.get("allOf", ()), *one.get("anyOf", ())[:1]]
    return named & value.keys()


def _times(value: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Every object that holds a time in Unix seconds, and the name of the time."""
    if isinstance(value, dict):
        yield from ((value, name) for name in value if name.endswith("unix_s"))
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        yield from _times(one)


def test_every_time_is_told_by_the_calendar_too(files_by_name: FilesByName) -> None:
    seen = set()
    for name, values in files_by_name.items():
        for holder, key in _times(copy.deepcopy(values)):
            if holder[key] is not None:
                assert holder[key.removesuffix("unix_s") + "iso"], (name, key)
                seen.add(name)
    assert seen == {
        *("answer", "decision", "forecast", "forecasts", "drift", "request"),
        "stop-request",
    }


def test_the_decision_holds_the_forecast_that_it_was_made_on(files_by_name: FilesByName) -> None:
    (decision,), lines = files_by_name["decision"], files_by_name["forecasts"]
    assert decision["forecast"]["finish_p50_unix_s"] == lines[0]["finish_p50_unix_s"]


@pytest.mark.parametrize("name", sorted(FILE_NAMES))
def test_a_schema_is_printed_by_the_name_of_its_file(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["report", "--json-schema", name])
    assert stop.value.code in (0, None)
    printed = json.loads(capsys.readouterr().out)
    assert printed == file_schema(name)
    assert printed["$id"].startswith(f"urn:forerun:{name}:")
    if find_spec("jsonschema") is not None:
        import jsonschema  # pyright: ignore[reportMissingImports]

        jsonschema.Draft202012Validator.check_schema(printed)


def test_a_file_that_nobody_leaves_has_no_schema(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["report", "--json-schema", "decisions"])
    assert stop.value.code == 2
    assert "'decisions' is not a choice; did you mean" in capsys.readouterr().err
