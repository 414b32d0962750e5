"""W&B sink: our own run, or values for the host's; in the companion, never in training.

Every ``log`` gives its step: one without advances W&B's counter, so that later rows are rejected.
Rows carry the time of their step, not of their logging, in ``_timestamp``, which W&B uses.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from ...calib.records.files import CREATED, replace_file
from ...calib.records.run_values import ITERATION, PREFIX, TIME
from ...calib.workload.run_options import AutoSwitch
from ...hooks.process.host_wandb import (
    HOST_TABLES,
    HOST_VALUES,
    attach_report,
    define_steps,
    wandb_table,
)
from ...hooks.process.interpreter import is_installed
from ...hooks.process.settings import CompanionSettings
from ..store.place import place_of
from .sink import OFF_UNWRITABLE, Sink, ThrottledSender, is_writable

_MOMENT = "_timestamp"
Mode = Literal["online", "offline", "disabled", "shared"]
_QUIET: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "save_code": False,
    "host": "",
    "program": "",
    "username": "",
    **{
        prefix + name: value
        for prefix in ("x_", "_")
        for name, value in (
            ("disable_meta", True),
            ("disable_stats", True),
            ("disable_machine_info", True),
            ("save_requirements", False),
        )
    },
}
EVERY_S = 1.0
"""Minimum seconds between two replacements of the files for the host's run."""
_YES = ("1", "true", "yes", "on")


class ForerunRun(Sink):
    """W&B run owned by Forerun; raises what ``wandb.init`` raises."""

    def __init__(self, companion_settings: CompanionSettings, mode: Mode) -> None:
        import wandb

        self._wandb = wandb
        directory = companion_settings.settings.directory
        self._folder = place_of(companion_settings).path
        self._unix_s = companion_settings.started_unix_s
        _stay_in(directory / "wandb")
        sent = f"; wandb sync {directory}/wandb/offline-run-* sends it"
        super().__init__(f"{PREFIX}* ({mode}{sent if mode == 'offline' else ''})")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "forerun"),
            name=f"forerun-{companion_settings.settings.rank.run_id}",
            dir=str(directory),
            mode=mode,
            config={"calib": _config(companion_settings)},
            settings=_settings(wandb),
        )
        define_steps(self._run)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Log one mapping at this step and its time."""
        self._unix_s = values.get(TIME, self._unix_s)
        self._log(step, {ITERATION: step, **values})

    def tables(self, step: int, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Log each non-empty table at this step."""
        made = {name: wandb_table(self._wandb, rows) for name, rows in tables.items() if rows}
        if made:
            self._log(step, made)

    def alert(self, title: str, text: str) -> None:
        """Send a W&B alert (kept in the file when offline)."""
        self._run.alert(title=title, text=text)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, attach the report, and finish."""
        for key, value in summary.items():
            self._run.summary[PREFIX + key] = value
        attach_report(self._wandb, self._run, self._folder)
        self._run.finish()

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        row = {PREFIX + name: value for name, value in values.items()}
        self._run.log({**row, _MOMENT: self._unix_s} if self._unix_s else row, step=step)


def open_wandb(companion_settings: CompanionSettings) -> Sink:
    """Return our W&B run, a sink for the host's run, or an inactive sink if W&B is off."""
    wanted = companion_settings.settings.wandb
    if wanted is AutoSwitch.OFF:
        return Sink()
    if companion_settings.has_host_wandb:
        return HostRun(companion_settings)
    mode = run_mode(wanted, os.environ)
    if mode == "disabled":
        return Sink("off (WANDB_MODE)")
    if not is_installed("wandb"):
        return Sink("off (not installed: pip install wandb, if you want it)")
    if not is_writable(companion_settings.settings.directory):
        return Sink(OFF_UNWRITABLE)
    return ForerunRun(companion_settings, mode)


def _stay_in(directory: Path) -> None:
    """Keep W&B's staging and cache files in our directory instead of the home directory."""
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        os.environ.setdefault(name, str(directory.absolute()))


def _config(companion_settings: CompanionSettings) -> dict[str, Any]:
    """Return the settings that the W&B run records; never arguments, paths or environment."""
    settings = companion_settings.settings
    return {
        "confidence": settings.goals.confidence,
        "every": settings.every,
        "gpus": list(settings.goals.gpus),
        "num_local_ranks": settings.rank.local_world_size,
        "num_ranks": settings.rank.world_size,
        "num_restarts": companion_settings.num_restarts,
        "num_steps": companion_settings.num_steps,
        "on_advice": settings.on_advice.value,
        "steps": settings.steps,
    }


def run_mode(wanted: AutoSwitch, environ: Mapping[str, str]) -> Mode:
    """Return the mode: online only if the flag requests it and ``WANDB_MODE`` allows it."""
    chosen = environ.get("WANDB_MODE", "")
    if chosen == "disabled" or environ.get("WANDB_DISABLED", "").lower() in _YES:
        return "disabled"
    if wanted is not AutoSwitch.ON or chosen in ("offline", "dryrun"):
        return "offline"
    if chosen in ("online", "shared"):
        return chosen
    return "online" if has_key(environ) else "offline"


def _settings(wandb: Any) -> Any:
    """Return W&B settings with automatic collection disabled, as far as this version has them."""
    known = getattr(wandb.Settings, "model_fields", None) or wandb.Settings.__annotations__
    return wandb.Settings(**{name: value for name, value in _QUIET.items() if name in known})


def has_key(environ: Mapping[str, str] = os.environ) -> bool:
    """True if the environment or the netrc file holds a key; makes no network request."""
    if environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    path = Path(environ.get("NETRC", Path.home() / ".netrc"))
    try:
        return netrc(str(path)).authenticators(host or "") is not None
    except (OSError, NetrcParseError):
        return False


class HostRun(Sink):
    """Sink for the host's W&B run, through files that the training process reads.

    Only the process that opened a W&B run can log to it; offline, always.  The values are replaced
    at most every ``EVERY_S`` seconds, and once more at the end.
    """

    def __init__(self, companion_settings: CompanionSettings) -> None:
        super().__init__(f"{PREFIX}* in the host's run")
        self._folder = place_of(companion_settings).path
        self._whole: dict[str, Any] = {
            **CREATED, "launch_id": companion_settings.launch_id, "num_tables": 0,
            "values": {}, "summary": {}, "alerts": [],
        }  # fmt: skip
        self._lines: dict[str, list[str]] = {}
        path = self._folder / HOST_VALUES
        self._newest: ThrottledSender[str] = ThrottledSender(
            lambda text: replace_file(path, text),
            every_s=EVERY_S,
            notify=lambda text: self.notify(text),
            name="forerun-host-run",
        )

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Replace earlier values of these names."""
        self._put(values={**self._whole["values"], **values})

    def tables(self, step: int, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Write the latest version of each table, numbered in order of sending."""
        number = self._whole["num_tables"] + 1
        for name, rows in tables.items():
            head = {**CREATED, "number": number, "table": name}
            self._lines[name] = [json.dumps({**head, "row": dict(row)}) for row in rows]
        lines = [line for table_lines in self._lines.values() for line in table_lines]
        replace_file(self._folder / HOST_TABLES, "".join(f"{line}\n" for line in lines))
        self._put(num_tables=number)

    def score(self, summary: Mapping[str, Any]) -> None:
        """Forward a changed summary now, since the host may close its run before ours ends."""
        if summary != self._whole["summary"]:
            self._put(summary=dict(summary))

    def alert(self, title: str, text: str) -> None:
        """Forward the alert to the host's run."""
        self._put(alerts=[*self._whole["alerts"], (title, text)])

    def close(self, summary: Mapping[str, Any]) -> None:
        """Forward the final summary and flush."""
        self._put(summary=dict(summary))
        self._newest.close()

    def _put(self, **changed: object) -> None:
        self._whole |= changed
        self._newest.put(json.dumps(self._whole))
