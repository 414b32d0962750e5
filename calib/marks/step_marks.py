"""The marks of one hooked step: integers in arrays, and what their numbers stand for."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from ..workload.collectives import Collective, GroupRole
from ..workload.operators import Operator, OperatorKind

NO_TIME = -(1 << 62)
"""A mark without a known time; whatever depends on it is dropped."""
STEP_STREAM = 0
"""Number of the stream that was current when the step began; others are numbered as they come."""
NO_SPAN = -1
NO_SHAPE = -1
BITS = 4
"""Bits of a mark's code, below its number."""


class Code(IntEnum):
    """Meaning of a mark; its number identifies the span, transfer or phase."""

    SPAN_BEGIN = 0  # of a module's forward
    SPAN_END = 1
    BACKWARD_BEGIN = 2
    BACKWARD_END = 3
    WAIT_BEGIN = 4
    WAIT_END = 5
    CALL_DONE = 6  # the end of a call that left no work to wait for
    PHASE_BEGIN = 7
    PHASE_END = 8
    HOOK_END = 9  # the time since the previous mark was our own
    STALL_BEGIN = 10  # the step's stream begins to wait for another stream
    STALL_END = 11
    PAUSE_BEGIN = 12  # the framework's work in between belongs to no operator
    PAUSE_END = 13
    ENCLOSING_RESUMED = 14  # backwards, the work around that span resumes
    REFUSED = 15  # from here on there is no space for operators (0), or marks of any kind (1)


WAITING = frozenset(
    {Code.WAIT_BEGIN, Code.WAIT_END, Code.CALL_DONE, Code.STALL_BEGIN, Code.STALL_END}
)
"""Marks between which a stream waits."""


def unpack_mark(what: int) -> tuple[int, int]:
    """Return code and number of a mark."""
    return what & (1 << BITS) - 1, what >> BITS


def coverage_name(kind: str, is_backward: bool) -> str:
    """Return the name of an operator's forward or backward hooks in the coverage."""
    return f"{kind}:backward" if is_backward else kind


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedSite:
    """A place in the model whose calls are marked; ``layer`` is 0 outside the transformer
    layers."""

    kind: OperatorKind
    layer: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferKind:
    """Common fields of the calls of one collective on one group (with one peer)."""

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
        """Fields of a ``CollectiveRecord``."""
        shared = {name: getattr(self.kind, name) for name in TransferKind.__slots__}
        return {**shared, "nbytes": self.nbytes, "sequence": self.sequence}


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """Times at which the host issued the events of a step, in nanoseconds of its clock.

    ``host_ns`` has a time for each event number.  After the end of the step, at ``queried_ns``, the
    device had passed all events of the step's stream before number ``late``, but not that one; -1:
    it had passed all, or could not be queried.
    """

    host_ns: array[int]
    late: int = -1
    queried_ns: int = 0


def _numbers() -> array[int]:
    return array("i")


@dataclass(slots=True, kw_only=True)
class StepMarks:
    """The marks of one step: ``what[i]`` is code and number, ``marks[i]`` the time.

    ``streams[i]`` is the number of the mark's stream, 0 for that of the step; empty if there is one
    time line.  A mark without a time is ``NO_TIME``.

    ``samples[k]`` is the micro-batch of pass k, or -1 if its operators are not recorded; if
    ``samples`` is empty all of them are.  Phases are complete, and transfers as far as there is
    space.  For span s, ``span_sites[s]`` is its site and ``shapes[span_shapes[s]]`` its raw shape
    and the bytes of an element.

    ``site_weights[s]`` is the number of sites that a record of site s stands for, 0 if it is not
    watched; empty: all are, and each stands for itself.

    On a device ``issued`` has the host's times of its events, and ``events`` the event number of
    each mark.  ``hook_times_ns[i]`` is how long our hooks delayed the host at mark i, 0 beyond its
    end.
    """

    step: int
    window: int
    sites: Sequence[MarkedSite]
    optimizer: Operator | None = None
    samples: Sequence[int] = ()
    site_weights: Sequence[float] = ()
    is_host: bool = True
    what: array[int] = field(default_factory=_numbers)
    marks: array[int] = field(default_factory=lambda: array("q"))
    streams: array[int] = field(default_factory=lambda: array("h"))
    issued: Issued | None = None
    events: array[int] = field(default_factory=lambda: array("q"))
    hook_times_ns: array[int] = field(default_factory=lambda: array("q"))
    span_sites: array[int] = field(default_factory=_numbers)
    span_shapes: array[int] = field(default_factory=_numbers)
    shapes: list[tuple[Any, int]] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)
    kinds: list[TransferKind] = field(default_factory=list)
    num_calls: list[int] = field(default_factory=list)
    num_pass_calls: list[int] = field(default_factory=list)
    """By kind of transfer: the calls inside passes."""
    counted: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Transfers that were not timed, by kind and bytes."""
    untimed_passes: set[int] = field(default_factory=set)
    """Numbers of phases whose frequent transfers were not timed."""
    transfer_kinds: array[int] = field(default_factory=lambda: array("i", [-1]))
    transfer_sequences: array[int] = field(default_factory=lambda: array("i", [0]))
    transfer_nbytes: array[int] = field(default_factory=lambda: array("q", [0]))
    transfer_passes: array[int] = field(default_factory=lambda: array("i", [-1]))
    """Phase number of the pass around each transfer, -1 outside of passes."""

    def kind_number(self, kind: TransferKind) -> int:
        """Return the number of a kind of transfer in this step."""
        if kind not in self.kinds:
            self.kinds.append(kind)
            self.num_calls.append(0)
            self.num_pass_calls.append(0)
        return self.kinds.index(kind)

    def transfer(self, number: int) -> Transfer:
        """Return the transfer of that number, from 1 on."""
        return Transfer(
            kind=self.kinds[self.transfer_kinds[number]],
            nbytes=self.transfer_nbytes[number],
            sequence=self.transfer_sequences[number],
        )
