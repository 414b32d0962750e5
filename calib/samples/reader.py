"""Reads a run while it is written; what is known already is not read again."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from pathlib import Path

from ..records.files import Tail
from ..records.run_records import RankFile, RunRecords, SummaryFile, join_ranks
from .store import SUMMARIES, bounded_lines, no_run, rank_file, rank_paths, readable


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRecords:
    """Headers, configs and problems of the whole run; records and summaries that are new."""

    run: RunRecords
    is_whole: bool
    """All there are: at first, and where a file was replaced or has shrunk."""


class RunReader:
    """Reads a run that is being written: each file from where the last reading ended."""

    def __init__(self, directory: Path, run_id: str) -> None:
        self._directory, self._run_id = directory, run_id
        self._forget()

    def read(self) -> NewRecords:
        """What has come since the last reading; all of these together are what ``read_run`` gives.

        A last line without its end waits for it.  ``RecordError`` where nothing can be read.
        """
        folder = self._directory / "records" / self._run_id
        paths = rank_paths(folder)
        if not paths:
            raise no_run(self._directory, self._run_id)
        is_whole = not self._tails or any(tail.is_other() for tail in self._tails.values())
        if is_whole or not self._ranks.keys() <= set(paths):
            self._forget()
            is_whole = True
        files = [self._read_rank(path) for path in paths]
        run = join_ranks(self._run_id, files, self._read_summaries(folder / SUMMARIES))
        return NewRecords(run=readable(run), is_whole=is_whole)

    def _forget(self) -> None:
        self._tails: dict[Path, Tail] = {}
        self._ranks: dict[Path, RankFile] = {}
        self._summaries: SummaryFile | None = None

    def _new_bytes(self, path: Path) -> tuple[bytes, bytes]:
        return self._tails.setdefault(path, Tail(path)).read()

    def _read_rank(self, path: Path) -> RankFile:
        file = self._ranks.setdefault(path, rank_file(path))
        try:
            whole, torn = self._new_bytes(path)
        except OSError as err:
            return file.unread(err)
        file.take(_lines(whole))
        if not torn:
            return file
        # For good it is damage: said, and forgotten when the rest of it comes.
        trial = replace(file, problems=[*file.problems])
        trial.take([torn.decode(errors="replace")])
        return replace(file, header=trial.header, problems=trial.problems)

    def _read_summaries(self, path: Path) -> SummaryFile | None:
        found = self._summaries or SummaryFile(path.name)
        try:
            whole, _ = self._new_bytes(path)
        except FileNotFoundError:
            return self._summaries
        except OSError as err:
            return found.unread(err)
        found.take(_lines(whole))
        self._summaries = found
        return found


def _lines(data: bytes) -> list[str]:
    """As an open text file gives them."""
    text = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors="replace")
    return list(bounded_lines(text))
