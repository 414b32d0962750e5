"""Messages of ranks to the companion's rank: that a window is written, or its summary.

They go over the store of the process group, from the writer's thread: no collective, no barrier.
Each rank has one key, so that the store has at most one window of a run; collected messages are
deleted.  All ranks derive each rank's records and messages from the same plan, without
communication.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...calib.records.files import replace_file
from ...calib.records.packed import pack
from ...calib.workload.config import RunConfig
from ...calib.workload.recording import (
    MESSAGE_NBYTES,
    SMALL_WORLD,
    SUMMARIES_NBYTES,
    RecordingDetail,
    RecordingPlan,
    recording_plan,
)
from ..process.settings import RankInfo, Settings
from ..process.votes import StoreLink, find_link, read_values

_log = logging.getLogger(__name__)
BATCH = 256
"""Keys per request."""
SPREAD_S = 0.001
"""Delay between the messages of consecutive ranks, so that the server is not flooded."""
PATIENCE_S = 30.0
"""Timeout for messages, beyond their spread."""
LAST_PATIENCE_S = 10.0
"""Timeout for messages at the end of the process."""
PAUSE_S = 0.002
_TICK_S = 0.2
# A warning lists no more ranks than this, after their total number.
_NUM_NAMED = 8
_SEPARATOR = b"\n"


@dataclass(slots=True)
class _Collection:
    """A window whose messages are being collected."""

    window: int
    batches: list[list[int]]
    on_complete: Callable[[], None] | None
    since_s: float
    next_s: float = 0.0
    summaries: list[bytes] = field(default_factory=list)


class Exchange:
    """One rank's end: it sends or, if ``is_home``, collects and writes messages."""

    def __init__(self, rank: RankInfo, folder: Path) -> None:
        self.is_home = rank.is_last
        self._rank = rank
        self._folder = folder
        self._plan: RecordingPlan | None = None
        self._link: StoreLink | None = None
        self._outgoing: tuple[bytes, float] | None = None
        self._collection: _Collection | None = None
        self._packed_windows: list[str] = []
        self._has_warned = False
        self.num_received_nbytes = 0

    def begin(self, plan: RecordingPlan) -> None:
        """Set the plan, and locate the store."""
        self._plan = plan
        self._link = find_link(self._rank.run_id)

    def hand_over(
        self, window: int, message: str, *, on_complete: Callable[[], None] | None = None
    ) -> None:
        """Send this rank's written window, or begin to collect those of the others.

        ``on_complete`` is called once all available messages are collected; on other ranks at once.
        """
        data = message.encode()
        if self.is_home:
            self._settle()
            self._collect(window, data, on_complete)
            return
        if on_complete is not None:
            on_complete()
        if len(data) > MESSAGE_NBYTES:
            self._warn(f"a message of {len(data)} bytes is larger than {MESSAGE_NBYTES}")
            return
        due_s = time.monotonic() + self._rank.rank * SPREAD_S
        self._outgoing = (_head(window) + data, due_s)

    def poll(self) -> None:
        """Do what is due; called whenever the writer is idle."""
        now_s = time.monotonic()
        if self._outgoing is not None and now_s >= self._outgoing[1]:
            self._send()
        collection = self._collection
        if collection is not None and now_s >= collection.next_s:
            self._look(collection)
            collection.next_s = time.monotonic() + 1.0

    def finish(self, patience_s: float = LAST_PATIENCE_S) -> None:
        """Send what remains and wait for missing messages, at most ``patience_s``, as the process
        ends."""
        self._send()
        until_s = time.monotonic() + patience_s
        while self._collection is not None and time.monotonic() < until_s:
            self._look(self._collection)
            if self._collection is not None:
                time.sleep(_TICK_S)
        self._settle()

    def _send(self) -> None:
        if self._outgoing is None:
            return
        (data, _), self._outgoing = self._outgoing, None
        try:
            self._connect().set(str(self._rank.rank), data)
        except (OSError, RuntimeError) as err:
            self._warn(str(err))

    def _connect(self) -> Any:
        if self._link is None:
            raise OSError("there is no process group")
        return self._link.connect()

    def _collect(
        self, window: int, local_message: bytes, on_complete: Callable[[], None] | None
    ) -> None:
        assert self._plan is not None
        others = [r for r in range(self._plan.world_size) if r != self._rank.rank]
        self._collection = _Collection(
            window=window,
            batches=[others[i : i + BATCH] for i in range(0, len(others), BATCH)],
            on_complete=on_complete,
            since_s=time.monotonic(),
        )
        if self._rank.rank not in self._plan.parts:
            self._collection.summaries.append(local_message)

    def _look(self, collection: _Collection) -> None:
        """Take the available messages; settle if none is missing or after the timeout."""
        waited_s = time.monotonic() - collection.since_s
        spread_s = SPREAD_S * self._rank.world_size
        try:
            # A slow rank delays its whole batch until the spread is over, then only itself.
            self._take_all(collection, splits=waited_s > spread_s)
        except (OSError, RuntimeError) as err:
            self._warn(str(err))
            self._settle()
            return
        if not collection.batches or waited_s > spread_s + PATIENCE_S:
            self._settle()

    def _take_all(self, collection: _Collection, *, splits: bool) -> None:
        store = self._connect()
        remaining_batches: list[list[int]] = []
        for batch in collection.batches:
            messages = read_values(store, [str(rank) for rank in batch])
            if messages is not None:
                stale = self._take(store, collection, dict(zip(batch, messages, strict=True)))
                remaining_batches += [stale] if stale else []
            elif splits and len(batch) > 1:
                half = len(batch) // 2
                remaining_batches += [batch[:half], batch[half:]]
            else:
                remaining_batches.append(batch)
            time.sleep(PAUSE_S)
        collection.batches = remaining_batches

    def _take(self, store: Any, collection: _Collection, messages: dict[int, bytes]) -> list[int]:
        """Keep received summaries; return the ranks whose message was of an earlier window."""
        assert self._plan is not None
        stale = []
        for rank, data in messages.items():
            head, _, text = data.partition(_SEPARATOR)
            self.num_received_nbytes += len(data)
            if rank not in self._plan.parts:
                collection.summaries.append(text)
            if head + _SEPARATOR != _head(collection.window):
                stale.append(rank)
            store.delete_key(str(rank))
        return stale

    def _settle(self) -> None:
        """Close the open collection, which is as complete as it will be."""
        collection, self._collection = self._collection, None
        if collection is None:
            return
        missing = [rank for batch in collection.batches for rank in batch]
        if missing:
            self._warn(f"no message of window {collection.window} from {_names(missing)}")
        with suppress(OSError):
            self._write_summaries(collection.summaries)
        if collection.on_complete is not None:
            collection.on_complete()

    def _write_summaries(self, summaries: Iterable[bytes]) -> None:
        """Write one packed line per window; drop the oldest if the file would grow too large."""
        lines = [text.decode() for text in summaries]
        if not lines:
            return
        self._packed_windows.append(pack(lines))
        while (
            len(self._packed_windows) > 1 and sum(map(len, self._packed_windows)) > SUMMARIES_NBYTES
        ):
            self._packed_windows.pop(0)
        replace_file(self._folder / "summaries.jsonl", "".join(self._packed_windows))

    def _warn(self, reason: object) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "[forerun] exchange between ranks: %s; only records in --calibrate-dir are used",
                reason,
            )


class RecordingRole:
    """Part of this rank in recording: decided before the first hooked step, until then everything.

    Small worlds send nothing.
    """

    def __init__(self, settings: Settings) -> None:
        self._rank = settings.rank
        self._config: RunConfig | None = None
        self._is_decided = False
        self.part = RecordingDetail.OPERATORS
        self.exchange: Exchange | None = None
        if self._rank.world_size > SMALL_WORLD:
            folder = settings.directory / "records" / self._rank.run_id
            self.exchange = Exchange(self._rank, folder)

    def describe(self, config: RunConfig | None) -> None:
        """Set the run's configuration, for which the part is decided anew."""
        self._config, self._is_decided = config, False

    def decide(self, *, is_home: bool | None) -> RecordingPlan | None:
        """Return the plan once, when the writer needs it; ``is_home`` as the host reports it."""
        if self._is_decided or self.exchange is None:
            return None
        self._is_decided = True
        layout = None if self._config is None else self._config.parallelism
        plan = recording_plan(self._rank.world_size, layout)
        self.part = plan.part(self._rank.rank)
        self.exchange.is_home = self._rank.is_last if is_home is None else is_home
        return plan


def _head(window: int) -> bytes:
    return str(window).encode() + _SEPARATOR


def _names(ranks: list[int]) -> str:
    named = ", ".join(str(rank) for rank in sorted(ranks)[:_NUM_NAMED])
    return f"{len(ranks)} ranks: {named}{', ...' if len(ranks) > _NUM_NAMED else ''}"
