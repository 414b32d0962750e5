"""The run of our own on W&B, for hosts that have none; lives in the companion, never in training.

Every ``log`` names its step: an unstepped one advances W&B's counter and makes it reject what comes
after.  Rows have the time of their step, not of their logging: W&B takes ``_timestamp`` for that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from ...calib.records import ITERATION, PREFIX, TIME, replace_file
from ...calib.workload import WandbMode
from ...hooks.process import (
    HOST_TABLES,
    HOST_VALUES,
    CompanionSettings,
    attach_report,
    define_steps,
    is_installed,
    wandb_table,
)
from ..store import place_of
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
"""How often the files of the host's run are replaced at most."""
_YES = ("1", "true", "yes", "on")


class ForerunRun(Sink):
    """A W&B run that belongs to Forerun; raises what ``wandb.init`` raises."""

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
        """Log one mapping at this step, and at its time."""
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
    """Our own run; a sink that takes nothing where W&B is off, or the host's run has the values."""
    wanted = companion_settings.settings.wandb
    if wanted is WandbMode.OFF:
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
    """What W&B keeps of tables and files until they are sent lies in our directory, not at home."""
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        os.environ.setdefault(name, str(directory.absolute()))


def _config(companion_settings: CompanionSettings) -> dict[str, Any]:
    """What of our settings the run is told; never arguments, paths or environment."""
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


def run_mode(wanted: WandbMode, environ: Mapping[str, str]) -> Mode:
    """Online only where the flag asks for it, and the user's ``WANDB_MODE`` does not forbid it."""
    chosen = environ.get("WANDB_MODE", "")
    if chosen == "disabled" or environ.get("WANDB_DISABLED", "").lower() in _YES:
        return "disabled"
    if wanted is not WandbMode.ON or chosen in ("offline", "dryrun"):
        return "offline"
    if chosen in ("online", "shared"):
        return chosen
    return "online" if has_key(environ) else "offline"


def _settings(wandb: Any) -> Any:
    """W&B's settings with all off that it collects by itself, as far as this version has them."""
    known = getattr(wandb.Settings, "model_fields", None) or wandb.Settings.__annotations__
    return wandb.Settings(**{name: value for name, value in _QUIET.items() if name in known})


def has_key(environ: Mapping[str, str] = os.environ) -> bool:
    """True where the environment or the netrc file holds a key, without asking the network."""
    if environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    path = Path(environ.get("NETRC", Path.home() / ".netrc"))
    try:
        return netrc(str(path)).authenticators(host or "") is not None
    except (OSError, NetrcParseError):
        return False


class HostRun(Sink):
    """The host's own W&B run: what it is to have lies in files, which the training process reads.

    W&B takes what is logged into a run from the process that opened it, offline always.  The
    values are replaced at most every ``EVERY_S`` seconds, and once more at the end.
    """

    def __init__(self, companion_settings: CompanionSettings) -> None:
        super().__init__(f"{PREFIX}* in the host's run")
        self._folder = place_of(companion_settings).path
        self._whole: dict[str, Any] = {
            "launch_id": companion_settings.launch_id, "values": {}, "summary": {}, "alerts": [], "num_tables": 0
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
        """The values take the place of earlier ones of their names."""
        self._put(values={**self._whole["values"], **values})

    def tables(self, step: int, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Write the latest of each table; the number says when it was sent."""
        number = self._whole["num_tables"] + 1
        for name, rows in tables.items():
            head = {"number": number, "table": name}
            self._lines[name] = [json.dumps({**head, "row": dict(row)}) for row in rows]
        lines = [line for table_lines in self._lines.values() for line in table_lines]
        replace_file(self._folder / HOST_TABLES, "".join(f"{line}\n" for line in lines))
        self._put(num_tables=number)

    def score(self, summary: Mapping[str, Any]) -> None:
        """Hand on where it has changed: the host may close its run before ours ends."""
        if summary != self._whole["summary"]:
            self._put(summary=dict(summary))

    def alert(self, title: str, text: str) -> None:
        """Have it sent by the host's run."""
        self._put(alerts=[*self._whole["alerts"], (title, text)])

    def close(self, summary: Mapping[str, Any]) -> None:
        """The last of all."""
        self._put(summary=dict(summary))
        self._newest.close()

    def _put(self, **changed: object) -> None:
        self._whole |= changed
        self._newest.put(json.dumps(self._whole))
