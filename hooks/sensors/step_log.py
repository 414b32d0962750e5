"""The marks of one hooked step, in arrays of bounded size.

A window retains the logs of all its hooked steps until it has closed, which limits the marks of a
step, together with the remaining events of a device.  Beyond the limit, operators of whole later
micro-batches are omitted first, then the transfers of whole later passes; both are counted.

On a device a mark is expensive.  There the transfers inside passes are timed with the operators of
the same micro-batches, except those that occur once or twice a step; all are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from ...calib.marks.step_marks import (
    BITS,
    NO_SHAPE,
    NO_SPAN,
    NO_TIME,
    Code,
    MarkedSite,
    StepMarks,
    TransferKind,
)
from .stopwatch import DeviceReadings, Readings

MAX_MARKS = 160_000
"""Marks of one step, 12 bytes each; on a device up to 36."""
MAX_WINDOW_MARKS = 1_600_000
"""Marks of all hooked steps of a window: about 22 MiB with their spans and transfers."""
MAX_SHAPES = 2048
"""Different raw shapes in one step: routed tokens have some for every layer and micro-batch."""
NO_TRANSFER = -1
UNKNOWN_TRANSFER = 0
"""Number for waits for a call that was made before the step."""
MARKS_PER_SPAN = 5
"""Begin and end, forwards and backwards, and the end of our own part."""
MOST_SELDOM_PASSES = 2
"""A kind of transfer in more passes of a step than this counts as frequent, and is sampled."""
MOST_SELDOM_CALLS = 32
"""A kind with more calls than this is frequent too, in a window with space for few
micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site(MarkedSite):
    """A hooked place in the model."""

    shape_of: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None
    """Function from the result's shape to the canonical one, if a configuration gives the rest."""
    has_siblings: bool = False
    """True if sibling operators take the same input, or the surrounding work runs between them."""


@dataclass(slots=True, kw_only=True)
class StepLog(StepMarks):
    """The marks of a step while it is recorded, within bounds.

    With ``samples_transfers``, transfers of other passes are only counted, except seldom ones:
    ``frequent`` are the kinds of transfers in every pass, as determined in an earlier step; None if
    there was none.  ``largest_pass`` is the expected number of spans of a pass.

    A log that ``is_full`` takes no more marks: transfers outside passes are not even counted.  With
    ``counts_all`` it is never full, since a flight recorder's calls are compared with the counts.
    """

    max_marks: int = MAX_MARKS
    samples_transfers: bool = False
    frequent: frozenset[TransferKind] | None = None
    largest_pass: int = 0
    is_sampling: bool = True
    has_transfers: bool = True
    has_free_marks: bool = True
    counts_all: bool = False
    is_full: bool = False
    shape_numbers: dict[Hashable, int] = field(default_factory=dict)
    open_phases: dict[str, list[int]] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    is_frequent: list[bool] = field(default_factory=list)
    num_passes: list[int] = field(default_factory=list)
    """By kind of transfer: the passes that have one."""
    num_free_marks: int = 0
    max_spans: int = 0
    num_dropped: int = 0
    is_open: bool = True
    readings: Readings | None = None
    passes: list[tuple[bool, bool, int, int]] = field(default_factory=list)
    """Passes: whether forward, whether its operators were recorded, and the places of its first and
    last mark."""
    num_pass_marks: int = 0
    """Events of a device inside the passes whose operators were recorded."""
    num_refused: int = 0
    current_pass: int = -1
    _first_mark: int = 0
    _first_place: int = 0
    _is_forward: bool = False
    _last_passes: list[int] = field(default_factory=list)
    _excluded_microbatches: set[int] = field(default_factory=set)
    _first_span: int = NO_SPAN

    def __post_init__(self) -> None:
        self.num_free_marks = self.max_marks
        # Half of the marks are for operators.
        self.max_spans = max(1, self.max_marks // (2 * MARKS_PER_SPAN))

    def begin_pass(self, count: int, number: int, *, is_forward: bool) -> None:
        """Decide which marks of pass ``count``, phase ``number``, are recorded.

        Micro-batches are recorded whole, while there is space.
        """
        self.current_pass = number
        self.has_free_marks = self.has_transfers = self.num_free_marks > self.max_marks // 8
        if self.samples:
            self._choose(count, is_forward=is_forward)
        elif not self.has_free_marks:
            # Without marks of the waits inside, operators would be charged for them.
            self.is_sampling = False
            self.num_dropped += MARKS_PER_SPAN
        if not self.has_transfers:
            self.untimed_passes.add(number)
        self._first_mark = self.marks[-1] if self.marks else 0
        self._first_place, self._is_forward = len(self.marks), is_forward

    def _choose(self, count: int, *, is_forward: bool) -> None:
        place = count % len(self.samples)
        microbatch = self.samples[place]
        is_wanted = microbatch >= 0
        if is_wanted and is_forward and not self._has_free_spans():
            self._excluded_microbatches.add(microbatch)
        is_excluded = microbatch in self._excluded_microbatches
        self.is_sampling = is_wanted and not is_excluded
        if is_wanted and is_excluded and is_forward:
            self.num_dropped += self.largest_pass * MARKS_PER_SPAN
        self._first_span = len(self.span_sites) if is_forward and self.is_sampling else NO_SPAN
        if self.samples_transfers:
            # Until a step has determined the frequent kinds, its first and last pass are timed too.
            is_end = self.frequent is None and place in (0, len(self.samples) - 1)
            is_end = is_end and len(self.samples) > 1
            self.has_transfers = self.has_free_marks and (self.is_sampling or is_end)

    def end_pass(self) -> None:
        """End a pass; outside of passes operators are recorded only if all passes are."""
        self.has_transfers = self.has_free_marks = True
        if self.is_sampling and self.samples_transfers and self.marks:
            ends = self._first_mark, self.marks[-1]
            self.num_pass_marks += max(0, ends[1] - ends[0]) if NO_TIME not in ends else 0
        if self.current_pass >= 0:
            place = self._first_place, len(self.marks) - 1
            self.passes.append((self._is_forward, self.is_sampling, *place))
        if self._first_span >= 0:
            self.largest_pass = max(self.largest_pass, len(self.span_sites) - self._first_span)
        self._first_span = NO_SPAN
        self.current_pass = -1
        self.is_sampling = not self.samples

    def _has_free_spans(self) -> bool:
        return self.has_free_marks and len(self.span_sites) + self.largest_pass <= self.max_spans

    def add_transfer(self, kind: int, nbytes: int) -> int:
        """Return the number of a transfer that is timed; -1 if it is only counted."""
        sequence = self.num_calls[kind]
        self.num_calls[kind] = sequence + 1
        if self.current_pass >= 0:
            self._count_pass(kind)
        if not (self.has_transfers or (self.has_free_marks and not self.is_frequent[kind])):
            self.num_dropped += not self.has_free_marks
            self.counted[kind, nbytes] += 1
            return NO_TRANSFER
        number = len(self.transfer_kinds)
        self.transfer_kinds.append(kind)
        self.transfer_sequences.append(sequence)
        self.transfer_nbytes.append(nbytes)
        self.transfer_passes.append(self.current_pass)
        return number

    def set_nbytes(self, number: int, kind: int, nbytes: int) -> None:
        """Set the bytes of a transfer that was added with 0 bytes; -1 was only counted."""
        if number >= 0:
            self.transfer_nbytes[number] = nbytes
        elif nbytes:
            self.counted[kind, nbytes] += 1
            self.counted[kind, 0] -= 1
            if not self.counted[kind, 0]:
                del self.counted[kind, 0]

    def refuse(self, what: int) -> None:
        """Note that there was no space for a mark, once for each kind, which invalidates open
        spans."""
        self.num_dropped += 1
        self.is_full |= what > 0 and not self.counts_all
        if self.num_refused <= what:
            self.num_refused = what + 1
            self.marks.append(NO_TIME)
            self.what.append(what << BITS | Code.REFUSED)

    def _count_pass(self, kind: int) -> None:
        self.num_pass_calls[kind] += 1
        if self._last_passes[kind] != self.current_pass:
            self._last_passes[kind] = self.current_pass
            self.num_passes[kind] += 1

    def frequent_kinds(self, *, is_thin: bool) -> frozenset[TransferKind]:
        """Return the kinds that occur in every pass; ``is_thin``: there is space for few
        micro-batches."""
        most = MOST_SELDOM_CALLS if is_thin else math.inf
        return frozenset(
            kind
            for number, kind in enumerate(self.kinds)
            if self.num_passes[number] > MOST_SELDOM_PASSES or self.num_pass_calls[number] > most
        )

    def shape_number(self, key: tuple[Any, int]) -> int:
        """Return the number of a raw shape and an element's bytes; -1 beyond the limit."""
        number = self.shape_numbers.get(key, NO_SHAPE)
        if number == NO_SHAPE:
            if len(self.shapes) >= MAX_SHAPES:
                self.num_dropped += 1
                return NO_SHAPE
            number = self.shape_numbers[key] = len(self.shapes)
            self.shapes.append(key)
        return number

    def kind_number(self, kind: TransferKind) -> int:
        """Return the number of a kind of transfer in this step."""
        if kind not in self.kinds:
            self.is_frequent.append(self.frequent is None or kind in self.frequent)
            self.num_passes.append(0)
            self._last_passes.append(-1)
        return StepMarks.kind_number(self, kind)

    def resolve(self, end_s: float = math.inf) -> bool:
        """Convert marks to nanoseconds if possible without waiting; True when done.

        Reading continues until ``end_s`` of ``time.perf_counter``.
        """
        if self.readings is None:
            return True
        if not self.readings.is_ready(end_s):
            return False
        self.streams = self.readings.streams(self.marks)
        self.issued = self.readings.issued
        if self.issued is not None:
            self.events = self.marks
        self.marks = self.readings.read(self.marks)
        self.readings = None
        return True

    def settle(self) -> bool:
        """Stop reading: unread marks have no time; False if no mark was, or can be, read.

        Those without a time are dropped, and counted.
        """
        num_read = 0
        if isinstance(self.readings, DeviceReadings):
            num_read = self.readings.settle()
        if num_read and self.resolve():
            self.num_dropped += max(0, len(self.what) - num_read)
            return True
        self.drop()
        return False

    def drop(self) -> None:
        """Release all unread marks, which count as dropped."""
        if isinstance(self.readings, DeviceReadings):
            self.readings.give_back()
        self.readings = None
        self.num_dropped += len(self.what)
