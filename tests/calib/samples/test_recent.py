"""A run read while it grows: the same as when it is read at once, in bounded room."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.calib.errors import RecordError
from forerun.calib.marks.run_records import MOST_PROBLEMS
from forerun.calib.samples.recent import NUM_AS_RECORDS, NUM_WINDOWS, RecentWindows
from forerun.calib.samples.store import NewRecords, RunReader, read_run
from forerun.calib.samples.table import SampleTable, build_table

WriteRun = Callable[..., Path]
STEPS_APART, NS_APART = 100, 10**12


def rank_file(directory: Path, rank: int) -> Path:
    return directory / "records" / "run-a" / f"rank-{rank:05d}.jsonl"


def of_window(lines: list[str], window: int) -> str:
    """The lines of the first window as those of a later one, without header and description."""
    out = []
    for value in map(json.loads, lines):
        if value["type"] in ("header", "run"):
            continue
        for name in ("step", "first_step", "last_step"):
            if name in value:
                value[name] += STEPS_APART * window
        for name in ("start_ns", "issue_ns"):
            if name in value:
                value[name] += NS_APART * window
        out.append(json.dumps(value | {"window": window}) + "\n")
    return "".join(out)


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


class Grown:
    """A run whose ranks write a window after the other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.first = {r: rank_file(directory, r).read_text().splitlines() for r in (0, 1)}
        self.window = 0

    def next(self) -> int:
        self.window += 1
        for rank, lines in self.first.items():
            append(rank_file(self.directory, rank), of_window(lines, self.window))
        return self.window


@pytest.fixture
def grown(write_run: WriteRun) -> Grown:
    return Grown(write_run())


def whole(directory: Path) -> SampleTable:
    return build_table(read_run(directory, "run-a"))


def joined(parts: list[NewRecords]) -> dict[int, tuple]:
    return {
        rank: tuple(r for part in parts for r in part.run.records.get(rank, ()))
        for rank in parts[-1].run.records
    }


def test_pieces_together_are_the_whole(grown: Grown) -> None:
    reader, parts = RunReader(grown.directory, "run-a"), []
    for _ in range(3):
        parts.append(reader.read())
        grown.next()
    parts += [reader.read(), reader.read()]
    at_once = read_run(grown.directory, "run-a")
    assert joined(parts) == at_once.records
    assert (parts[-1].run.headers, parts[-1].run.configs) == (at_once.headers, at_once.configs)
    assert parts[-1].run.problems == at_once.problems == ()
    assert [part.is_whole for part in parts] == [True, False, False, False, False]
    assert not any(parts[-1].run.records.values())


def test_a_torn_line_waits_for_its_end_and_is_damage_until_then(grown: Grown) -> None:
    path, reader = rank_file(grown.directory, 0), RunReader(grown.directory, "run-a")
    line = of_window(grown.first[0], 1).splitlines(keepends=True)[0]
    parts = [reader.read()]
    append(path, line[:20])
    parts.append(reader.read())
    (problem,) = parts[-1].run.problems
    assert "cut off" in problem
    assert problem == read_run(grown.directory, "run-a").problems[0]
    append(path, line[20:])
    parts.append(reader.read())
    assert parts[-1].run.problems == ()
    assert joined(parts) == read_run(grown.directory, "run-a").records


def test_a_restarted_rank_goes_on_behind_its_new_header(grown: Grown) -> None:
    path, reader = rank_file(grown.directory, 0), RunReader(grown.directory, "run-a")
    parts = [reader.read()]
    append(path, '{"type": "st\n' + grown.first[0][0] + "\n")
    grown.next()
    parts.append(reader.read())
    at_once = read_run(grown.directory, "run-a")
    assert joined(parts) == at_once.records
    assert parts[-1].run.problems == at_once.problems and len(at_once.problems) == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["shrunk", "replaced", "written anew"])
def test_a_file_that_is_another_is_read_from_its_begin(grown: Grown, how: str) -> None:
    windows, reader = RecentWindows(), RunReader(grown.directory, "run-a")
    path = rank_file(grown.directory, 0)
    grown.next()
    windows.add(reader.read())
    lines = path.read_text().splitlines(keepends=True)
    size = path.stat().st_size
    if how == "shrunk":
        path.write_text("".join(lines[:-5]))
    elif how == "replaced":
        other = path.with_name("other")
        other.write_text("".join(lines) * 2)
        os.replace(other, path)
    else:
        # The same inode, and longer than before.
        path.write_text("".join(lines[:2] + lines[5:] + lines[9:]))
        assert path.stat().st_size > size
    new = reader.read()
    assert new.is_whole
    windows.add(new)
    assert new.run.records == read_run(grown.directory, "run-a").records
    assert windows.table().equals(whole(grown.directory))


def test_damage_that_does_not_end_is_named_up_to_a_bound(grown: Grown) -> None:
    append(rank_file(grown.directory, 0), "damaged\n" * (2 * MOST_PROBLEMS))
    assert len(read_run(grown.directory, "run-a").problems) == MOST_PROBLEMS


def test_no_records_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no records of run 'run-a'"):
        RunReader(tmp_path, "run-a").read()


@pytest.mark.slow
def test_the_table_of_a_short_run_is_that_of_all_its_records(grown: Grown) -> None:
    windows, reader = RecentWindows(), RunReader(grown.directory, "run-a")
    for window in range(NUM_WINDOWS + 1):
        windows.add(reader.read())
        assert windows.is_complete(window) and not windows.is_complete(window + 1)
        assert windows.table().equals(whole(grown.directory))
        if window < NUM_WINDOWS:
            grown.next()


def test_what_comes_after_a_windows_end_belongs_to_it(grown: Grown) -> None:
    """Probes, and the records of a rank that is late."""
    windows, reader = RecentWindows(), RunReader(grown.directory, "run-a")
    late = of_window(grown.first[1], 1)
    append(rank_file(grown.directory, 0), of_window(grown.first[0], 1))
    windows.add(reader.read())
    assert not windows.is_complete(1)
    row = next(json.loads(line) for line in grown.first[0] if '"operator"' in line)
    live_ns = row["duration_ns"]
    probes = [
        row
        | {"is_probe": True, "window": 0, "microbatch": n, "duration_ns": live_ns * times, **more}
        for n in range(3)
        for times, more in ((2, {}), (8, {"shape": [512, 512, 512]}))
    ]
    append(rank_file(grown.directory, 1), late)
    append(rank_file(grown.directory, 0), "".join(json.dumps(p) + "\n" for p in probes))
    windows.add(reader.read())
    table = windows.table()
    assert windows.is_complete(1) and table.equals(whole(grown.directory))
    assert table.samples["is_probe"].sum() == 2


@pytest.mark.slow
def test_rows_and_records_of_a_long_run_are_bounded(grown: Grown) -> None:
    windows, reader = RecentWindows(), RunReader(grown.directory, "run-a")
    windows.add(reader.read())
    per_window = len(windows.table().samples)
    sizes = []
    for _ in range(NUM_WINDOWS + 4):
        grown.next()
        windows.add(reader.read())
        table = windows.table()
        sizes.append((len(table.samples), len(table.steps)))
    assert sizes[-1] == sizes[NUM_WINDOWS]
    newest = windows.newest.records
    assert len(newest[0]) < (NUM_AS_RECORDS + 1) * len(grown.first[0])
    # The first window whole, the newest whole, and once what lies between.
    assert len(table.samples) == (NUM_WINDOWS + 2) * per_window
    assert set(table.steps["window"]) == {0, *range(5, NUM_WINDOWS + 5)}


@pytest.mark.slow
def test_what_only_an_old_window_measured_is_kept(grown: Grown) -> None:
    windows, reader = RecentWindows(), RunReader(grown.directory, "run-a")
    windows.add(reader.read())
    text = of_window(grown.first[0], 1).replace("[256, 256, 512]", "[256, 256, 4096]")
    append(rank_file(grown.directory, 0), text)
    append(rank_file(grown.directory, 1), of_window(grown.first[1], 1))
    grown.window = 1
    for _ in range(NUM_WINDOWS + 2):
        grown.next()
    windows.add(reader.read())
    rows = windows.table().samples
    assert (rows["shape"] == "256x256x4096").sum() == 1
