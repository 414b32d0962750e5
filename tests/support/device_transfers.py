"""Collectives of a stand-in for a device: gloo moves the data, and each group's stream the time.

A synchronous call behaves as NCCL's from torch 2.8 on: it returns no work, and the stream it was
called on waits for its end.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from device_calls import Calls
from device_clock import AttributePatches, Clock, Line
from device_streams import Device
from torch._C._distributed_c10d import ProcessGroup, Work

LATENCY_S = 30e-6
BYTES_PER_S = 1e9
_BARRIERS = frozenset({"barrier", "monitored_barrier"})
_METHODS = (
    "broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "all_gather_single",
    "_allgather_base", "allgather_coalesced", "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "all_to_all_single", "alltoall_base", "alltoall", "send",
    "recv", "recv_anysource", "barrier", "monitored_barrier",
)  # fmt: skip


class Transfers:
    """Streams of all groups."""

    def __init__(self, clock: Clock, device: Device, calls: Calls) -> None:
        self._clock, self._device, self._calls = clock, device, calls
        self._lines: dict[Any, Line] = {}
        self._sequences: Counter[Any] = Counter()
        self._works: weakref.WeakKeyDictionary[Any, tuple[Line, float, bool]] = (
            weakref.WeakKeyDictionary()
        )
        self._is_inside = False

    def begin_step(self) -> None:
        """Reset the counts of calls."""
        self._sequences.clear()

    def install(self, places: AttributePatches) -> None:
        """Wrap the methods of groups, and ``Work.wait``."""
        for name in _METHODS:
            if name in vars(ProcessGroup):
                places.put(ProcessGroup, name, self._wrap(name, vars(ProcessGroup)[name]))
        for name in ("wait", "synchronize"):
            places.put(Work, name, self._wrap_wait(vars(Work)[name]))

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return original(group, *args, **kwargs)
            self._is_inside = True
            try:
                with torch._C._DisableTorchDispatch():
                    return self._call(name, original, group, args, kwargs)
            finally:
                self._is_inside = False

        return call

    def _call(self, name: str, original: Any, group: Any, args: Any, kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        is_async = all(getattr(value, "asyncOp", True) for value in values)
        line, end_s = self._charge(name, group, values, is_async=is_async)
        work = original(group, *args, **kwargs)
        if name == "monitored_barrier":
            self._clock.host_reaches(end_s)
        if work is None:
            return None
        if is_async:
            self._works[work] = (line, end_s, name in _BARRIERS)
            return work
        work.wait()
        self._end(line, end_s, is_host=name in _BARRIERS)
        return None

    def _charge(
        self, name: str, group: Any, values: tuple[Any, ...], *, is_async: bool
    ) -> tuple[Line, float]:
        clock, stream = self._clock, self._device.line
        peer = -1
        if name in ("send", "recv"):
            peer = dist.get_process_group_ranks(group)[int(values[1])]
        nbytes = max((_nbytes(value) for value in values[:2]), default=0)
        key = (group.group_name, name, peer)
        # NCCL has a stream for each pair and direction, and one for all collectives of a group.
        line = self._line((group.group_name, name if peer >= 0 else "", peer))
        issue_s = clock.ready_s(stream)
        clock.stall(line, stream.busy_s, stream, is_logged=False)
        number = len(clock.truth.tables["transfers"]["step"])
        begin_s, end_s = clock.launch(line, LATENCY_S + nbytes / BYTES_PER_S, number)
        clock.truth.add(
            "transfers",
            group=f"{group.group_desc}#{group.group_name}",
            method=name,
            nbytes=nbytes,
            sequence=self._sequences[key],
            peer=peer,
            issue_s=issue_s,
            begin_s=begin_s,
            end_s=end_s,
            stream=stream.number,
            is_async=is_async,
        )
        self._sequences[key] += 1
        return line, end_s

    def _line(self, key: Any) -> Line:
        if key not in self._lines:
            self._lines[key] = self._clock.line()
        return self._lines[key]

    def _end(self, line: Line, end_s: float, *, is_host: bool) -> None:
        self._clock.stall(self._device.line, end_s, line)
        if is_host:
            self._clock.host_reaches(end_s)

    def _wrap_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            with torch._C._DisableTorchDispatch():
                result = original(work, *args, **kwargs)
            known = self._works.get(work)
            if known is not None:
                line, end_s, is_host = known
                self._end(line, end_s, is_host=is_host)
            return result

        return wait


def _nbytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_nbytes, value))
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
