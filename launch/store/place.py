"""Folder of a launch below ``runs``, in which its companion writes, and the link ``latest`` to it.

Standard library only: a companion notes its run before it loads anything else.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...calib.records.files import is_ours, replace_file
from ...calib.records.run_values import LAUNCH, RUNS
from ...hooks.process.launch_identity import launch_folder
from .run_folders import LATEST, latest_folder, launch_folders, run_ids_of

if TYPE_CHECKING:
    from ...hooks.process.settings import CompanionSettings

FORECASTS = "forecasts.jsonl"
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Directory, launch and run of a companion's files."""

    directory: Path
    """Directory given as ``--calibrate-dir``."""
    launch_id: str
    run_id: str = ""

    @property
    def path(self) -> Path:
        """Folder for answers."""
        return launch_folder(self.directory, self.launch_id)

    @property
    def shown(self) -> Path:
        """Folder for answers as shown to the user: ``DIR/latest`` if that is this one."""
        is_latest = latest_folder(self.directory) == self.path
        return _shown(self.directory / LATEST if is_latest else self.path)

    @property
    def asked(self) -> Path:
        """Directory by which a command gets this launch: ``DIR`` unless a newer one is there."""
        # A node whose wrapper gave another name has a folder without runs.
        newest = next(filter(run_ids_of, launch_folders(self.directory)), self.path)
        return _shown(self.directory if newest == self.path else self.path)

    def stamp(self) -> dict[str, Any]:
        """Return the run and launch ids that a file begins with."""
        return {"run_id": self.run_id, "launch_id": self.launch_id}

    def note_run(self) -> None:
        """Record this run as the newest of its launch."""
        names = [name for name in run_ids_of(self.path) if name != self.run_id]
        value = {"schema": SCHEMA, "launch_id": self.launch_id}
        value["run_ids"] = [*names, self.run_id]
        with suppress(OSError):  # the ranks report that nothing can be written
            replace_file(self.path / LAUNCH, json.dumps(value, indent=2) + "\n")

    @property
    def is_newest_run(self) -> bool:
        """False once a later run of the same launch writes into its folder."""
        names = run_ids_of(self.path)
        return not names or names[-1] == self.run_id

    def offer_latest(self) -> None:
        """Link ``DIR/latest`` to the launch's folder if nothing is there yet."""
        with suppress(OSError):
            os.symlink(self._target, self.directory / LATEST)

    def take_latest(self) -> str:
        """Link ``DIR/latest`` to the launch's folder; return a message if that is not ours.

        Nothing happens on a file system without links: whoever reads looks at ``runs``.
        """
        link = self.directory / LATEST
        if os.path.lexists(link) and latest_folder(self.directory) is None:
            return (
                f"not written by Forerun and left alone: {_shown(link)}; this run's answers are in "
                f"{_shown(self.path)}"
            )
        temporary = link.with_name(f".{LATEST}.{secrets.token_hex(8)}.tmp")
        with suppress(OSError):
            os.symlink(self._target, temporary)
            try:
                os.replace(temporary, link)
            except OSError:
                temporary.unlink()
        return ""

    @property
    def _target(self) -> str:
        return f"{RUNS}/{self.launch_id}"


def place_of(companion_settings: CompanionSettings) -> Place:
    """Return the place in which the companion with these settings writes."""
    settings = companion_settings.settings
    return Place(
        directory=settings.directory,
        launch_id=companion_settings.launch_id or settings.rank.run_id,
        run_id=settings.rank.run_id,
    )


def _shown(path: Path) -> Path:
    """Return a path within the working directory relative to it."""
    with suppress(OSError, ValueError):
        return path.relative_to(Path.cwd())
    return path


def forecasts_path(directory: Path) -> Path:
    """Return the forecast log of a directory: below ``runs`` if its name is another file's."""
    top, below = directory / FORECASTS, directory / RUNS / FORECASTS
    return below if below.exists() or (os.path.lexists(top) and not is_ours(top)) else top


class UnwrittenError(Exception):
    """Some files could not be written; all others were."""

    def __init__(self, failures: Iterable[tuple[Path, Exception]]) -> None:
        self.failures = tuple(failures)
        super().__init__(", ".join(f"{path.name}: {err}" for path, err in self.failures))


def write_each(writes: Iterable[tuple[Path, Callable[[], object]]]) -> None:
    """Call each file's writer; raises ``UnwrittenError`` at the end if any failed."""
    failures: list[tuple[Path, Exception]] = []
    for path, write in writes:
        try:
            write()
        except Exception as err:
            failures.append((path, err))
    if failures:
        raise UnwrittenError(failures)
