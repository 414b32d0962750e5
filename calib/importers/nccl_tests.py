"""Collectives out of the logs that the programs of nccl-tests (and rccl-tests) print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pandas as pd

from ..errors import RecordError
from ..workload import Collective
from .own_format import COLLECTIVE_COLUMNS, MICROSECOND_S

_PROGRAMS = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "alltoall": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
    "sendrecv": Collective.SEND,
}
MAX_LINE_LENGTH = 2000
"""No line of these logs is as long; searches in longer ones would take time without end."""
_BEGINNINGS = ("# nccl-tests version", "# Collective test starting", "# nThread")
"""Of the first line of a test, by the version of the program."""
_RANK = re.compile(r"#\s+Rank\s+(\d+)\b.*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s+(.+?)\s*$")
_PROGRAM = re.compile(r"(\w+?)_perf(?:_mpi)?\b")
_LIBRARY = re.compile(r"nccl-library=(\d+)")


@dataclass(slots=True, kw_only=True)
class _Test:
    """One program's part of a log."""

    program: str | None
    library: str = ""
    ranks: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Host and device of each rank."""
    time_column: int | None = None
    rows: list[tuple[int, float]] = field(default_factory=list)
    """Bytes and microseconds, out of place."""


def nccl_tests_collectives(text: str, name: str, *, fabric: str) -> tuple[pd.DataFrame, list[str]]:
    """A collective table in our own format, and what was left out and why.

    The program's name is in the log of newer versions, in the command line that many logs begin
    with, else in the file's name.  ``RecordError`` where no test can be read.
    """
    problems, rows = [], []
    for test in _tests(text, name):
        collective = _PROGRAMS.get(test.program or "")
        if collective is None:
            problems.append(f"{name}: {test.program or 'a test without a name'} is not modelled")
            continue
        if not test.ranks:
            problems.append(f"{name}: {test.program} lists no ranks; keep the lines '# Rank ...'")
            continue
        hosts, devices = zip(*test.ranks.values(), strict=True)
        place = {
            "device": devices[0],
            "fabric": f"{fabric} NCCL {test.library}" if test.library else fabric,
            "collective": collective.value,
            "num_ranks": len(test.ranks),
            "num_nodes": len(set(hosts)),
            "flag": "",
        }
        rows += [
            place | {"nbytes": nbytes, "time_s": time_us * MICROSECOND_S}
            for nbytes, time_us in test.rows
            if nbytes > 0 and time_us > 0
        ]
    if not rows:
        why = problems[0] if problems else f"{name} holds no result of nccl-tests"
        raise RecordError(f"{why}; give the complete standard output of the program")
    return pd.DataFrame(rows, columns=list(COLLECTIVE_COLUMNS)), problems


def _tests(text: str, name: str) -> Iterator[_Test]:
    """The tests of a log, those with results."""
    test, mentioned = _Test(program=None), None
    for line in text.splitlines():
        if len(line) > MAX_LINE_LENGTH:
            continue
        program = _PROGRAM.search(line)
        if program and not line.startswith("# Collective test concluded"):
            mentioned = program.group(1)
        if test.rows and line.startswith(_BEGINNINGS):
            yield from _named(test, name)
            test = _Test(program=None)
        test.program = mentioned
        if library := _LIBRARY.search(line):
            test.library = library.group(1)
        if rank := _RANK.match(line):
            test.ranks[int(rank.group(1))] = (rank.group(2), rank.group(3))
        elif line.startswith("#"):
            words = line.lstrip("#").split()
            if words[:2] == ["size", "count"] and "time" in words:
                test.time_column = words.index("time")
        elif row := _row(line, test.time_column):
            test.rows.append(row)
    yield from _named(test, name)


def _named(test: _Test, name: str) -> Iterator[_Test]:
    if not test.rows:
        return
    if test.program is None:
        test.program = next((program for program in _PROGRAMS if program in name), None)
    yield test


def _row(line: str, time_column: int | None) -> tuple[int, float] | None:
    words = line.split()
    if time_column is None or len(words) <= time_column or not words[0].isdigit():
        return None
    try:
        return int(words[0]), float(words[time_column])
    except ValueError:
        return None
