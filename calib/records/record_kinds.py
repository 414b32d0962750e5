"""Records that hooks write: one event of one rank each, in integer nanoseconds of its clock.

On disk a record is one JSON line with its type under ``"type"``; a file starts with a header.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from typing import Any, get_args

from ..errors import RecordError
from ..plain_json import Json, JsonObject
from ..workload.collectives import Collective, GroupRole
from ..workload.operators import OperatorKind, Phase
from .packed import from_runs, to_runs

SCHEMA = 1
"""Increased if a reader of the old lines would misread the new ones."""
FORWARD, BACKWARD = "forward-compute", "backward-compute"
OPTIMIZER = "optimizer"
"""Names of phases that are computed with."""
MAX_LISTED_RANKS = 8
"""Largest group whose members are listed; those of larger ones are written as runs."""


class StepFlag(Enum):
    """Reason why a step's time does not represent the others."""

    WARMUP = "warmup"
    EVALUATED = "evaluated"
    SAVED = "saved"
    RERAN = "reran"
    COLLECTED = "collected"
    FAULTED = "faulted"
    PROBED = "probed"
    TRACED = "traced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """First line of a file, which identifies its run and rank."""

    schema: int
    run_id: str
    rank: int
    world_size: int
    created_by: str
    device: str
    started_unix_s: float
    stage: int = 0
    tp_rank: int = 0
    dp_rank: int = 0
    cluster: JsonObject = field(default_factory=dict)
    """``Cluster.to_json`` from one rank of each node; older versions ignore it."""
    is_of_all: bool = False
    """True if this file has the steps of all ranks, as that of an imported log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step.  ``gap_ns`` is the time since the previous step's end (logging, data).

    ``hook_ns`` is the part of the step in which hooks were installed and removed.
    """

    step: int
    window: int
    start_ns: int
    duration_ns: int
    gap_ns: int
    is_hooked: bool
    flags: tuple[StepFlag, ...] = ()
    hook_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRecord:
    """A timed section of the host framework: forward-compute, backward-compute, optimizer, eval...

    ``name`` is Megatron's timer name.  ``microbatch`` counts starts of that name within the step.
    ``wait_ns`` is the part spent in synchronous collectives, ``hook_ns`` that in our own hooks.
    """

    step: int
    window: int
    name: str
    microbatch: int
    start_ns: int
    duration_ns: int
    wait_ns: int = 0
    hook_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfOperator:
    """Fields that identify an operator of a micro-batch."""

    step: int
    window: int
    microbatch: int
    kind: OperatorKind
    phase: Phase
    shape: tuple[int, ...]
    element_nbytes: int
    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRecord(_OfOperator):
    """One operator of one micro-batch; ``duration_ns`` excludes nested ones and collectives.

    A probe ran between steps and belongs to none; its ``microbatch`` counts repeats.
    ``host_bound_ns`` is the part in which the device had no work but what the host was launching
    meanwhile: the host's time, whatever the shape.  ``host_ns`` is the host's time to launch it, by
    its own clock and without our hooks; 0 on a CPU, or if it may have waited.  In steps that record
    some layers alone ``stands_for`` is the number of layers that this one represents.
    """

    start_ns: int
    duration_ns: int
    is_probe: bool = False
    host_bound_ns: int = 0
    host_ns: int = 0
    stands_for: float = 1.0
    rows: tuple[int, ...] = ()
    """Rows of each expert in a grouped product, if the host knows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecord(_OfOperator):
    """Work of one operator in a traced step: time of its kernels, without the gaps between them.

    On a CPU its calls into the framework take their place.
    """

    duration_ns: int
    num_kernels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRecord:
    """One collective as one rank saw it; ``OTHER`` of 0 bytes if its tensors' size is not known.

    ``sequence`` counts the calls on this group by this rank in the step: the same number on all
    ranks of the group (for point-to-point: on both ends, by direction) is the same transfer.
    ``issue_ns`` is when the call was made, ``duration_ns`` the time until its known end; for an
    asynchronous call that had already ended when it was waited for, an upper bound (``is_bound``).
    ``exposed_ns`` is how long it blocked the host.  Hooked steps have all of them unless space ran
    out: then ``stands_for`` is the number of calls of like passes that this one represents.
    """

    step: int
    window: int
    collective: Collective
    role: GroupRole
    group: str
    ranks: tuple[int, ...]
    nbytes: int
    sequence: int
    peer: int
    is_async: bool
    is_bound: bool
    issue_ns: int
    duration_ns: int
    exposed_ns: int
    stands_for: float = 1.0
    is_probe: bool = False
    """Ran between steps, over the group ``ranks``; ``role`` is then the one it represents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageRecord:
    """Numbers of hooks installed and fired in a window, by operator kind or seam."""

    window: int
    name: str
    installed: int
    fired: int

    @staticmethod
    def remark(window: int, name: str) -> CoverageRecord:
        """Return a remark, which has no hooks that could fire, and so does not count as
        coverage."""
        return CoverageRecord(window=window, name=name, installed=0, fired=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRecord:
    """End of the window on this rank: no more of its records follow.

    ``memory_peak_nbytes`` is the device's peak (CPU: resident set), ``device_memory_nbytes`` its
    size; 0 if unknown.  ``num_left_out`` counts hooked steps without detail, for lack of space.
    """

    window: int
    first_step: int
    last_step: int
    num_faults: int
    num_dropped: int
    memory_peak_nbytes: int = 0
    device_memory_nbytes: int = 0
    num_left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """Summary of one rank's hooked steps in a window, small enough to be sent by every rank.

    Medians per step over those steps, of passes and optimizer without the waiting inside them;
    ``wait_ns[i]`` is the mean waiting in collectives on groups of role ``wait_roles[i]``.
    """

    window: int
    num_steps: int
    step_ns: int
    forward_ns: int
    backward_ns: int
    optimizer_ns: int
    wait_roles: tuple[str, ...] = ()
    wait_ns: tuple[int, ...] = ()
    memory_peak_nbytes: int = 0
    routed_rows: int = 0
    """Rows that arrived at its experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Run description as this rank saw it, in the form of ``RunConfig.to_json``."""

    config: JsonObject


class DataLength(Enum):
    """Kind of knowledge about the length of a loop's data."""

    UNSEEN = "unseen"
    """No torch loader feeds the loop, or a framework stands between."""
    NONE = "none"
    """Only the data themselves know it; they are not queried, as that may have side effects."""
    KNOWN = "known"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRecord:
    """Length and batch of a training loop, as its first steps show them; 0 if unknown.

    Steps are counted from the first of the run.  ``samples`` and ``tokens`` are those of one step
    of this rank.  Gradients of ``grad_nbytes`` in all are averaged over ``num_replicas`` ranks.
    """

    num_steps: int = 0
    """Steps of the whole run."""
    data: DataLength = DataLength.UNSEEN
    pass_end: int = 0
    """Steps done at the end of the current pass over the data."""
    pass_steps: int = 0
    """Steps of a whole pass."""
    samples: int = 0
    tokens: int = 0
    num_replicas: int = 0
    grad_nbytes: int = 0
    eval_interval: int = 0
    save_interval: int = 0
    """Steps between evaluations, and between saves."""


Record = (
    Header
    | StepRecord
    | PhaseRecord
    | OperatorRecord
    | TraceRecord
    | CollectiveRecord
    | CoverageRecord
    | WindowRecord
    | RankRecord
    | RunRecord
    | LoopRecord
)

_TYPES: dict[str, type[Any]] = {
    kind.__name__.removesuffix("Record").lower(): kind for kind in get_args(Record)
}
"""Record classes by ``type``: the name of the class without ``Record``, in lower case."""
_NAMES = {kind: name for name, kind in _TYPES.items()}
_ENUMS: dict[str, Callable[[Any], Any]] = {
    "kind": OperatorKind,
    "phase": Phase,
    "collective": Collective,
    "role": GroupRole,
    "data": DataLength,
}
_MOST = 2**63 - 1
"""Largest whole number, as they become columns of 64 bits."""
_SIGNED = frozenset({"peer", "start_ns", "issue_ns"})
_SELDOM = {"rows": (), "host_bound_ns": 0, "host_ns": 0, "stands_for": 1.0}
"""Fields of an operator that are not written if they have these values."""


def to_dict(record: Record) -> JsonObject:
    """Return a JSON object with the record's type under ``type``."""
    out: JsonObject = {"type": _NAMES[type(record)]}
    seldom = _SELDOM if type(record) is OperatorRecord else {}
    for spec in fields(record):
        value = getattr(record, spec.name)
        if spec.name in seldom and value == seldom[spec.name]:
            continue  # nearly all lines
        if isinstance(value, Enum):
            value = value.value
        elif spec.name == "ranks" and len(value) > MAX_LISTED_RANKS:
            value = to_runs(value)
        elif isinstance(value, tuple):
            value = [v.value if isinstance(v, Enum) else v for v in value]
        out[spec.name] = value
    return out


def from_dict(value: Mapping[str, Json]) -> Record:
    """Return the record that ``to_dict`` wrote; unknown keys are ignored.

    Raise ``RecordError`` if the type is unknown, a field is missing or a value has a wrong type.
    """
    kind = _TYPES.get(str(value.get("type")))
    if kind is None:
        raise RecordError(f"record type {value.get('type')!r} is not one of {sorted(_TYPES)}")
    specs = _specs(kind)
    try:
        record = kind(**{name: _decode(name, value[name]) for name, _ in specs if name in value})
    except (TypeError, ValueError) as err:
        raise RecordError(f"{value['type']} record is damaged: {err}") from err
    return checked(record)


def checked(record: Record) -> Record:
    """Return the record; raise ``RecordError`` if a value has a wrong type or is out of range."""
    for name, of in _specs(type(record)):
        field_value = getattr(record, name)
        if not (
            of == "int" and type(field_value) is int and 0 <= field_value <= _MOST
        ):  # nearly all are
            _check_value(name, of, field_value)
    return record


@cache
def _specs(kind: type) -> tuple[tuple[str, str], ...]:
    """Return a record's field names and types; cached, as every line of a file needs them."""
    return tuple((spec.name, str(spec.type)) for spec in fields(kind))


def _decode(name: str, value: Any) -> Any:
    if name in _ENUMS:
        return _ENUMS[name](value)
    if name == "flags":
        return tuple(StepFlag(v) for v in value)
    if name == "ranks" and isinstance(value, str):
        return from_runs(value)
    return tuple(value) if isinstance(value, list) else value


def _check_value(name: str, kind: str, value: Any) -> None:
    if kind == "int":
        if name.endswith("_ns") and name not in _SIGNED and (type(value) is not int or value < 0):
            raise RecordError(f"{name} {_shown(value)} is not a whole number of nanoseconds >= 0")
        if type(value) is not int:
            raise RecordError(f"{name} {_shown(value)} is not a whole number; skipped")
        if value < 0 and name not in _SIGNED:
            raise RecordError(f"{name} {value} is below 0; skipped")
        if abs(value) > _MOST:
            raise RecordError(f"{name} is above 64 bits; skipped")
    elif kind == "float":
        if type(value) not in (int, float) or not -_MOST <= value <= _MOST:
            raise RecordError(f"{name} {_shown(value)} is not a finite number; skipped")
    elif kind in ("bool", "str") and type(value).__name__ != kind:
        raise RecordError(f"{name} {_shown(value)} is not of type {kind}; skipped")
    elif kind == "tuple[int, ...]" and not all(type(v) is int and 0 <= v <= _MOST for v in value):
        raise RecordError(f"{name} {_shown(list(value))} has an entry that is not a size; skipped")


def _shown(value: Any) -> str:
    """Return a value for an error, shortened: one of a damaged file may be long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def parse_header(line: str) -> Header:
    """Parse a file's first line; raise ``RecordError`` if it is no header or of a newer schema."""
    record = from_dict(parse_line(line))
    if not isinstance(record, Header):
        raise RecordError(f"first line is a {type(record).__name__}, not a header; record again")
    if record.schema > SCHEMA:
        raise RecordError(
            f"schema {record.schema} is newer than {SCHEMA}, which this version reads; "
            f"upgrade forerun to that of {record.created_by!r}"
        )
    return record


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number that a record may hold")


def parse_line(line: str) -> JsonObject:
    """Return the object of a line; raise ``RecordError`` if it holds none."""
    try:
        value = json.loads(line, parse_constant=_no_constant)
    except RecursionError as err:
        raise RecordError("line has brackets nested too deeply; skipped") from err
    except ValueError as err:
        reason = "line is cut off" if not line.endswith("\n") else "line is not JSON"
        raise RecordError(f"{reason} ({err}); skipped") from err
    if not isinstance(value, dict):
        raise RecordError(f"line holds a {type(value).__name__}, not a record; skipped")
    return value
