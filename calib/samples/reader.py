"""Reads a run while it is written; what is known already is not read again."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass, replace
from pathlib import Path

from ..records.files import Tail
from ..records.run_records import (
    RankFile,
    RankParser,
    RunRecords,
    SummaryFile,
    SummaryParser,
    join_ranks,
)
from .store import (
    SUMMARIES,
    bounded_lines,
    no_run,
    rank_paths,
    readable,
    unreadable,
    unreadable_summaries,
)


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
        self._ranks: dict[Path, tuple[Tail, RankParser]] = {}
        self._summaries: tuple[Tail, SummaryParser] | None = None

    def read(self) -> NewRecords:
        """What has come since the last reading; all of these together are what ``read_run`` gives.

        A last line without its end waits for it.  ``RecordError`` where nothing can be read.
        """
        folder = self._directory / "records" / self._run_id
        paths = rank_paths(folder)
        if not paths:
            raise no_run(self._directory, self._run_id)
        tails = [tail for tail, _ in (*self._ranks.values(), *self._known_summaries())]
        is_whole = not tails or any(tail.is_other() for tail in tails)
        if is_whole or not self._ranks.keys() <= set(paths):
            self._ranks, self._summaries, is_whole = {}, None, True
        files = [self._read_rank(path) for path in paths]
        run = join_ranks(self._run_id, files, self._read_summaries(folder / SUMMARIES))
        return NewRecords(run=readable(run), is_whole=is_whole)

    def _known_summaries(self) -> list[tuple[Tail, SummaryParser]]:
        return [] if self._summaries is None else [self._summaries]

    def _read_rank(self, path: Path) -> RankFile:
        name = f"{path.parent.name}/{path.name}"
        tail, parser = self._ranks.setdefault(path, (Tail(path), RankParser(name)))
        try:
            whole, torn = tail.read()
        except OSError as err:
            return unreadable(name, err)
        found = parser.file(parser.take(_lines(whole)))
        if torn:
            # For good it is damage: said, and forgotten when the rest of it comes.
            trial = copy.deepcopy(parser)
            trial.take([torn.decode(errors="replace")])
            found = replace(found, problems=tuple(trial.problems))
        return found

    def _read_summaries(self, path: Path) -> SummaryFile | None:
        if self._summaries is None:
            if not path.exists():
                return None
            self._summaries = Tail(path), SummaryParser(path.name)
        tail, parser = self._summaries
        try:
            return parser.take(_lines(tail.read()[0]))
        except OSError as err:
            return unreadable_summaries(path, err)


def _lines(data: bytes) -> list[str]:
    """As an open text file gives them."""
    text = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors="replace")
    return list(bounded_lines(text))
