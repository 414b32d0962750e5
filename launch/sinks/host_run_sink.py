"""The host's own W&B run: what it is to have lies in files, which the training process reads.

W&B takes what is logged into a run from the process that opened it, offline always.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...calib.records import PREFIX, replace_file
from ...hooks.process import HOST_TABLES, HOST_VALUES, CompanionSettings
from ..directory.publishing import place_of
from .newest import Newest
from .sink import Sink

EVERY_S = 1.0


class HostRun(Sink):
    """Replaces the values at most every ``EVERY_S`` seconds, and once more at the end."""

    def __init__(self, told: CompanionSettings) -> None:
        super().__init__(f"{PREFIX}* in the host's run")
        self._folder = place_of(told).path
        self._launch_id = told.launch_id
        self._values: dict[str, float] = {}
        self._summary: dict[str, Any] = {}
        self._alerts: list[tuple[str, str]] = []
        self._lines: dict[str, list[str]] = {}
        self._num_tables = 0
        path = self._folder / HOST_VALUES
        self._newest: Newest[str] = Newest(
            lambda text: replace_file(path, text),
            every_s=EVERY_S,
            tell=lambda text: self.tell(text),
            name="forerun-host-run",
        )

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Keep them beside the latest of each other name."""
        self._values |= values
        self._put()

    def tables(self, step: int, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Write the latest of each table; the number says when it was sent."""
        self._num_tables += 1
        for name, rows in tables.items():
            head = {"number": self._num_tables, "table": name}
            self._lines[name] = [json.dumps({**head, "row": dict(row)}) for row in rows]
        lines = [line for held in self._lines.values() for line in held]
        replace_file(self._folder / HOST_TABLES, "".join(f"{line}\n" for line in lines))
        self._put()

    def score(self, summary: Mapping[str, Any]) -> None:
        """Hand on where it has changed: the host may close its run before ours ends."""
        if summary != self._summary:
            self._summary = dict(summary)
            self._put()

    def alert(self, title: str, text: str) -> None:
        """Have it sent by the host's run."""
        self._alerts.append((title, text))
        self._put()

    def close(self, summary: Mapping[str, Any]) -> None:
        """The last of all."""
        self._summary = dict(summary)
        self._put()
        self._newest.close()

    def _put(self) -> None:
        whole = {
            "launch_id": self._launch_id,
            "values": self._values,
            "summary": self._summary,
            "alerts": self._alerts,
            "num_tables": self._num_tables,
        }
        self._newest.put(json.dumps(whole))
