"""Reads an offline W&B run back: a LevelDB log of protocol buffers behind a 7-byte header."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32 * 1024
_HEADER = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def history(directory: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return (step, values) of every logged row of the only offline run under ``directory``."""
    return rows_of(_only_run(directory))


def records(directory: Path) -> Iterator[Any]:
    """Yield all records of the only offline run under ``directory``."""
    return records_of(_only_run(directory))


def await_end(directory: Path) -> None:
    """W&B's own process may still write an offline run that ``finish`` has closed."""
    until = time.monotonic() + 60.0
    while not any(record.HasField("exit") for record in records(directory)):
        assert time.monotonic() < until
        time.sleep(0.05)


def rows_of(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return (step, values) of every logged row of one run's file."""
    rows = []
    for record in records_of(path):
        if record.WhichOneof("record_type") == "history":
            row = {
                (item.key or ".".join(item.nested_key)): json.loads(item.value_json)
                for item in record.history.item
            }
            rows.append((int(row.get("_step", record.history.step.num)), row))
    return rows


def records_of(path: Path) -> Iterator[Any]:
    """Yield all records of one run's file."""
    from wandb.proto import wandb_internal_pb2

    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        yield record


def _only_run(directory: Path) -> Path:
    (path,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    return path


def _records(data: bytes) -> Iterator[bytes]:
    place, parts = 7, b""
    while place + _HEADER.size <= len(data):
        remaining = _BLOCK - place % _BLOCK
        if remaining < _HEADER.size:
            place += remaining
            continue
        _, size, kind = _HEADER.unpack_from(data, place)
        body = data[place + _HEADER.size : place + _HEADER.size + size]
        if len(body) < size:
            return  # It is being written.
        place += _HEADER.size + size
        parts = body if kind in (_FULL, _FIRST) else parts + body
        if kind in (_FULL, _LAST):
            yield parts
