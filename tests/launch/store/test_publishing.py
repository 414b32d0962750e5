"""Who may show its answers at the top of a directory; claims of real processes, real files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun.calib.records.files import MARKUP_COMMENT
from forerun.hooks.process.launch_identity import process_start
from forerun.launch.store.publishing import BEAT_S, OWNER, STALE_S, Place, Publisher, this_host

NOW = 2e9


@pytest.fixture
def other() -> Iterator[int]:
    """The process id of a companion that lives."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate(b"\n")


def claim(directory: Path, pid: int, /, **values: Any) -> dict[str, Any]:
    value = {
        **{"schema": 1, "launch_id": "theirs", "run_id": "r0", "host": this_host(), "pid": pid},
        **{"pid_start": process_start(pid), "unix_s": NOW - 9999.0, **values},
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / OWNER).write_text(json.dumps(value))
    return value


def publisher(directory: Path, launch_id: str = "ours", run_id: str = "r1") -> Publisher:
    return Publisher(Place(directory=directory, launch_id=launch_id, run_id=run_id))


def write(place: Place, name: str, text: str) -> None:
    place.path.mkdir(parents=True, exist_ok=True)
    temporary = place.path / "temporary"
    temporary.write_text(text + MARKUP_COMMENT)
    temporary.replace(place.path / name)


def test_while_an_owner_lives_a_launch_is_its_guest(tmp_path: Path, other: int) -> None:
    claim(tmp_path, other)
    (tmp_path / "report.html").write_text("theirs")
    ours = publisher(tmp_path)
    message = ours.begin(NOW)
    assert str(tmp_path / "runs" / "ours") in message and str(tmp_path) in message
    write(ours.place, "report.html", "ours")
    assert (ours.publish(), ours.beat(NOW + 1e6)) == ("", "")
    ours.end()
    assert (tmp_path / "report.html").read_text() == "theirs"
    assert json.loads((tmp_path / OWNER).read_text())["launch_id"] == "theirs"
    assert ours.shown == ours.place.path


@pytest.mark.parametrize(
    "values",
    [
        {"pid": 2**22 + 1},
        {"pid_start": 1},
        {"pid": "1"},
        {"pid": 10**400},
        {"unix_s": 0.0},
        {"host": "elsewhere"},
        {"host": "elsewhere", "unix_s": NOW - STALE_S - 1},
        {"host": "elsewhere", "unix_s": NOW + STALE_S + 1},
        {"launch_id": "ours"},
    ],
)
def test_a_claim_that_nobody_lives_for_is_taken_over(
    tmp_path: Path, other: int, values: dict[str, Any]
) -> None:
    claim(tmp_path, other, **values)
    ours = publisher(tmp_path)
    assert ours.begin(NOW) == "" and ours.is_owner
    result = json.loads((tmp_path / OWNER).read_text())
    assert (result["launch_id"], result["pid"], result["unix_s"]) == ("ours", os.getpid(), NOW)


def test_a_fresh_claim_of_another_machine_counts(tmp_path: Path, other: int) -> None:
    claim(tmp_path, other, host="elsewhere", unix_s=NOW - STALE_S + 1)
    assert publisher(tmp_path).begin(NOW)


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 200_000, '{"unix_s": 1e999}', "9" * 9999])
def test_a_claim_that_is_not_ours_is_left_and_the_top_with_it(tmp_path: Path, text: str) -> None:
    (tmp_path / OWNER).write_text(text)
    ours = publisher(tmp_path)
    assert f"{OWNER} in {tmp_path}" in ours.begin(NOW) and not ours.is_owner
    assert (tmp_path / OWNER).read_text() == text


def test_the_top_shows_what_changes_and_nothing_that_commands(tmp_path: Path) -> None:
    ours = publisher(tmp_path)
    ours.begin(NOW)
    for text in ("one", "two"):
        for name in ("report.html", "decision.json", "stop.json", "stop-request.json"):
            write(ours.place, name, text)
        assert ours.publish() == ""
        assert (tmp_path / "report.html").read_text() == text + MARKUP_COMMENT
        assert (tmp_path / "report.html").samefile(ours.place.path / "report.html")
    assert ours.publish() == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "decision.json", OWNER, "report.html", "runs",
    ]  # fmt: skip


def test_where_no_link_can_be_made_the_top_has_copies(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm") / f"forerun-test-{os.getpid()}"
    if not elsewhere.parent.is_dir() or elsewhere.parent.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("one file system")
    elsewhere.mkdir()
    (tmp_path / "runs").symlink_to(elsewhere)
    ours = publisher(tmp_path)
    ours.begin(NOW)
    write(ours.place, "report.html", "ours")
    (ours.place.path / "report.html").chmod(0o600)
    try:
        assert ours.publish() == ""
    finally:
        for path in sorted(elsewhere.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        elsewhere.rmdir()
    assert (tmp_path / "report.html").read_text() == "ours" + MARKUP_COMMENT
    assert (tmp_path / "report.html").stat().st_mode & 0o777 == 0o600


def test_a_link_at_the_top_is_never_followed_nor_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    out = tmp_path / "out"
    out.mkdir()
    for name in (OWNER, "report.html"):
        (out / name).symlink_to(precious)
    ours = publisher(out)
    assert f"{OWNER}, report.html in {out}" in ours.begin(NOW)
    write(ours.place, "report.html", "ours")
    ours.publish()
    assert precious.read_text() == "precious"
    assert (out / "report.html").readlink() == (out / OWNER).readlink() == precious


def test_an_owner_never_writes_over_a_newer_run(tmp_path: Path, other: int) -> None:
    ours = publisher(tmp_path)
    ours.begin(NOW)
    write(ours.place, "report.html", "ours")
    ours.publish()
    claim(tmp_path, other)
    (tmp_path / "report.html").unlink()
    (tmp_path / "report.html").write_text("theirs")
    write(ours.place, "report.html", "ours again")
    assert "another run is live" in ours.publish()
    assert (ours.publish(), ours.beat(NOW + 1e6), ours.is_owner) == ("", "", False)
    ours.end()
    assert (tmp_path / "report.html").read_text() == "theirs"
    assert json.loads((tmp_path / OWNER).read_text())["launch_id"] == "theirs"
    assert (ours.place.path / "report.html").read_text() == "ours again" + MARKUP_COMMENT


def test_a_restart_of_the_same_launch_takes_over_and_the_run_before_knows(tmp_path: Path) -> None:
    before, after = publisher(tmp_path, run_id="r1"), publisher(tmp_path, run_id="r2")
    assert (before.begin(NOW), before.is_newest()) == ("", True)
    assert (after.begin(NOW), after.is_newest()) == ("", True)
    (tmp_path / "report.html").write_text("of r2")
    write(before.place, "report.html", "of r1")
    assert not before.is_newest() and before.publish() == "" and not before.is_owner
    assert (tmp_path / "report.html").read_text() == "of r2"
    assert json.loads((tmp_path / OWNER).read_text())["run_id"] == "r2"
    result = json.loads((tmp_path / "runs" / "ours" / "launch.json").read_text())
    assert result == {"schema": 1, "launch_id": "ours", "run_ids": ["r1", "r2"]}


def test_what_only_the_launch_before_has_does_not_stay_among_ours(tmp_path: Path) -> None:
    before = publisher(tmp_path, "before")
    before.begin(NOW)
    for name in ("report.html", "score.json"):
        write(before.place, name, "before")
    before.publish()
    before.end()
    old = '{"created_by": "forerun", "of": "an older version, which kept it nowhere else"}'
    (tmp_path / "drift.json").write_text(old)
    ours = publisher(tmp_path)
    ours.begin(NOW + 1.0)
    ours.publish()
    assert (tmp_path / "score.json").exists(), "until there is an answer of ours"
    write(ours.place, "report.html", "ours")
    ours.publish()
    assert not (tmp_path / "score.json").exists() and (tmp_path / "drift.json").exists()
    assert (before.place.path / "score.json").read_text() == "before" + MARKUP_COMMENT


def test_a_claim_is_renewed_while_its_companion_lives_and_then_given_up(tmp_path: Path) -> None:
    ours = publisher(tmp_path)
    ours.begin(NOW)
    for later_s in (BEAT_S, 2 * BEAT_S):
        assert ours.beat(NOW + later_s) == ""
        assert json.loads((tmp_path / OWNER).read_text())["unix_s"] == NOW + later_s
    ours.end()
    assert json.loads((tmp_path / OWNER).read_text())["unix_s"] == 0.0


def test_a_directory_that_cannot_be_written_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    ours = publisher(tmp_path / "out")
    assert ours.begin(time.time()) == ""
    assert (ours.publish(), ours.beat(time.time() + 1e6), ours.is_newest()) == ("", "", True)
    ours.end()
