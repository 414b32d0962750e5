"""How a thread beside training may ask the device while another thread captures a graph.

CUDA keeps a capture mode for each thread.  In the usual one, ``global``, a question to an event
ends the validity of a capture that any thread began in the same mode; in ``relaxed`` it does not.
NCCL's own threads change theirs in this way before they ask.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

RELAXED = 2
"""``cudaStreamCaptureModeRelaxed`` and ``hipStreamCaptureModeRelaxed``."""

Exchange = Callable[[int], int]
"""Gives the calling thread this mode, and returns the one that it had."""


def find_exchange(load: Callable[[str], Any] = ctypes.CDLL) -> Exchange | None:
    """The runtime's own function; None where it cannot be found."""
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
            raise OSError(f"the capture mode of a thread cannot be changed: error {code}")
        return value.value

    return exchange


@contextmanager
def relaxed(exchange: Exchange) -> Iterator[None]:
    """For as long as that lasts, what this thread asks ends no capture of another."""
    before = exchange(RELAXED)
    try:
        yield
    finally:
        exchange(before)
