"""The marks of a rank's window as one line of its file, and the records that are read from it.

A line is ``{"type": "marks", "head": ..., "steps": [...]}``.  ``head`` has what the steps share,
and each of ``steps`` the marks of one: base64 of compressed bytes, which are the length of a JSON
header in four bytes, the header, and columns of integers of fixed width (``_COLUMNS``),
little-endian.  Times are differences to the mark before.
"""

from __future__ import annotations

import base64
import json
import math
import operator
import sys
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from ..errors import ForerunError, RecordError
from ..records.flight import FlightEntry, HostSpan
from ..records.packed import MAX_NBYTES, from_runs, to_runs, unzipped
from ..records.record_kinds import (
    CoverageRecord,
    Record,
    StepRecord,
    WindowRecord,
    from_dict,
    to_dict,
)
from ..workload.config_json import decode, encode
from ..workload.operators import Operator
from .step_marks import Issued, MarkedSite, StepMarks, TransferKind
from .window_calls import KnownGroup, WindowCalls

TYPE = "marks"
"""Type of a line that holds a window's marks."""
_COLUMNS = {
    **{"what": "i", "marks": "q", "streams": "h", "events": "q", "hook_times_ns": "q"},
    **{"span_sites": "i", "span_shapes": "i", "transfer_kinds": "i", "transfer_sequences": "i"},
    **{"transfer_nbytes": "q", "transfer_passes": "i"},
}
"""Columns of a step in their order, with the type codes of ``array``."""
_PLAIN = ("step", "window", "is_host", "shapes", "phases")
_LISTED = ("samples", "site_weights")
_LEVEL = 1
"""Level of compression: training's interpreter is free meanwhile, its processor is not."""
_LENGTH_NBYTES = 4
_MOST_NBYTES = 2 * MAX_NBYTES
"""Most bytes that the steps of one line unpack to; a full window of a device has half of that."""
DAMAGED = (
    *(ForerunError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError),
    *(RecursionError, StopIteration),
)
"""Errors raised by a value of unknown form, those of our own checks first."""


@dataclass(slots=True, kw_only=True)
class MarkedWindow:
    """A window of one rank as training leaves it, and, until it closes, what there is of it."""

    steps: list[StepMarks] = field(default_factory=list)
    step_ns: dict[int, int] = field(default_factory=dict)
    """Durations of undisturbed hooked steps."""
    end: WindowRecord | None = None
    """End of the window; None if the process ended first."""
    installed: tuple[CoverageRecord, ...] = ()
    calls: WindowCalls = field(default_factory=WindowCalls)
    shared_with: frozenset[int] = frozenset()
    """Ranks with which transfers are of use, as the only part of the steps; empty: all of it."""

    def to_line(
        self, on_fault: Callable[[Exception], object], limit_nbytes: int | None = None
    ) -> str:
        """Return the line of the rank's file, with as many of the first steps as fit.

        A step that cannot be written does not affect others.
        """
        steps: list[str] = []
        remaining_nbytes = math.inf if limit_nbytes is None else limit_nbytes
        for log in self.steps:
            try:
                text = packed_step(log)
            except Exception as err:
                on_fault(err)
                continue
            remaining_nbytes -= len(text)
            if remaining_nbytes < 0:
                break
            steps.append(text)
        num_left_out = 0 if remaining_nbytes >= 0 else len(self.steps) - len(steps)
        end = None if self.end is None else replace(self.end, num_left_out=num_left_out)
        head: dict[str, Any] = {
            "step_ns": [*self.step_ns.items()],
            "end": None if end is None else to_dict(end),
            "installed": [to_dict(one) for one in self.installed],
            "calls": encode(self.calls),
            "shared_with": to_runs(tuple(sorted(self.shared_with))),
        }
        return json.dumps({"type": TYPE, "head": _text(head), "steps": steps}) + "\n"

    @staticmethod
    def from_json(value: Mapping[str, Any], skip: Callable[[str], object]) -> MarkedWindow:
        """Return the window of a line; ``skip`` is told why a step is left out.

        Raises ``RecordError`` if what the steps share is damaged.
        """
        try:
            head, _ = _parsed(unzipped(value["head"]))
            end, calls = head["end"], head["calls"]
            installed = [from_dict(one) for one in head["installed"]]
            shared_with = head["shared_with"]
            window = MarkedWindow(
                steps=[*_steps(value["steps"], skip)],
                step_ns={int(step): int(duration_ns) for step, duration_ns in head["step_ns"]},
                end=None if end is None else _window_record(from_dict(end)),
                installed=tuple(one for one in installed if isinstance(one, CoverageRecord)),
                shared_with=frozenset(from_runs(shared_with) if shared_with else ()),
                calls=WindowCalls(
                    entries=tuple(
                        tuple(decode(FlightEntry, one) for one in each) for each in calls["entries"]
                    ),
                    spans={int(step): decode(HostSpan, s) for step, s in calls["spans"].items()},
                    groups={name: decode(KnownGroup, g) for name, g in calls["groups"].items()},
                    unseen_names=tuple(map(str, calls["unseen_names"])),
                    gaps=tuple(map(str, calls["gaps"])),
                ),
            )
        except DAMAGED as err:
            raise RecordError(f"line with marks is damaged ({err}); skipped") from err
        return window

    def note(self, record: Record) -> None:
        """Keep the duration of an undisturbed hooked step."""
        if isinstance(record, StepRecord) and record.is_hooked and not record.flags:
            self.step_ns[record.step] = record.duration_ns


def _window_record(record: Record) -> WindowRecord:
    if not isinstance(record, WindowRecord):
        raise RecordError(f"the end of a window is a {type(record).__name__}")
    return record


def packed_step(log: StepMarks) -> str:
    """Return the marks of one step as text."""
    return _text(*_of_step(log))


def unpacked_step(text: Any) -> StepMarks:
    """Return the step of ``packed_step``; raises one of ``DAMAGED`` for another text."""
    return _step(*_parsed(unzipped(text)))


def _of_step(log: StepMarks) -> tuple[dict[str, Any], list[array[int]]]:
    """Return header and columns of a step."""
    columns = [getattr(log, name) for name in _COLUMNS]
    place = [*_COLUMNS].index("marks")
    columns[place] = _differences(log.marks)
    issued = log.issued
    if issued is not None:
        columns.append(_differences(issued.host_ns))
    header: dict[str, Any] = {
        **{name: getattr(log, name) for name in _PLAIN},
        **{name: [*getattr(log, name)] for name in _LISTED},
        "sites": [(site.kind.value, site.layer) for site in log.sites],
        "optimizer": encode(log.optimizer),
        "issued": None if issued is None else (issued.late, issued.queried_ns),
        "kinds": [
            (one.collective.value, one.role.value, one.group, to_runs(one.ranks), one.peer)
            for one in log.kinds
        ],
        "calls": [*zip(log.num_calls, log.num_pass_calls, strict=True)],
        "counted": [(*key, count) for key, count in log.counted.items()],
        "untimed_passes": sorted(log.untimed_passes),
        "lengths": [len(column) for column in columns],
    }
    return header, columns


def _differences(times_ns: array[int]) -> array[int]:
    """Return the first time and then the differences, which compress to a third."""
    return times_ns[:1] + array("q", map(operator.sub, times_ns[1:], times_ns))


def _text(header: dict[str, Any], columns: Sequence[array[int]] = ()) -> str:
    if sys.byteorder == "big":
        columns = [array(column.typecode, column) for column in columns]
        for column in columns:
            column.byteswap()
    text = json.dumps(header, separators=(",", ":")).encode()
    parts = (len(text).to_bytes(_LENGTH_NBYTES, "little"), text, *(c.tobytes() for c in columns))
    return base64.b64encode(zlib.compress(b"".join(parts), _LEVEL)).decode()


def _parsed(data: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return header and bytes of the columns."""
    end = _LENGTH_NBYTES + int.from_bytes(data[:_LENGTH_NBYTES], "little")
    return json.loads(data[_LENGTH_NBYTES:end]), memoryview(data)[end:]


def _steps(texts: Sequence[Any], skip: Callable[[str], object]) -> Iterator[StepMarks]:
    remaining_nbytes = _MOST_NBYTES
    for number, text in enumerate(texts):
        try:
            data = unzipped(text, max(1, remaining_nbytes))
            remaining_nbytes -= len(data)
            yield _step(*_parsed(data))
        except DAMAGED as err:
            skip(f"marks of hooked step {number} are damaged ({err}); skipped")


def _step(header: dict[str, Any], data: memoryview) -> StepMarks:
    columns: dict[str, Any] = {}
    codes = {**_COLUMNS, **({} if header["issued"] is None else {"host_ns": "q"})}
    done = 0
    for (name, code), length in zip(codes.items(), header["lengths"], strict=True):
        column = columns[name] = array(code)
        nbytes = length * column.itemsize
        column.frombytes(data[done : done + nbytes])
        if sys.byteorder == "big":
            column.byteswap()
        if len(column) != length:
            raise ValueError("its columns are cut off")
        done += nbytes
    issued = None
    if header["issued"] is not None:
        late, queried_ns = header["issued"]
        host_ns = array("q", accumulate(columns.pop("host_ns")))
        issued = Issued(host_ns=host_ns, late=late, queried_ns=queried_ns)
    columns["marks"] = array("q", accumulate(columns["marks"]))
    plain = {name: _frozen(header[name]) for name in (*_PLAIN, *_LISTED)}
    optimizer = header["optimizer"]
    return StepMarks(
        **{**plain, "shapes": list(plain["shapes"]), "phases": list(plain["phases"])},
        **columns,
        issued=issued,
        sites=[decode(MarkedSite, {"kind": kind, "layer": n}) for kind, n in header["sites"]],
        optimizer=None if optimizer is None else decode(Operator, optimizer),
        kinds=[_kind(one) for one in header["kinds"]],
        num_calls=[calls for calls, _ in header["calls"]],
        num_pass_calls=[calls for _, calls in header["calls"]],
        counted=Counter({(kind, nbytes): count for kind, nbytes, count in header["counted"]}),
        untimed_passes=set(header["untimed_passes"]),
    )


def _kind(value: Sequence[Any]) -> TransferKind:
    collective, role, group, ranks, peer = value
    return decode(
        TransferKind,
        {
            "collective": collective,
            "role": role,
            "group": group,
            "ranks": from_runs(ranks) if ranks else (),
            "peer": peer,
        },
    )


def _frozen(value: Any) -> Any:
    """Return JSON's lists as tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
