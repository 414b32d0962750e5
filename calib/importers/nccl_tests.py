"""Collectives from the logs that the programs of nccl-tests (and rccl-tests) print.

A launcher or a container may prefix a line (``[1,0]<stdout>:`` of mpirun, ``0:`` of srun, a time of
Kubernetes), so patterns may match anywhere in a line, not only at its start.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import pandas as pd

from ..errors import RecordError
from ..network.groups import bus_factor
from ..workload.collectives import Collective
from .canonical_tables import COLLECTIVE_COLUMNS, MICROSECOND_S

_PROGRAMS = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "alltoall": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
    "sendrecv": Collective.SEND,
}
MAX_LINE_LENGTH = 2000
"""Longer lines are skipped: these logs have none, and searches in them could take for ever."""
_BEGINNING = re.compile(r"# [nr]ccl-tests version|# Collective test starting|# ?nThread|^nThread")
"""Beginning of a test's first line in the various versions of the program."""
_RANK = re.compile(
    r"(?<!\w)Rank\s+(\d+)\b(?:.{0,60}?\bPid\s+(\d+))?.{0,60}?"
    r"\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s+(.+?)\s*$"
)
_PROGRAM = re.compile(r"(Collective test (?:starting|concluded): )?(\w+?)_perf(?:_mpi)?\b(\s+-)?")
"""Program, in a line of the test itself, or in a command: with an option behind it."""
_LIBRARY = re.compile(r"\b([nr]ccl)-library=(\d+)")
_OF_PROCESS = re.compile(r"nThread\s+(\d+)\s+nGpus\s+(\d+)")
"""Threads of a process and GPUs of a thread, of which each is a rank."""
_HEADER = re.compile(r"\bsize\s+count\b.*\btime\b.*")
_ROW = re.compile(r"(?<![\w.,])\d+\s+\d+\s+[a-z]\w*\s.*")
"""Bytes, elements and their type, with all that follows."""
_TAG = re.compile(r"\[\d+\]")
"""Tag that a launcher may put before each piece of a line that a rank writes."""
_FAILED = re.compile(r"Out of bounds values\s*:\s*(\d+)\s+FAILED")
_ABORTED = re.compile(r"\bTest (?:NCCL |CUDA |HIP )?failure\b")
_WRONG = "#wrong"
"""Column of wrong elements; versions before 2022 have the largest rounding error in its place."""


@dataclass(slots=True, kw_only=True)
class _Test:
    """One program's part of a log."""

    program: str | None = None
    names: list[set[str]] = field(default_factory=lambda: [set(), set(), set()])
    """Programs in its own first and last line; in commands since the table before; in titles."""
    library: str = ""
    ranks: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Host and device of each rank."""
    processes: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Host and process of each rank."""
    ranks_of_process: int = 1
    has_worlds: bool = False
    """True if two processes report the same rank: each is a world of its own."""
    columns: Sequence[str] = ()
    rows: list[tuple[int, float, float, float]] = field(default_factory=list)
    """Bytes, microseconds, algorithm and bus bandwidth (GB/s), of the out-of-place variant."""
    num_wrong: int = 0
    """Number of rows with a wrong result, which are left out."""
    has_failed: bool = False
    """True if the program reports wrong values without the rows they are in."""
    is_aborted: bool = False

    @property
    def num_ranks(self) -> int:
        """The least number of ranks with those that are listed."""
        return -(-(max(self.ranks) + 1) // self.ranks_of_process) * self.ranks_of_process

    def take_rank(self, match: re.Match[str]) -> None:
        """Parse a line that names a rank."""
        number, process = int(match[1]), (match[3], match[2])
        self.has_worlds |= self.processes.setdefault(number, process) != process
        self.ranks[number] = (match[3], match[4])

    def take_row(self, text: str) -> None:
        """Parse a line of results; one with a wrong result is only counted."""
        words = text.split()
        if "time" not in self.columns or len(words) <= (place := self.columns.index("time")):
            return
        try:
            nbytes, time_us = int(words[0]), float(words[place])
            pairs = list(zip(self.columns, words, strict=False))
            wrong = [float(word) for name, word in pairs if name == _WRONG and word != "N/A"]
            rates = [float(word) for name, word in pairs[place + 1 : place + 3] if "bw" in name]
        except ValueError:
            return
        if any(wrong):
            self.num_wrong += 1
        else:
            rate, bus_rate = rates if len(rates) == 2 else (math.nan, math.nan)
            self.rows.append((nbytes, time_us, rate, bus_rate))


def nccl_tests_collectives(text: str, name: str, *, fabric: str) -> tuple[pd.DataFrame, list[str]]:
    """Return a collective table in our own format, and notes on what was left out and why.

    The program's name is that in the test's own first or last line (newer versions), else in the
    command or title before it, else in the file's name.  A test is refused if two names compete, or
    if its bandwidths are not those of its name.  Rows with wrong results are left out, and tests
    that have some in unknown rows; a test that was aborted keeps the rows before that, and is
    named.  Raise ``RecordError`` if no test can be read.
    """
    problems, rows = [], []
    for test in _named(_tests(text), name):
        problems += (f"{name}: {problem}" for problem in _flaws(test))
        refusal = _refusal(test)
        if refusal:
            problems.append(f"{name}: {refusal}")
            continue
        rows += _rows(test, fabric)
    if not rows:
        why = problems[0] if problems else f"{name} holds no result of nccl-tests"
        raise RecordError(f"{why}; give the complete standard output of the program")
    return pd.DataFrame(rows, columns=list(COLLECTIVE_COLUMNS)), problems


def _refusal(test: _Test) -> str:
    """Return the reason why a test cannot be used; empty if it can."""
    if test.program is None:
        return (
            "a test does not print its name, and no line before it tells for certain; give it a "
            "file of its own, and name the file after its program (all_reduce_perf.log)"
        )
    if test.program not in _PROGRAMS:
        return f"{test.program} is not modelled"
    if not test.ranks:
        return f"{test.program} lists no ranks; keep the lines '# Rank ...'"
    if len(test.ranks) < test.num_ranks:
        return (
            f"{test.program} lists {len(test.ranks)} of its {test.num_ranks} ranks; keep all lines "
            "'# Rank ...'"
        )
    if test.has_worlds or len(test.ranks) == 1:
        return (
            f"{test.program} ran as worlds of one rank, which send nothing; build nccl-tests with "
            "MPI=1 and start it with mpirun or srun, or give -g more than one GPU"
        )
    if test.has_failed and not test.num_wrong:
        return f"{test.program} got wrong values and does not print in which rows"
    factor = bus_factor(_PROGRAMS[test.program], test.num_ranks)
    for *_, rate, bus_rate in test.rows:
        # Two decimals are printed, fewer of large ones.
        if abs(bus_rate - factor * rate) > 0.01 * (1.0 + factor) + 1e-3 * bus_rate:
            return (
                f"a test that would be {test.program} has a bus bandwidth of {bus_rate:g} GB/s at "
                f"{rate:g}, which {test.program} of {test.num_ranks} ranks never has; keep its name"
            )
    return ""


def _flaws(test: _Test) -> Iterator[str]:
    """Yield warnings on a test that is used."""
    if test.num_wrong:
        yield f"{test.program}: {test.num_wrong} sizes with wrong results are left out"
    devices = sorted({device for _, device in test.ranks.values()})
    if len(devices) > 1:
        yield f"{test.program}: the ranks are on {', '.join(devices)}; imported as of the first one"
    if test.is_aborted:
        yield f"{test.program} was aborted; its earlier measurements are imported"


def _rows(test: _Test, fabric: str) -> Iterator[dict[str, object]]:
    hosts, devices = zip(*test.ranks.values(), strict=True)
    place = {
        "device": devices[0],
        "fabric": f"{fabric} {test.library}" if test.library else fabric,
        "collective": _PROGRAMS[test.program or ""].value,
        "num_ranks": len(test.ranks),
        "num_nodes": len(set(hosts)),
        "flag": "",
    }
    for nbytes, time_us, *_ in test.rows:
        if nbytes > 0 and time_us > 0:
            yield place | {"nbytes": nbytes, "time_s": time_us * MICROSECOND_S}


def _tests(text: str) -> Iterator[_Test]:
    """Yield the tests of a log, at the end one without results for what is mentioned behind."""
    test, ahead, has_begun = _Test(), _Test(), False
    for line in text.splitlines():
        if len(line) > MAX_LINE_LENGTH:
            continue
        is_first = bool(_BEGINNING.search(line))
        is_part = is_first or bool(_RANK.search(line) or _HEADER.search(line))
        is_over = bool(test.rows) or test.num_wrong > 0 or test.is_aborted
        if (is_part and is_over) or (is_first and any(ahead.names)):
            yield test
            test, ahead, has_begun = ahead, _Test(), False
        has_begun |= is_part
        for program in _PROGRAM.finditer(line):
            named = test if program[1] or not has_begun else ahead
            named.names[0 if program[1] else 1 if program[3] else 2].add(program[2])
        _take(test, line)
    yield from (test, ahead)


def _named(tests: Iterable[_Test], name: str) -> Iterator[_Test]:
    """Yield the tests that have results, each under the program that is known to have printed it.

    A title belongs to the table behind it only if the table before has its own, or is the first.
    """
    *listed, behind = tests
    before: str | None = ""
    in_file = {program for program in _PROGRAMS if program in name}
    for test in (test for test in listed if test.rows or test.num_wrong):
        printed, commands, titles = test.names
        titles = (titles - {before}) or (set() if behind.names[2] else titles)
        names = printed or commands or (titles if before is not None else set())
        before = min(names) if len(names) == 1 else None
        choices = names & in_file if names else in_file
        test.program = before or (min(choices) if len(choices) == 1 else None)
        yield test


def _take(test: _Test, line: str) -> None:
    """Update a test from one of its lines."""
    if library := _LIBRARY.search(line):
        test.library = f"{library[1].upper()} {library[2]}"
    if process := _OF_PROCESS.search(line):
        test.ranks_of_process = max(1, int(process[1]) * int(process[2]))
    test.has_failed |= bool(_FAILED.search(line))
    test.is_aborted |= bool(_ABORTED.search(line))
    if rank := _RANK.search(line):
        test.take_rank(rank)
    elif header := _HEADER.search(line):
        test.columns = header[0].split()
    elif row := _ROW.search(_TAG.sub(" ", line)):
        test.take_row(row[0])
