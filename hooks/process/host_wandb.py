"""Our W&B values in the host's run, always with the host's step.

W&B lets only one process log into a run, so the companion writes values into files of its launch's
folder; the training process derives each step's values, and logs tables, score and report.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from ...calib.plain_json import parse_json
from ...calib.records.run_values import (
    ITERATION,
    LEVELS,
    PREFIX,
    RATES,
    TIME,
    UnsentValues,
    hours_remaining,
    progress,
)
from .host import Reference, reference
from .launch_identity import launch_folder
from .pacing import Pacer

FORECAST = "forecast.json"
HOST_VALUES, HOST_TABLES = "host_values.json", "host_tables.jsonl"
"""Newest values, summary and alerts; and the tables, one row per line."""
ATTACHED = ("report.html", "timeline.json.gz")
"""Files of the answer that become an artifact of the run."""
# Limits in case somebody else has put a huge file there.
_MOST_NBYTES, _MOST_TABLE_NBYTES = 1 << 20, 1 << 25
_REPORT_EVERY_S = 3600.0
"""Least interval between reports that are attached while the run goes on."""
_OF_THE_STEP = frozenset({ITERATION, TIME, "step_time_s", "eta_h", "progress_frac"})
"""Values that the training process itself knows for each logged step."""


def host_run() -> Any | None:
    """Return the run that the host has open in this process; never imports W&B."""
    with suppress(Exception):  # a module that is not W&B's, or is only half imported
        return getattr(sys.modules.get("wandb"), "run", None)
    return None


def define_steps(run: Any) -> None:
    """Plot our metrics over our own step count; the host's metrics are not redefined."""
    run.define_metric(PREFIX + ITERATION, hidden=True)
    run.define_metric(f"{PREFIX}*", step_metric=PREFIX + ITERATION)


def wandb_table(wandb: Any, rows: Iterable[Mapping[str, Any]]) -> Any:
    """Return a W&B table of rows that all have the columns of the first one."""
    table: Any = None
    for row in rows:
        table = table or wandb.Table(columns=list(row))
        table.add_data(*(row.get(column) for column in table.columns))
    return table


def attach_report(wandb: Any, run: Any, folder: Path) -> bool:
    """Log the report of a folder as an artifact of the run; False if there is none."""
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
    """Output of the companion so far; ``num_tables`` counts how often it has sent tables."""

    values: Mapping[str, float] = field(default_factory=dict)
    summary: Mapping[str, float | str] = field(default_factory=dict)
    alerts: Sequence[tuple[str, str]] = ()
    num_tables: int = 0

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> CompanionOutput:
        """Return the output in the file's object; raises ``ValueError`` and the like if
        malformed."""
        return CompanionOutput(
            values=_numbers(value["values"]),
            summary=_numbers(value["summary"]) | _texts(value["summary"]),
            alerts=[(str(title), str(text)) for title, text in value["alerts"]],
            num_tables=int(value["num_tables"]),
        )


class CompanionFiles:
    """Files of this launch's companion for the host's run; read outside the training thread."""

    def __init__(self, directory: Path, launch_id: Callable[[], str]) -> None:
        self._directory = directory
        self._launch_id = launch_id
        self._version: tuple[int, ...] = ()
        self.output = CompanionOutput()

    @property
    def folder(self) -> Path | None:
        """Folder of the launch, once it has a name."""
        name = self._launch_id()
        return launch_folder(self._directory, name) if name else None

    def poll(self) -> None:
        """Read the values if they have changed; ignore a missing or damaged file, or another
        launch's."""
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
        """Return the rows of tables numbered above ``since``; damaged lines are skipped."""
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
    """Logger of ``calib/*`` values of each step, summary, tables and report into the host's run.

    If ``is_home`` is false, on ranks without the companion, only values of steps are logged.
    """

    def __init__(
        self, files: CompanionFiles, *, is_stepped: bool = True, is_home: bool = True
    ) -> None:
        self._files = files
        self._is_stepped = is_stepped
        self._is_home = is_home
        self._bare_s: deque[float] = deque(maxlen=64)
        self._unsent = UnsentValues()
        self._run: Reference = reference(None)
        self._is_open = False
        self._handed = CompanionOutput()
        self._next_report_s = -math.inf

    def note_bare(self, time_s: float) -> None:
        """Add a bare step of a window, the prediction until there is an answer."""
        self._bare_s.append(time_s)

    def log(self, *, step: int, time_s: float, is_after_window: bool, unix_s: float = 0.0) -> None:
        """Log the step, which ended at ``unix_s``, under the host's number for it.

        That is ``step + 1``, or one more than the host's last if a resumed run counts on.  For a
        host of unknown numbering, a row ahead of its own would make W&B reject the host's: the
        latest values are then added to the host's next row, once it has begun one of its own: a
        row of ours alone would stand where the host's counting begins.
        """
        run = host_run()
        if run is None:
            return
        if self._run() is not run:
            is_open = self._is_stepped or run.settings.mode == "shared"  # which has no steps
            self._run, self._is_open = reference(run), is_open
            define_steps(run)
        # Here too, since the writer's thread may come late on a busy machine.
        self._is_open = self._is_open or run.step > run.starting_step
        if not self._is_open:
            return
        values = self._values(step + 1, time_s, unix_s, is_after_window=is_after_window)
        row_values = {ITERATION: step + 1, **self._unsent.of(values)}
        row = {PREFIX + name: value for name, value in row_values.items()}
        if self._is_stepped:
            run.log(row, step=max(step, run.step) + 1)
        else:
            run.log(row, commit=False)

    def poll(self, *, is_final: bool = False) -> None:
        """Read the companion's output, and log its summary, alerts, tables and report.

        Never called from the training thread: a table takes milliseconds.
        """
        self._files.poll()
        run, wandb = host_run(), sys.modules.get("wandb")
        if run is not None and run is self._run() and not self._is_open:
            self._is_open = run.step > run.starting_step
        if run is None or not self._is_home:
            return
        output, handed = self._files.output, self._handed
        if not self._is_open:  # a table would begin a row
            output = replace(output, num_tables=handed.num_tables)
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
                values["eta_h"] = hours_remaining(finish_unix_s, unix_s)
        return values

    def _predicted(self, known: Mapping[str, float], time_s: float) -> dict[str, float]:
        """Return the prediction, its error and, given an interval, if the step lies in it."""
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
    """Return the rates of a step, scaled from the companion's last step by the ratio of times."""
    faster = companion_values.get("step_time_s", 0.0) / time_s if time_s > 0.0 else 0.0
    return {
        name: faster * companion_values[name]
        for name in RATES
        if faster and name in companion_values
    }


def _texts(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: text for name, text in values.items() if isinstance(text, str)}


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the finite numbers among the values."""
    finite_values = {}
    for name, value in values.items():
        with suppress(OverflowError):
            if isinstance(value, (int, float)) and math.isfinite(value):
                finite_values[str(name)] = float(value)
    return finite_values
