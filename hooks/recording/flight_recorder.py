"""PyTorch's flight recorders: collectives called from C++, and durations.

NCCL's first process group and gloo have one each; from torch 2.15 on a hook of the group writes
those of other backends, NCCL's second one among them.  Only a dump of the first queries a device.

They are read once per window, outside the training thread, and only if they can add something: a
dump blocks the interpreter while it writes its text.  They are on by default in recent releases
(2,000 calls), and have the calls that never pass through Python.  They have durations if the user
or ``--calibrate-trace=on`` has set ``TORCH_NCCL_ENABLE_TIMING=1`` before the groups were created:
one more event per collective, which PyTorch cannot switch off afterwards, so nothing else here sets
it.

Querying the device while another thread captures a graph needs care.  CUDA has a capture mode for
each thread.  In the usual one, ``global``, an event query invalidates a capture that any thread
began in the same mode; in ``relaxed`` it does not.  NCCL's own threads switch to it before they
query.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Container, Mapping, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from ...calib.errors import RecordError
from ...calib.marks.window_calls import KnownGroup, WindowCalls
from ...calib.records.flight import FlightEntry, HostSpan, parse_dump
from ..sensors.process_groups import GroupRoles, backends

RELAXED = 2
"""``cudaStreamCaptureModeRelaxed`` and ``hipStreamCaptureModeRelaxed``."""

Exchange = Callable[[int], int]
"""Function that sets the calling thread's capture mode, and returns the previous one."""


def find_exchange(load: Callable[[str], Any] = ctypes.CDLL) -> Exchange | None:
    """Return the runtime's own function; None if it is missing."""
    for library, name in _places():
        with suppress(OSError, AttributeError):
            return _called(getattr(load(library), name))
    return None


def _places() -> list[tuple[str, str]]:
    if torch.version.cuda:
        major = torch.version.cuda.split(".")[0]
        return [(f"libcudart.so.{major}", "cudaThreadExchangeStreamCaptureMode")]
    major = (torch.version.hip or "").split(".")[0]
    names = (f"libamdhip64.so.{major}", "libamdhip64.so")
    return [(name, "hipThreadExchangeStreamCaptureMode") for name in names]


def _called(function: Any) -> Exchange:
    def exchange(mode: int) -> int:
        value = ctypes.c_int(mode)
        code = function(ctypes.byref(value))
        if code != 0:
            raise RuntimeError(f"the capture mode of a thread cannot be changed: error {code}")
        return value.value

    return exchange


COLLECTIVES = "collectives"
"""Prefix of collectives' names in the coverage."""
_log = logging.getLogger(__name__)
NUM_CALLS = 5_000
"""Size of the recorder's ring; a dump blocks the interpreter for 35 us per call
(``benchmarks/RESULTS.md``, On a GPU)."""
ENVIRONMENT = {"TORCH_NCCL_ENABLE_TIMING": "1", "TORCH_FR_BUFFER_SIZE": str(NUM_CALLS)}
"""Useful settings, to be set before the first group: timing, and a buffer for a step."""
_TIMING = ("TORCH_NCCL_ENABLE_TIMING", "NCCL_ENABLE_TIMING", "TORCH_NCCL_DESYNC_DEBUG")
"""Variables each of which makes PyTorch time its calls."""
_YES = ("1", "y", "yes", "t", "true")
_OLD_BUFFER_SIZE = "TORCH_NCCL_TRACE_BUFFER_SIZE"
# PyTorch's ring of calls has fewer steps of any real pipeline.
MAX_STEPS = 64

Dump = Callable[[], "str | bytes"]


class FlightRecorder:
    """Recorder of the time spans of a window's hooked steps, to add durations to their records.

    ``unseen`` names collectives that no hook sees, which are then taken from here; ``roles`` are
    those of process groups; ``find`` returns the recorders' dumps, as ``find_dumps``.
    """

    def __init__(
        self,
        find: Callable[[Container[str]], dict[str, Dump | None]] | None = None,
        *,
        unseen: tuple[str, ...] = (),
        roles: GroupRoles | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._unseen = tuple(name for name in unseen if name.startswith(COLLECTIVES))
        self.has_unseen = bool(self._unseen)
        self._is_wanted = self.has_unseen or is_timed(environ)
        self._find = find or find_dumps
        self._dumps: dict[str, Dump | None] = {}
        self._roles = roles or GroupRoles()
        self._begin_ns = self._clock_ns = 0
        self._spans: dict[int, HostSpan] = {}
        self._groups: dict[str, KnownGroup] = {}

    def begin_step(self) -> None:
        """Begin a hooked step."""
        self._begin_ns, self._clock_ns = time.time_ns(), time.perf_counter_ns()

    def end_step(self, step: int) -> None:
        """End the step; all of its collectives have been called."""
        if self._is_wanted:
            while len(self._spans) >= MAX_STEPS:
                del self._spans[next(iter(self._spans))]
            self._spans[step] = HostSpan(
                begin_ns=self._begin_ns, end_ns=time.time_ns(), clock_ns=self._clock_ns
            )
            if self._unseen:
                self._groups.update(known_groups(self._roles))
            self._dumps |= self._find(self._dumps)

    def close_window(self) -> FlightWindow:
        """Return the data for the hooked steps since the last call."""
        spans, self._spans = self._spans, {}
        return FlightWindow(self._dumps, spans, self._groups, self._unseen)


class FlightWindow:
    """Flight data of one window, to be read once, outside training.

    ``dumps`` has that of each backend's recorder, None where there is none.
    """

    def __init__(
        self,
        dumps: Mapping[str, Dump | None] | None = None,
        spans: Mapping[int, HostSpan] | None = None,
        groups: Mapping[str, KnownGroup] | None = None,
        unseen_names: tuple[str, ...] = (),
    ) -> None:
        self._dumps = dumps or {}
        self._spans = spans or {}
        self._groups = groups or {}
        self._unseen_names = unseen_names

    def read(self) -> WindowCalls:
        """Return what the recorders know."""
        dumps = self._dumps if self._spans else {}
        lacking = [name for name, dump in self._dumps.items() if dump is None]
        return WindowCalls(
            entries=tuple(self._read(dump) for dump in dumps.values() if dump is not None),
            spans=self._spans,
            groups=self._groups,
            unseen_names=self._unseen_names,
            gaps=tuple(
                f"collectives of {name} called from C++: unseen, no flight recorder"
                for name in lacking
                if self._unseen_names
            ),
        )

    def _read(self, dump: Dump) -> tuple[FlightEntry, ...]:
        try:
            dumped = dump()
            text = dumped.decode() if isinstance(dumped, bytes) else dumped
            if "duration_ms" not in text and not self._unseen_names:
                return ()
            return tuple(parse_dump(text))
        except (RecordError, RuntimeError) as err:
            _log.warning("[forerun] %s; times of asynchronous calls stay upper bounds", str(err))
            return ()


def known_groups(roles: GroupRoles) -> dict[str, KnownGroup]:
    """Return every group of this process by description and name, as records name it."""
    groups = {}
    for group, ranks in [*distributed_c10d._world.pg_group_ranks.items()]:
        if not hasattr(group, "group_name"):
            continue  # a placeholder number for groups without this rank
        role = roles.of(group, tuple(ranks))
        groups[f"{group.group_desc}#{group.group_name}"] = KnownGroup(role=role, ranks=tuple(ranks))
    return groups


def is_timed(environ: Mapping[str, str]) -> bool:
    """Return True if PyTorch is set to time its calls, so that a dump has durations."""
    return any(environ.get(name, "").lower() in _YES for name in _TIMING)


def prepare(environ: MutableMapping[str, str]) -> None:
    """Enable timing and a long buffer for groups created later; the user's settings take
    precedence."""
    for name, value in ENVIRONMENT.items():
        if name != "TORCH_FR_BUFFER_SIZE" or _OLD_BUFFER_SIZE not in environ:
            environ.setdefault(name, value)


def find_dumps(known: Container[str] = ()) -> dict[str, Dump | None]:
    """Return the dump of each backend of this process's groups but the known ones, by name; None
    where no recorder can be asked."""
    hooked = getattr(distributed_c10d._world, "pg_flight_recorder_hooks", {})
    shared_dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    dumps: dict[str, Dump | None] = {}
    for group, name, _ in backends():
        dump = getattr(_distributed_c10d, f"_dump_{name}_trace_json", None)
        if name in known or name in dumps:
            continue
        if dump is not None:
            dumps[name] = capture_safe_dump(dump, find_exchange())
        elif group in hooked and shared_dump is not None:
            dumps[name] = partial(shared_dump, backend=name)
        else:
            dumps[name] = shared_dump if name == "gloo" else None
    return dumps


def capture_safe_dump(dump: Dump, exchange: Exchange | None) -> Dump | None:
    """Return a dump that is safe while another thread captures a graph; None if there is none."""
    if exchange is None:
        return None

    def dumped() -> str | bytes:
        before = exchange(RELAXED)
        try:
            return dump()
        finally:
            exchange(before)

    return dumped
