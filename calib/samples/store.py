"""File I/O of the core beside ``records``: records in, tables in and out.

A sample table is one Parquet file with a ``table`` column that names the frame a row belongs to:
one file is replaced at once, so that a reader never meets frames of two different writes.  A run
that is still being written is read on from where the last reading ended: what is known already is
not read again.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO, TypeVar

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..errors import RecordError
from ..records import (
    MAX_LINE_NBYTES,
    RankFile,
    RunRecords,
    SummaryFile,
    Tail,
    join_ranks,
    parse_header,
    replace_by,
)
from .columns import FRAMES, TABLE_SCHEMA, TEXTS, normalise
from .table import SampleTable

_F = TypeVar("_F", RankFile, SummaryFile)
# Larger tables are refused before they fill the memory.
MAX_TABLE_ROWS = 5_000_000
MAX_TABLE_NBYTES = 2 << 30
"""Of all columns, unpacked."""
_SCHEMA_KEY = b"forerun_schema"
_CREATED_KEY = b"forerun_created_by"
SUMMARIES = "summaries.jsonl"
"""The summaries of ranks without a file, in a run's folder."""
_TEXTS = sorted(TEXTS | {"table"})
"""Read as one text and its places, so that a long one that is repeated is held once."""


def run_ids(directory: Path) -> tuple[str, ...]:
    """The runs recorded under ``directory``, oldest first; empty where there is none."""
    home = directory / "records"
    folders = [path for path in home.iterdir() if path.is_dir()] if home.is_dir() else []
    starts = [(_started_unix_s(folder), folder.name) for folder in folders]
    return tuple(name for _, name in sorted(found for found in starts if found[0] is not None))


def read_run(directory: Path, run_id: str | None = None) -> RunRecords:
    """The records of a run, by default the one that started last.

    Damaged lines and foreign files are named in ``problems`` and skipped.  ``RecordError`` where
    nothing can be read.
    """
    home = directory / "records"
    if run_id is None:
        found = run_ids(directory)
        if not found:
            raise RecordError(
                f"no records under {home}; start the training run with --calibrate, "
                f"or name its directory with --calibrate-dir"
            )
        run_id = found[-1]
    paths = rank_paths(home / run_id)
    if not paths:
        raise no_run(directory, run_id)
    files = [_read_into(path, rank_file(path)) for path in paths]
    sent = home / run_id / SUMMARIES
    summaries = _read_into(sent, SummaryFile(SUMMARIES)) if sent.exists() else None
    return readable(join_ranks(run_id, files, summaries))


def write_table(path: Path, table: SampleTable, *, created_by: str = "forerun") -> None:
    """Replace ``path`` with the table as one Parquet file."""
    parts = []
    for name in FRAMES:
        part = pa.Table.from_pandas(getattr(table, name), preserve_index=False)
        part = part.replace_schema_metadata(None)
        parts.append(part.add_column(0, "table", pa.array([name] * len(part), pa.string())))
    whole = pa.concat_tables(parts, promote_options="permissive")
    whole = whole.replace_schema_metadata(
        {_SCHEMA_KEY: str(TABLE_SCHEMA).encode(), _CREATED_KEY: created_by.encode()}
    )
    replace_by(path, lambda file: pq.write_table(whole, file, compression="zstd"))


def check_parquet(path: Path) -> None:
    """``ValueError`` where a Parquet file would take more memory than a table of ours has.

    Its types are not unpickled either, which old versions of PyArrow do.
    """
    with suppress(KeyError, pa.ArrowException):
        pa.unregister_extension_type("arrow.py_extension_type")
    whole = pq.read_metadata(path)
    groups = [whole.row_group(index) for index in range(min(whole.num_row_groups, 100_000))]
    if whole.num_rows > MAX_TABLE_ROWS:
        raise ValueError(f"{whole.num_rows} rows are more than {MAX_TABLE_ROWS}")
    if sum(group.total_byte_size for group in groups) > MAX_TABLE_NBYTES:
        raise ValueError(f"its columns hold more than {MAX_TABLE_NBYTES >> 20} MiB")


def read_table(path: Path) -> SampleTable:
    """The table that ``write_table`` wrote; ``RecordError`` where it is missing or newer."""
    try:
        check_parquet(path)
        whole = pq.read_table(path, read_dictionary=_TEXTS)
        schema = int((whole.schema.metadata or {}).get(_SCHEMA_KEY, b"0"))
    except FileNotFoundError as err:
        raise RecordError(f"{path} does not exist; run with --calibrate first") from err
    except (OSError, ValueError, TypeError, pa.ArrowException) as err:
        raise RecordError(f"{path} is not a sample table ({err}); write it again") from err
    if schema == 0 or "table" not in whole.column_names:
        raise RecordError(f"{path} has no schema; it was not written as a sample table")
    if schema > TABLE_SCHEMA:
        raise RecordError(
            f"{path} has schema {schema}, newer than {TABLE_SCHEMA}, which this version reads; "
            f"upgrade forerun"
        )
    try:
        return SampleTable(**{name: _read_frame(whole, name) for name in FRAMES})
    except (ValueError, TypeError, ArithmeticError, pa.ArrowException) as err:
        first = " ".join(str(err).split())[:200]
        raise RecordError(f"{path} has columns of other types ({first}); write it again") from err


def _read_frame(whole: pa.Table, name: str) -> pd.DataFrame:
    columns = [c for c in FRAMES[name] if c in whole.column_names]
    rows = whole.filter(pc.field("table") == name).select(columns)
    for column in rows.schema:
        if pa.types.is_nested(column.type) or isinstance(column.type, pa.BaseExtensionType):
            raise TypeError(f"{column.name} is of type {column.type}")
    frame = rows.to_pandas(ignore_metadata=True)
    texts = [column for column in columns if column in TEXTS]
    frame[texts] = frame[texts].astype(object)
    return normalise(name, frame)


def _started_unix_s(folder: Path) -> float | None:
    """Start of the earliest readable rank, None where no file of the folder can be read."""
    starts = []
    for path in rank_paths(folder):
        with path.open(encoding="utf-8", errors="replace") as lines:
            try:
                header = parse_header(lines.readline(MAX_LINE_NBYTES))
            except RecordError:
                continue
        if header.run_id == folder.name:
            starts.append(float(header.started_unix_s))
    return min(starts, default=None)


def no_run(directory: Path, run_id: str) -> RecordError:
    """That there is nothing of a run, with the runs that there are."""
    return RecordError(
        f"no records of run {run_id!r} under {directory / 'records'}; "
        f"runs there: {', '.join(run_ids(directory)) or 'none'}"
    )


def readable(run: RunRecords) -> RunRecords:
    """The run; ``RecordError`` where no rank of it can be read."""
    if not run.headers:
        raise RecordError(f"run {run.run_id!r} cannot be read: {'; '.join(run.problems)}")
    return run


def bounded_lines(file: TextIO) -> Iterator[str]:
    """The lines of a file; one that is too long comes in parts, each of them damaged."""
    return iter(lambda: file.readline(MAX_LINE_NBYTES), "")


def rank_paths(folder: Path) -> list[Path]:
    """A rank's own file where it is here, else what was received of it."""
    own = {path.name.removeprefix("rank-"): path for path in folder.glob("rank-*.jsonl")}
    sent = {path.name.removeprefix("received-"): path for path in folder.glob("received-*.jsonl")}
    return [path for _, path in sorted((sent | own).items())]


def rank_file(path: Path) -> RankFile:
    """A rank's file before it is read; reports name it with its run."""
    return RankFile(f"{path.parent.name}/{path.name}")


def _read_into(path: Path, file: _F) -> _F:
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            file.take(bounded_lines(lines))
    except OSError as err:
        return file.unread(err)
    return file


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
