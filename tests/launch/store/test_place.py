"""Which folder a launch writes into, and which one ``latest`` links to; real files and links."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.launch.store.place import Place
from forerun.launch.store.run_folders import (
    followed,
    latest_folder,
    newest_of_run,
    paths_of,
    top_of,
)


def place(directory: Path, launch_id: str = "ours", run_id: str = "r1") -> Place:
    return Place(directory=directory, launch_id=launch_id, run_id=run_id)


def begun(directory: Path, launch_id: str, unix_s: float = 0.0) -> Place:
    """A launch that began then, with one file."""
    one = place(directory, launch_id, f"run-of-{launch_id}")
    one.note_run()
    if unix_s:
        os.utime(one.path / "launch.json", (unix_s, unix_s))
    (one.path / "score.json").write_text(json.dumps(one.stamp()))
    return one


def test_the_first_answer_takes_the_link_and_a_status_only_where_there_is_none(
    tmp_path: Path,
) -> None:
    first, second = begun(tmp_path, "first"), begun(tmp_path, "second")
    first.offer_latest()
    assert os.readlink(tmp_path / "latest") == "runs/first"
    second.offer_latest()
    assert (first.shown, second.shown) == (tmp_path / "latest", second.path)
    assert second.take_latest() == first.take_latest() == second.take_latest() == ""
    assert (first.shown, second.shown) == (first.path, tmp_path / "latest")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "runs"]


def test_a_directory_can_be_moved_with_its_link(tmp_path: Path) -> None:
    begun(tmp_path / "out", "ours").take_latest()
    (tmp_path / "out").rename(tmp_path / "moved")
    assert json.loads((tmp_path / "moved" / "latest" / "score.json").read_text())


def test_a_link_to_a_folder_that_is_gone_is_taken(tmp_path: Path) -> None:
    ours = begun(tmp_path, "ours")
    (tmp_path / "latest").symlink_to("runs/gone")
    assert ours.take_latest() == "" and ours.shown == tmp_path / "latest"


def of_others(link: Path, kind: str) -> None:
    if kind == "file":
        link.write_text("theirs")
    elif kind == "folder":
        link.mkdir()
    elif kind == "pipe":
        os.mkfifo(link)
    else:
        link.symlink_to(kind)


@pytest.mark.parametrize(
    "kind",
    [
        *("file", "folder", "pipe", "latest", "../elsewhere", "/elsewhere", "runs", "runs/."),
        *("runs/..", "runs/../../elsewhere", "runs/one/two", "runs/", "records/one", "./runs/one"),
    ],
)
def test_what_is_not_our_link_is_named_left_and_never_followed(tmp_path: Path, kind: str) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    ours = begun(out, "ours")
    link = out / "latest"
    of_others(link, kind.replace("/elsewhere", str(elsewhere)) if kind[0] == "/" else kind)
    before = os.lstat(link)
    ours.offer_latest()
    assert ours.take_latest() == (
        f"not written by Forerun and left alone: {link}; this run's answers are in {ours.path}"
    )
    assert os.lstat(link) == before and not [*elsewhere.iterdir()]
    assert (ours.shown, followed(link), top_of(link)) == (ours.path, link, (link, ()))
    assert latest_folder(out) is None
    assert newest_of_run(out, "score.json", "run-of-ours") == ours.stamp()


@pytest.mark.parametrize("call", [Place.offer_latest, Place.take_latest])
def test_where_no_link_can_be_made_answers_are_found_without(
    tmp_path: Path, call: Callable[[Place], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")  # as on exFAT

    monkeypatch.setattr(os, "symlink", refuse)
    ours = begun(tmp_path, "ours")
    assert not call(ours) and ours.shown == ours.path and ours.asked == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert newest_of_run(tmp_path, "score.json", "run-of-ours") == ours.stamp()


def test_a_command_asks_for_the_directory_only_while_no_later_launch_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = begun(tmp_path, "first", 1e9), begun(tmp_path, "second", 2e9)
    first.take_latest()
    other_name = tmp_path / "runs" / "of-another-node" / "launch.json"
    other_name.parent.mkdir()
    other_name.write_text('{"schema": 1, "launch_id": "second"}')
    assert (first.asked, second.asked) == (first.path, tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    assert first.asked == Path(tmp_path.name) / "runs" / "first"


def test_the_newest_launch_comes_first_and_the_top_level_last(tmp_path: Path) -> None:
    """Earlier versions wrote answers at the top level."""
    late, early = begun(tmp_path, "a-late", 2e9), begun(tmp_path, "b-early", 1e9)
    (tmp_path / "score.json").write_text(json.dumps({"run_id": "before"}))
    paths = [one.path / "score.json" for one in (late, early)]
    assert paths_of(tmp_path, "score.json") == [*paths, tmp_path / "score.json"]
    assert newest_of_run(tmp_path, "score.json", "before") == {"run_id": "before"}
    late.take_latest()
    assert top_of(tmp_path / "latest") == top_of(late.path) == (tmp_path, (late.run_id,))
    assert paths_of(tmp_path / "latest", "score.json") == [tmp_path / "latest" / "score.json"]


def test_a_restart_of_the_same_launch_writes_on_and_the_run_before_knows(tmp_path: Path) -> None:
    before, after = place(tmp_path, run_id="r1"), place(tmp_path, run_id="r2")
    assert before.is_newest_run
    before.note_run()
    assert before.is_newest_run
    after.note_run()
    assert after.is_newest_run and not before.is_newest_run
    value = json.loads((tmp_path / "runs" / "ours" / "launch.json").read_text())
    assert value == {"schema": 1, "launch_id": "ours", "run_ids": ["r1", "r2"]}


def test_a_directory_that_cannot_be_written_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    ours = place(tmp_path / "out")
    ours.note_run()
    ours.offer_latest()
    assert ours.take_latest() == "" and ours.is_newest_run
    assert ours.shown == ours.path and ours.asked == tmp_path / "out"
