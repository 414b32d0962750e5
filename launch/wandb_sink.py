"""The run of our own on W&B, for hosts that have none; lives in the companion, never in training.

All keys are spelt here.  Every ``log`` names its step: an unstepped one advances W&B's counter and
makes it reject what comes after.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..hooks.settings import WandbMode

PREFIX = "calib/"


class Sink(Protocol):
    """Where predicted against actual goes."""

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
    """Used where W&B is off or the host logs into its own run."""

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
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "forerun"),
            name=f"forerun-{run_id}",
            dir=str(directory),
            mode=_mode(),
            config={"calib": dict(config)},
            settings=wandb.Settings(silent=True, console="off"),
        )

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Log one mapping at this step."""
        self._run.log({PREFIX + key: value for key, value in values.items()}, step=step)

    def tables(self, step: int, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Log each non-empty table at this step."""
        made: dict[str, Any] = {}
        for name, rows in tables.items():
            if rows:
                columns = list(rows[0])
                data = [[row[column] for column in columns] for row in rows]
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
    """Our own run, or ``NoSink`` where W&B is off or the host has a run that the session logs into."""
    if mode is WandbMode.OFF or has_host_run:
        return NoSink()
    return OwnRun(directory=directory, run_id=run_id, config=config)


def _mode() -> Any:
    """Offline where there is no key; the user's ``WANDB_MODE`` wins."""
    chosen = os.environ.get("WANDB_MODE")
    if chosen:
        return chosen
    import wandb

    return "online" if wandb.api.api_key else "offline"
