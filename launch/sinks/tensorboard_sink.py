"""TensorBoard sink: event files by tensorboard's writer, next to the host's or in our directory.

They have a separate folder, because TensorBoard follows one file per folder at a time; it shows
both folders side by side.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...calib.records.files import open_owned
from ...calib.records.run_values import PREFIX, TIME
from ...calib.workload.run_options import AutoSwitch
from ...hooks.process.interpreter import is_installed
from ...hooks.process.settings import CompanionSettings
from ..views.table import markdown_rows
from .sink import OFF_UNWRITABLE, Sink, is_writable

FOLDER = "forerun"
"""Subfolder of the host's event folder."""
_PRECISE = "unix_s"
"""Suffix of names that need 64 bits: a 32-bit float resolves Unix seconds only to 128 s."""


class Events(Sink):
    """Writes scalars with training's time and step, and tables and alerts as text."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        super().__init__(str(folder))
        event, summary, tensor, types = (
            _messages(n) for n in ("event", "summary", "tensor", "types")
        )
        self._event, self._summary = event.Event, summary.Summary
        self._metadata, self._tensor, self._types = (
            summary.SummaryMetadata,
            tensor.TensorProto,
            types,
        )
        # Unbuffered: tensorboard's writer thread would print a full disk's error in the training
        # log.
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = open_owned(folder / name).detach()
        self._writer = RecordWriter(self._file)
        self._unix_s, self._step = 0.0, 0
        version = self._event(wall_time=time.time(), file_version="brain.Event:2")
        self._writer.write(version.SerializeToString())

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Write one event with all values, at the time of the step."""
        self._unix_s, self._step = values.get(TIME, self._unix_s), step
        self._add([self._scalar(name, value) for name, value in values.items() if name != TIME])

    def tables(self, step: int, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Write each table as Markdown."""
        self._step = step
        self._add([self._text(name, markdown(rows)) for name, rows in tables.items() if rows])

    def alert(self, title: str, text: str) -> None:
        """Write the alert as text, at the current step."""
        self._add([self._text("alerts", f"**{title}**: {text}")])

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write the numbers of the summary, then close the file."""
        numbers = {name: value for name, value in summary.items() if isinstance(value, int | float)}
        self._add([self._scalar(f"summary/{name}", value) for name, value in numbers.items()])
        self._file.close()

    def _add(self, values: Sequence[Any]) -> None:
        if values:
            event = self._event(step=self._step, summary=self._summary(value=values))
            event.wall_time = self._unix_s or time.time()
            self._writer.write(event.SerializeToString())

    def _scalar(self, name: str, value: float) -> Any:
        tag = PREFIX + name
        if not name.endswith(_PRECISE):
            return self._summary.Value(tag=tag, simple_value=value)
        tensor = self._tensor(dtype=self._types.DT_DOUBLE, double_val=[value])
        return self._summary.Value(tag=tag, tensor=tensor, metadata=self._plugin("scalars"))

    def _text(self, name: str, text: str) -> Any:
        tensor = self._tensor(dtype=self._types.DT_STRING, string_val=[text.encode()])
        plugin = self._plugin("text")
        return self._summary.Value(tag=PREFIX + name, tensor=tensor, metadata=plugin)

    def _plugin(self, name: str) -> Any:
        return self._metadata(plugin_data=self._metadata.PluginData(plugin_name=name))


def _messages(name: str) -> Any:
    """Import a protocol-buffer module of tensorboard, which is untyped."""
    return importlib.import_module(f"tensorboard.compat.proto.{name}_pb2")


def open_tensorboard(companion_settings: CompanionSettings) -> Sink:
    """Return the sink of event files next to the host's, else in our directory."""
    settings = companion_settings.settings
    wanted = settings.tensorboard
    if wanted is AutoSwitch.OFF:
        return Sink("")
    if not is_installed("tensorboard"):
        is_missed = wanted is AutoSwitch.ON or bool(companion_settings.host_tensorboard)
        return Sink(
            "off (not installed: pip install tensorboard, if you want it)" if is_missed else ""
        )
    if companion_settings.host_tensorboard:
        return Events(Path(companion_settings.host_tensorboard) / FOLDER)
    if not is_writable(settings.directory):
        return Sink(OFF_UNWRITABLE)
    name = companion_settings.launch_id or settings.rank.run_id
    return Events(settings.directory / "tensorboard" / name)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table with a column for each key of the first row.

    >>> markdown([{"rank": "0", "waits (s)": 0.5}, {"rank": "1", "waits (s)": None}])
    '| rank | waits (s) |\\n| --- | --- |\\n| 0 | 0.5 |\\n| 1 |  |'
    """
    cells = [["" if value is None else str(value) for value in row.values()] for row in rows]
    return "\n".join(markdown_rows([*rows[0]], cells))
