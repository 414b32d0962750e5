"""DeepEP as Megatron-LM calls it, on the stand-in for a GPU: a stream of its own, no process group.

Every token is sent to this rank's first expert, and comes twice: once from the other rank.
"""

from __future__ import annotations

from typing import Any

import torch
from device_timeline import timeline

DISPATCH_S, COMBINE_S = 0.004, 0.003
NUM_RANKS = 2


def _device() -> tuple[Any, Any]:
    """Return the clock of the device and the current queue."""
    one = timeline()
    assert one is not None
    return one.clock, one.device.line


class EventHandle:
    """Placeholder for the class of this name in ``deep_ep.utils``."""


class EventOverlap:
    """An event of the stream of transfers; the wait for it is made in C++, where no hook is."""

    def __init__(self, event: Any = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the transfers."""
        clock, line = _device()
        comm = Buffer.stream.line
        clock.stall(line, comm.busy_s, comm, is_logged=False)


class Buffer:
    """The methods of ``deep_ep.Buffer`` that Megatron calls."""

    stream: Any = None
    scale = 1.0

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @classmethod
    def begin(cls, scale: float) -> None:
        """Start on a new device; transfers take ``scale`` of their usual time."""
        cls.stream, cls.scale = torch.cuda.Stream(), scale

    @staticmethod
    def get_dispatch_config(size: int) -> Any:
        """Return hints for the sizes of buffers."""
        return _Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, indices: Any, num_experts: int, **_: Any) -> tuple[Any, ...]:
        """Return the tokens' destinations, here unspecified."""
        return None, None, None, None, EventOverlap()

    def dispatch(self, x: Any, handle: Any = None, **given: Any) -> tuple[Any, ...]:
        """Send tokens and return those that arrive."""
        self._transfer(DISPATCH_S)
        with torch._C._DisableTorchDispatch():
            rows = x.detach().repeat(NUM_RANKS, 1)
            indices = given.get("topk_idx")
            weights = given.get("topk_weights")
            if indices is None or weights is None:
                return rows, None, None, None, None, EventOverlap()
            indices = torch.zeros_like(indices).repeat(NUM_RANKS, 1)
            indices[:, 1:] = -1
            weights = weights.detach().repeat(NUM_RANKS, 1)
        return rows, indices, weights, [len(rows), 0], len(x), EventOverlap()

    def combine(self, x: Any, handle: Any, topk_weights: Any = None, **_: Any) -> tuple[Any, ...]:
        """Send rows back and return their sums."""
        self._transfer(COMBINE_S)
        with torch._C._DisableTorchDispatch():
            rows = x.detach()[:handle].clone()
            weights = None if topk_weights is None else topk_weights.detach()[:handle].clone()
        return rows, weights, EventOverlap()

    def _transfer(self, time_s: float) -> None:
        clock, line = _device()
        comm = self.stream.line
        clock.stall(comm, line.busy_s, line, is_logged=False)
        clock.launch(comm, time_s * self.scale)


class _Config:
    def get_nvl_buffer_size_hint(self, nbytes: int, size: int) -> int:
        return nbytes

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint
