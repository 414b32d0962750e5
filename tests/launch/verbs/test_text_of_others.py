"""Text from files, arguments and the environment is shown as text, on every surface."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.calib.answers.transcript import with_prefix
from forerun.calib.shell import printable, printable_lines
from forerun.launch.cli import _PrintableStream, main
from forerun.launch.companion._log_lines import log_line
from forerun.launch.verbs.arguments import print_notes
from forerun.launch.views.table import (
    ReportTable,
    html_of,
    text_of,
    time_cell,
    typed_rows,
)

PACKED = Path(__file__).parents[2] / "golden" / "quickstart.tar.gz"
EVIL = (
    '\x1b]0;PWN\x07\x1b[31m[/][bold red]x</script><script>alert(1)</script>"><img src=x '
    "onerror=alert(1)>\u202e\x9b31m{{7*7}}`touch PWNED`$(touch PWNED)\r\nPWNLINE"
)
VERBS = (
    *(["status"], ["report"], ["report", "--full"], ["plan"], ["plan", "--show", "1"]),
    *(["explain", "running"], ["normal"], ["diff", "SAME"], ["status", "--json"]),
)
ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=30) | st.just(EVIL)


def is_plain(text: str) -> bool:
    return all(char.isprintable() or char == "\n" for char in text)


@given(ANY_TEXT)
def test_every_door_writes_text_as_text(capsys_text: Capsys, text: str) -> None:
    table = ReportTable(
        key="k", title="t", columns=("a", "b"), rows=((text, "x"), ("y", time_cell(1.0)))
    )
    rows = typed_rows(table)
    assert rows[0]["a"] == printable(text) and rows[1]["b (s)"] == 1.0
    for whole in (text_of([table]), html_of([table])):
        assert is_plain(whole) and "<script>" not in html_of([table])
    assert [line.isprintable() for line in with_prefix([text])] == [True] * bool(text)
    print_notes(text)
    log_line(text)
    assert is_plain(written := capsys_text.read())
    assert written.count("\n") == 1 + bool(text)
    assert is_plain(printable_lines(text))
    assert printable_lines(text).count("\n") == text.count("\n")


@given(ANY_TEXT, st.booleans())
def test_standard_output_has_no_controls_but_colours_of_a_terminal(text: str, is_tty: bool) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return is_tty

    file = Terminal()
    _PrintableStream(file).write(f"\x1b[1;31m{text}\x1b[0m")
    written = file.getvalue()
    if is_tty:
        written = written.removeprefix("\x1b[1;31m").removesuffix("\x1b[0m")
    rest = written.replace("\x1b[31m", "") if is_tty else written
    assert is_plain(rest)


class Capsys:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def read(self) -> str:
        out, err = self._capsys.readouterr()
        return out + err


@pytest.fixture(scope="module")
def capsys_text(request: pytest.FixtureRequest) -> Iterator[Capsys]:
    manager = request.config.pluginmanager.getplugin("capturemanager")
    from _pytest.capture import CaptureFixture, SysCapture

    fixture = CaptureFixture(SysCapture, request, _ispytest=True)  # type: ignore[arg-type]
    manager.set_fixture(fixture)
    fixture._start()
    yield Capsys(fixture)
    fixture.close()
    manager.unset_fixture()


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("calibrated")
    with tarfile.open(PACKED) as packed:
        packed.extractall(home, filter="data")
    return home


def with_evil(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {
            name: evil_of(one) if name == key else with_evil(one, key)
            for name, one in value.items()
        }
    return [with_evil(one, key) for one in value] if isinstance(value, list) else value


def evil_of(value: Any) -> Any:
    if isinstance(value, list):
        return [evil_of(one) for one in value]
    return EVIL if isinstance(value, str) else value


def text_keys(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(text_keys, value))
    if not isinstance(value, dict):
        return set()
    mine = {name for name, one in value.items() if evil_of(one) != one}
    return mine.union(*map(text_keys, value.values()))


def values_of(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    return [json.loads(line) for line in lines]


def pairs(home: Path) -> list[tuple[str, str]]:
    paths = sorted(path for path in home.rglob("*.json*") if path.suffix in (".json", ".jsonl"))
    return [
        (str(path.relative_to(home)), key)
        for path in paths
        for key in sorted(text_keys(values_of(path)))
    ]


def test_the_run_of_a_foreign_record_is_named_on_one_line(
    calibrated: Path, tmp_path: Path, capsys_text: Capsys
) -> None:
    home = tmp_path / "run"
    shutil.copytree(calibrated, home)
    (path,) = home.glob("records/*/rank-00001.jsonl")
    lines = [json.dumps(with_evil(value, "run_id")) for value in values_of(path)]
    path.write_text("\n".join(lines), encoding="utf-8")
    capsys_text.read()
    main(["report", str(home)])
    written = capsys_text.read()
    assert "belongs to run " in written and is_plain(written)
    assert not any(line.startswith("PWN") for line in written.splitlines())


@pytest.mark.slow
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_file_of_a_directory_speaks_to_the_terminal(
    calibrated: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys_text: Capsys,
    monkeypatch: pytest.MonkeyPatch,
    data: st.DataObject,
) -> None:
    """Every text of a file under one key is hostile; verbs show it as text and run nothing."""
    name, key = data.draw(st.sampled_from(pairs(calibrated)))
    verb, *words = data.draw(st.sampled_from(VERBS))
    home = tmp_path_factory.mktemp("hostile") / "run"
    shutil.copytree(calibrated, home)
    monkeypatch.chdir(home.parent)
    lines = [json.dumps(with_evil(value, key)) for value in values_of(home / name)]
    (home / name).write_text("\n".join(lines), encoding="utf-8")
    capsys_text.read()
    try:
        code = main([verb, str(home), *(word.replace("SAME", str(calibrated)) for word in words)])
    except SystemExit as err:
        code = int(err.code or 0)
    written = capsys_text.read()
    assert code in (0, 1, 2, 3) and "Traceback" not in written
    assert is_plain(written) and not any(line.startswith("PWN") for line in written.splitlines())
    assert not list(home.parent.glob("PWNED"))
