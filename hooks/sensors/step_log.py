"""The marks of one hooked step, in arrays of bounded size.

A window holds the logs of all its hooked steps until it has closed.  What a step may take follows
from that: where it is not enough, operators of whole later micro-batches go first, then the
transfers of whole later passes; both are counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from ...calib.workload.collectives import Collective, GroupRole
from ...calib.workload.operators import Operator, OperatorKind
from .stopwatch import Readings

MAX_MARKS = 160_000
"""Marks of one step, 12 bytes each."""
MAX_WINDOW_MARKS = 1_600_000
"""Marks of all hooked steps of a window: about 22 MiB with their spans and transfers."""
MAX_SHAPES = 2048
"""Different raw shapes in one step: routed tokens have some for every layer and micro-batch."""
NO_SPAN = -1
NO_SHAPE = -1
NO_TRANSFER = -1
UNKNOWN_TRANSFER = 0
"""Number under which waiting for a call that was made before the step is marked."""
BITS = 4
MARKS_PER_SPAN = 5
"""Begin and end, forwards and backwards, and the end of our own part."""


class Code(IntEnum):
    """What a mark means; the number beside it says of which span, transfer or phase."""

    SPAN_BEGIN = 0  # as ``Recorder.begin_span`` writes it
    SPAN_END = 1
    BACKWARD_BEGIN = 2
    BACKWARD_END = 3
    WAIT_BEGIN = 4
    WAIT_END = 5
    CALL_DONE = 6  # the end of a call that left no work to wait for
    PHASE_BEGIN = 7
    PHASE_END = 8
    HOOK_END = 9  # the time since the mark before was our own


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place in the model that is hooked; ``layer`` is 0 outside the transformer layers."""

    kind: OperatorKind
    layer: int = 0
    shape_of: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None
    """The canonical shape from that of the result, where a configuration tells the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferKind:
    """What the calls of one collective on one group (with one peer) have in common."""

    collective: Collective
    role: GroupRole
    group: str
    ranks: tuple[int, ...]
    peer: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A collective as it was called, without its times."""

    kind: TransferKind
    nbytes: int
    sequence: int

    @property
    def called(self) -> dict[str, Any]:
        """The same by the names of a ``CollectiveRecord``."""
        shared = {name: getattr(self.kind, name) for name in TransferKind.__slots__}
        return {**shared, "nbytes": self.nbytes, "sequence": self.sequence}


def _numbers() -> array[int]:
    return array("i")


@dataclass(slots=True, kw_only=True)
class StepLog:
    """The marks of one step: ``what[i]`` holds code and number, ``marks[i]`` the time.

    ``samples[k]`` is the micro-batch of pass k, or -1 where its operators are not recorded; where
    ``samples`` is empty all of them are.  Phases are complete, and transfers as far as there is
    room.  Of span s, ``span_sites[s]`` is its site and ``shapes[span_shapes[s]]`` its raw shape and
    the bytes of an element.
    """

    step: int
    window: int
    sites: tuple[Site, ...]
    optimizer: Operator | None = None
    samples: Sequence[int] = ()
    max_marks: int = MAX_MARKS
    is_sampling: bool = True
    has_transfers: bool = True
    is_host: bool = True
    what: array[int] = field(default_factory=_numbers)
    marks: array[int] = field(default_factory=lambda: array("q"))
    span_sites: array[int] = field(default_factory=_numbers)
    span_shapes: array[int] = field(default_factory=_numbers)
    shapes: list[tuple[Any, int]] = field(default_factory=list)
    shape_numbers: dict[Hashable, int] = field(default_factory=dict)
    phases: list[tuple[str, int]] = field(default_factory=list)
    open_phases: dict[str, list[int]] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    kinds: list[TransferKind] = field(default_factory=list)
    num_calls: list[int] = field(default_factory=list)
    transfer_kinds: array[int] = field(default_factory=lambda: array("i", [-1]))
    transfer_sequences: array[int] = field(default_factory=lambda: array("i", [0]))
    transfer_nbytes: array[int] = field(default_factory=lambda: array("q", [0]))
    room: int = 0
    max_spans: int = 0
    num_dropped: int = 0
    is_open: bool = True
    readings: Readings | None = None
    _left_out: set[int] = field(default_factory=set)
    _largest_pass: int = 0
    _first_span: int = NO_SPAN

    def __post_init__(self) -> None:
        self.room = self.max_marks
        # Half of the marks are for operators.
        self.max_spans = max(1, self.max_marks // (2 * MARKS_PER_SPAN))

    def begin_pass(self, count: int, *, is_forward: bool) -> None:
        """Decide what is recorded of pass ``count``: whole micro-batches, while there is room."""
        self.has_transfers = self.room > self.max_marks // 8
        if not self.samples:
            return
        microbatch = self.samples[count % len(self.samples)]
        is_wanted = microbatch >= 0
        if is_wanted and is_forward and not self._has_room():
            self._left_out.add(microbatch)
        is_left_out = microbatch in self._left_out
        self.is_sampling = is_wanted and not is_left_out
        if is_wanted and is_left_out and is_forward:
            self.num_dropped += self._largest_pass * MARKS_PER_SPAN
        self._first_span = len(self.span_sites) if is_forward and self.is_sampling else NO_SPAN

    def end_pass(self) -> None:
        """Outside the passes operators are recorded only where all passes are."""
        self.has_transfers = True
        if self._first_span >= 0:
            self._largest_pass = max(self._largest_pass, len(self.span_sites) - self._first_span)
        self._first_span = NO_SPAN
        self.is_sampling = not self.samples

    def _has_room(self) -> bool:
        return self.has_transfers and len(self.span_sites) + self._largest_pass <= self.max_spans

    def shape_number(self, key: tuple[Any, int]) -> int:
        """Number of a raw shape and an element's bytes; -1 beyond the limit."""
        number = self.shape_numbers.get(key, NO_SHAPE)
        if number == NO_SHAPE:
            if len(self.shapes) >= MAX_SHAPES:
                self.num_dropped += 1
                return NO_SHAPE
            number = self.shape_numbers[key] = len(self.shapes)
            self.shapes.append(key)
        return number

    def kind_number(self, kind: TransferKind) -> int:
        """Number of a kind of transfer in this step."""
        if kind not in self.kinds:
            self.kinds.append(kind)
            self.num_calls.append(0)
        return self.kinds.index(kind)

    def transfer(self, number: int) -> Transfer:
        """The transfer of that number, from 1 on."""
        return Transfer(
            kind=self.kinds[self.transfer_kinds[number]],
            nbytes=self.transfer_nbytes[number],
            sequence=self.transfer_sequences[number],
        )

    def resolve(self) -> bool:
        """Turn marks into nanoseconds where that is possible without waiting; True when done."""
        if self.readings is None:
            return True
        if not self.readings.is_ready():
            return False
        marks = self.readings.read(self.marks)
        self.readings = None
        if marks is None:
            self.num_dropped += len(self.what)
            self.what, self.marks = _numbers(), array("q")
        else:
            self.marks = marks
        return True


def split(what: int) -> tuple[int, int]:
    """Code and number of a mark."""
    return what & (1 << BITS) - 1, what >> BITS
