"""The values of our own W&B run in the host's run, always with the host's step.

The companion writes it into files of its launch's folder, since W&B lets one process log into a
run; the training process derives each step's values, and hands on tables, score and report.
"""

from __future__ import annotations

import json
import math
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ...calib.plain_json import parse_json
from ...calib.records import ITERATION, LEVELS, PREFIX, RATES, TIME, Unsent, hours_left, progress
from .cores import Pacer
from .launch_identity import launch_folder

FORECAST = "forecast.json"
HOST_VALUES, HOST_TABLES = "host_values.json", "host_tables.jsonl"
"""The newest values, summary and alerts; and the tables, each row on a line."""
ATTACHED = ("report.html", "timeline.json.gz")
"""Files of the answer that become an artifact of the run."""
# A file that somebody else put there is not read whole.
_MOST_NBYTES, _MOST_TABLE_NBYTES = 1 << 20, 1 << 25
_REPORT_EVERY_S = 3600.0
"""How far reports that are handed on while the run goes on lie apart, at least."""
_OF_THE_STEP = frozenset({ITERATION, TIME, "step_time_s", "eta_h", "progress_frac"})
"""Values that the training process knows itself for the step that it logs."""


def host_run() -> Any | None:
    """The run that the host has open in this process; W&B is never imported for it."""
    with suppress(Exception):  # a module that is not W&B's, or is only half imported
        return getattr(sys.modules.get("wandb"), "run", None)
    return None


def define_steps(run: Any) -> None:
    """Draw what is ours over our own count of steps; nothing of the host's is defined by it."""
    run.define_metric(PREFIX + ITERATION, hidden=True)
    run.define_metric(f"{PREFIX}*", step_metric=PREFIX + ITERATION)


def wandb_table(wandb: Any, rows: Iterable[Mapping[str, Any]]) -> Any:
    """A W&B table of rows that all have the columns of the first one."""
    table: Any = None
    for row in rows:
        table = table or wandb.Table(columns=list(row))
        table.add_data(*(row.get(column) for column in table.columns))
    return table


def attach_report(wandb: Any, run: Any, folder: Path) -> bool:
    """Log the report of a folder as an artifact of the run; False where there is none."""
    artifact = wandb.Artifact(f"forerun-{run.id}", type="forerun")
    for name in ATTACHED:
        path = (folder / name).absolute()
        if path.is_file():
            artifact.add_file(str(path), name=name, skip_cache=True)
    if artifact.manifest.entries:
        run.log_artifact(artifact)
    return bool(artifact.manifest.entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompanionOutput:
    """The companion's words so far; ``num_tables`` counts the times that it sent tables."""

    values: Mapping[str, float] = field(default_factory=dict)
    summary: Mapping[str, float] = field(default_factory=dict)
    alerts: Sequence[tuple[str, str]] = ()
    num_tables: int = 0

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> CompanionOutput:
        """The same from the file's object; raises ``ValueError`` and the like where it is none."""
        return CompanionOutput(
            values=_numbers(value["values"]),
            summary=_numbers(value["summary"]),
            alerts=[(str(title), str(text)) for title, text in value["alerts"]],
            num_tables=int(value["num_tables"]),
        )


class CompanionFiles:
    """The files of this launch's companion for the host's run; read off the training thread."""

    def __init__(self, directory: Path, launch_id: Callable[[], str]) -> None:
        self._directory = directory
        self._launch_id = launch_id
        self._version: tuple[int, ...] = ()
        self.output = CompanionOutput()

    @property
    def folder(self) -> Path | None:
        """The folder of the launch, once that has a name."""
        name = self._launch_id()
        return launch_folder(self._directory, name) if name else None

    def poll(self) -> None:
        """Read the values where they have changed; a file that is missing, damaged or another
        launch's changes nothing."""
        if (folder := self.folder) is None:
            return
        path = folder / HOST_VALUES
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
            status = path.lstat()
            # A pipe would wait for its writer.
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_NBYTES:
                return
            version = (status.st_mtime_ns, status.st_ino, status.st_size)
            if version == self._version:
                return
            value = parse_json(path.read_bytes())
            self._version = version
            if isinstance(value, dict) and value.get("launch_id") == self._launch_id():
                self.output = CompanionOutput.from_json(value)

    def tables(self, since: int) -> dict[str, list[dict[str, Any]]]:
        """The tables that were sent after ``since`` others; damaged lines are passed over."""
        rows_by_table: dict[str, list[dict[str, Any]]] = {}
        for line in Pacer().over(self._lines()):
            with suppress(ValueError, TypeError, KeyError):
                row = json.loads(line)
                if int(row["number"]) > since:
                    rows_by_table.setdefault(str(row["table"]), []).append(dict(row["row"]))
        return rows_by_table

    def _lines(self) -> Iterator[str]:
        folder = self.folder
        path = folder / HOST_TABLES if folder is not None else None
        with suppress(OSError, UnicodeError):
            if path is not None and path.is_file() and path.stat().st_size <= _MOST_TABLE_NBYTES:
                with path.open(encoding="utf-8") as file:
                    yield from file


class HostWandb:
    """Logs ``calib/*`` of each step into the host's run, and what else our own run would have.

    Where ``is_home`` is false, that is on another rank than the one that has the companion, the
    values of steps alone.
    """

    def __init__(
        self, files: CompanionFiles, *, is_stepped: bool = True, is_home: bool = True
    ) -> None:
        self._files = files
        self._is_stepped = is_stepped
        self._is_home = is_home
        self._bare_s: deque[float] = deque(maxlen=64)
        self._unsent = Unsent()
        self._is_defined = False
        self._handed = CompanionOutput()
        self._next_report_s = -math.inf

    def note_bare(self, time_s: float) -> None:
        """A bare step of a window: the prediction until there is an answer."""
        self._bare_s.append(time_s)

    def log(self, *, step: int, time_s: float, is_after_window: bool, unix_s: float = 0.0) -> None:
        """Log the step, which ended at ``unix_s``, under the number that the host gives to it.

        That is ``step + 1``, or the next after the host's last where a resumed run counts on.  Of
        a host whose numbers are not known, a row ahead of its own would make W&B reject those:
        there the values wait for the host's next row, and the latest ones go with it.
        """
        run = host_run()
        if run is None:
            return
        if not self._is_defined:
            self._is_defined = True
            define_steps(run)
        values = self._values(step + 1, time_s, unix_s, is_after_window=is_after_window)
        row_values = {ITERATION: step + 1, **self._unsent.of(values)}
        row = {PREFIX + name: value for name, value in row_values.items()}
        if self._is_stepped:
            run.log(row, step=max(step, run.step) + 1)
        else:
            run.log(row, commit=False)

    def poll(self, *, is_final: bool = False) -> None:
        """Read what the companion has said, and hand on what is no value of a step.

        Never from the training thread: a table takes milliseconds.
        """
        self._files.poll()
        run, wandb = host_run(), sys.modules.get("wandb")
        if run is None or not self._is_home:
            return
        output, handed = self._files.output, self._handed
        self._handed = output
        for name, value in output.summary.items():
            if handed.summary.get(name) != value:
                run.summary[PREFIX + name] = value
        for title, text in output.alerts[len(handed.alerts) :]:
            run.alert(title=title, text=text)
        if output.num_tables > handed.num_tables:
            for name, rows in self._files.tables(handed.num_tables).items():
                run.log({PREFIX + name: wandb_table(wandb, Pacer().over(rows))}, commit=False)
        if output.num_tables and (is_final or output.num_tables > handed.num_tables):
            self._attach(wandb, run, is_final=is_final)

    def _attach(self, wandb: Any, run: Any, *, is_final: bool) -> None:
        now_s = time.monotonic()
        if (folder := self._files.folder) is None or not (is_final or now_s >= self._next_report_s):
            return
        if attach_report(wandb, run, folder):
            self._next_report_s = now_s + _REPORT_EVERY_S

    def _values(
        self, iteration: int, time_s: float, unix_s: float, *, is_after_window: bool
    ) -> dict[str, float]:
        companion_values = self._files.output.values
        values = {"step_time_s": time_s, **({TIME: unix_s} if unix_s else {})}
        values |= progress(iteration, int(companion_values.get("num_steps", 0)))
        names = (
            n
            for n in companion_values
            if n not in _OF_THE_STEP and (is_after_window or n in LEVELS)
        )
        values |= {name: companion_values[name] for name in names}
        if is_after_window:
            values |= self._predicted(values, time_s)
            values |= _rates(companion_values, time_s)
            if unix_s and (finish_unix_s := companion_values.get("finish_p50_unix_s")):
                values["eta_h"] = hours_left(finish_unix_s, unix_s)
        return values

    def _predicted(self, known: Mapping[str, float], time_s: float) -> dict[str, float]:
        """The prediction, its error, and whether the step lies in the band where there is one."""
        predicted_s = known.get("step_time_predicted_s")
        if predicted_s is None and self._bare_s:
            predicted_s = median(self._bare_s)
        if predicted_s is None or time_s <= 0.0:
            return {}
        prediction_values = {
            "step_time_predicted_s": predicted_s,
            "step_time_error_frac": predicted_s / time_s - 1.0,
        }
        ends = (known.get(f"step_time_predicted_{end}_s") for end in ("low", "high"))
        low_s, high_s = ends
        if low_s is not None and high_s is not None:
            prediction_values["is_in_interval"] = float(low_s <= time_s <= high_s)
        return prediction_values


def _rates(companion_values: Mapping[str, float], time_s: float) -> dict[str, float]:
    """Rates of a step: they are as much higher as it is shorter than the companion's last one."""
    faster = companion_values.get("step_time_s", 0.0) / time_s if time_s > 0.0 else 0.0
    return {
        name: faster * companion_values[name]
        for name in RATES
        if faster and name in companion_values
    }


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among the values."""
    finite_values = {}
    for name, value in values.items():
        with suppress(OverflowError):
            if isinstance(value, (int, float)) and math.isfinite(value):
                finite_values[str(name)] = float(value)
    return finite_values
