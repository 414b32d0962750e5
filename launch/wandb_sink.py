"""The run of our own on W&B, for hosts that have none; lives in the companion, never in training.

All keys are spelt here.  Every ``log`` names its step: an unstepped one advances W&B's counter and
makes it reject what comes after.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlparse

from ..hooks.interpreter import is_installed
from ..hooks.settings import WandbMode

PREFIX = "calib/"


class Sink(Protocol):
    """Where predicted against actual goes; ``where`` says it in words."""

    @property
    def where(self) -> str:
        """For the transcript."""
        ...

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Log values at one step; keys without the prefix, with the unit as suffix."""
        ...

    def tables(self, step: int, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Log tables, one mapping per row."""
        ...

    def alert(self, title: str, text: str) -> None:
        """Tell the user now."""
        ...

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write the summary and finish our own run."""
        ...


class NoSink:
    """Used where W&B is off or the session logs into the host's run."""

    def __init__(self, where: str = "off") -> None:
        self._where = where

    @property
    def where(self) -> str:
        """What the reason is."""
        return self._where

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def tables(self, step: int, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Do nothing."""

    def alert(self, title: str, text: str) -> None:
        """Do nothing."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """Do nothing."""


class OwnRun:
    """A W&B run that belongs to Forerun; raises what ``wandb.init`` raises."""

    def __init__(self, *, directory: Path, run_id: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._wandb = wandb
        mode = _mode()
        self._where = f"{PREFIX}* ({mode})"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "forerun"),
            name=f"forerun-{run_id}",
            dir=str(directory),
            mode=mode,
            config={"calib": dict(config)},
            settings=wandb.Settings(silent=True, console="off"),
        )

    @property
    def where(self) -> str:
        """The keys, and whether they leave this machine."""
        return self._where

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Log one mapping at this step."""
        self._run.log({PREFIX + key: value for key, value in values.items()}, step=step)

    def tables(self, step: int, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Log each non-empty table at this step."""
        made: dict[str, Any] = {}
        for name, rows in tables.items():
            if rows:
                columns: list[Any] = list(rows[0])
                data: list[Any] = [[row[column] for column in columns] for row in rows]
                made[PREFIX + name] = self._wandb.Table(columns=columns, data=data)
        if made:
            self._run.log(made, step=step)

    def alert(self, title: str, text: str) -> None:
        """Send a W&B alert (kept in the file when offline)."""
        self._run.alert(title=title, text=text)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write the summary and finish."""
        for key, value in summary.items():
            self._run.summary[PREFIX + key] = value
        self._run.finish()


def open_sink(
    mode: WandbMode, *, has_host_run: bool, directory: Path, run_id: str, config: Mapping[str, Any]
) -> Sink:
    """Our own run; ``NoSink`` where W&B is off or the session logs into the host's run."""
    if mode is WandbMode.OFF:
        return NoSink()
    if has_host_run:
        return NoSink(f"{PREFIX}* in the host's run")
    if not is_installed("wandb"):
        return NoSink("off (pip install wandb, where it is wanted)")
    return OwnRun(directory=directory, run_id=run_id, config=config)


def _mode() -> Literal["online", "offline", "disabled", "shared"]:
    """Offline where there is no key; the user's ``WANDB_MODE`` wins."""
    chosen = os.environ.get("WANDB_MODE")
    if chosen in ("online", "offline", "disabled", "shared"):
        return chosen
    return "online" if has_key() else "offline"


def has_key() -> bool:
    """True where the environment or the netrc file holds a key, without asking the network."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    try:
        return netrc(str(path)).authenticators(host or "") is not None
    except (OSError, NetrcParseError):
        return False
