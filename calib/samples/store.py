"""File I/O of the core, apart from ``records``: records in, tables in and out.

A sample table is one Parquet file with a ``table`` column that names the frame a row belongs to: a
single file is replaced atomically, so that a reader never gets frames of two different writes. A
run that is still being written is read incrementally, from the end of the last reading.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TextIO, TypeVar

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..errors import RecordError
from ..marks.run_records import RankFile, RunRecords, SummaryFile, join_ranks, no_trace
from ..marks.traced_step import MAX_TRACE_NBYTES, TRACE
from ..plain_json import parse_json
from ..records.chrome_trace import events_in
from ..records.cluster import LINKS, Cluster, SeenNode
from ..records.files import Tail, replace_by
from ..records.packed import MAX_LINE_NBYTES
from ..records.record_kinds import parse_header
from .columns import FRAMES, TABLE_SCHEMA, TEXTS, normalise
from .table import SampleTable

_F = TypeVar("_F", RankFile, SummaryFile)
# Larger tables are refused before they exhaust memory.
MAX_TABLE_ROWS = 5_000_000
MAX_TABLE_NBYTES = 2 << 30
"""Upper bound on the size of all columns, uncompressed."""
_SCHEMA_KEY = b"forerun_schema"
_CREATED_KEY = b"forerun_created_by"
SUMMARIES = "summaries.jsonl"
"""File with the summaries of ranks without a file of their own, in a run's folder."""
_PART_LENGTH = 1 << 20
"""Characters of a trace that are parsed at a time."""
_TEXTS = sorted(TEXTS | {"table"})
"""Columns read with a dictionary, so that a long repeated text is in memory once."""


def run_ids(directory: Path) -> tuple[str, ...]:
    """Return the runs recorded under ``directory``, oldest first; empty if there are none."""
    home = directory / "records"
    folders = [path for path in home.iterdir() if path.is_dir()] if home.is_dir() else []
    starts = [(_started_unix_s(folder), folder.name) for folder in folders]
    return tuple(name for _, name in sorted(start for start in starts if start[0] is not None))


def read_run(directory: Path, run_id: str | None = None) -> RunRecords:
    """Return the records of a run, by default the one that started last.

    Damaged lines and foreign files are listed in ``problems`` and skipped. Raises ``RecordError``
    if nothing can be read.
    """
    home = directory / "records"
    if run_id is None:
        known_ids = run_ids(directory)
        if not known_ids:
            raise RecordError(
                f"no records under {home}; start the training run with --calibrate, "
                f"or name its directory with --calibrate-dir"
            )
        run_id = known_ids[-1]
    paths = rank_paths(home / run_id)
    if not paths:
        raise missing_run_error(directory, run_id)
    files = [_read_into(path, rank_file(path)) for path in paths]
    sent = home / run_id / SUMMARIES
    summaries = _read_into(sent, SummaryFile(SUMMARIES)) if sent.exists() else None
    return check_readable(join_ranks(run_id, files, summaries, _links(home / run_id)))


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
    """Raise ``ValueError`` if a Parquet file would take more memory than any table of ours.

    Also prevent old versions of PyArrow from unpickling its types.
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
    """Return the table that ``write_table`` wrote; raise ``RecordError`` if it is missing or
    newer."""
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
    """Return the start of the earliest readable rank; None if no file of the folder can be read."""
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


def missing_run_error(directory: Path, run_id: str) -> RecordError:
    """Return the error that a run has no records, which lists the runs that there are."""
    return RecordError(
        f"no records of run {run_id!r} under {directory / 'records'}; "
        f"runs there: {', '.join(run_ids(directory)) or 'none'}"
    )


def check_readable(run: RunRecords) -> RunRecords:
    """Return the run; raise ``RecordError`` if no rank of it can be read."""
    if not run.headers:
        raise RecordError(f"run {run.run_id!r} cannot be read: {'; '.join(run.problems)}")
    return run


def bounded_lines(file: TextIO) -> Iterator[str]:
    """Yield the lines of a file; one that is too long comes in parts, each of them damaged."""
    return iter(lambda: file.readline(MAX_LINE_NBYTES), "")


def rank_paths(folder: Path) -> list[Path]:
    """Return the path of each rank's own file if it is local, else of the received copy."""
    local_paths = {path.name.removeprefix("rank-"): path for path in folder.glob("rank-*.jsonl")}
    sent = {path.name.removeprefix("received-"): path for path in folder.glob("received-*.jsonl")}
    return [path for _, path in sorted((sent | local_paths).items())]


def _links(folder: Path) -> SeenNode:
    """Return the links that the companion read; empty if it wrote none, or not such a file."""
    with suppress(OSError, ValueError), (folder / LINKS).open(encoding="utf-8") as file:
        cluster = Cluster.from_json(parse_json(file.read(MAX_LINE_NBYTES)))
        return next(iter(cluster.seen), SeenNode())
    return SeenNode()


def rank_file(path: Path) -> RankFile:
    """Return a rank's file before it is read; reports name it with its run."""
    return RankFile(f"{path.parent.name}/{path.name}", read_trace=partial(_read_trace, path.parent))


def _read_trace(folder: Path, name: str) -> Iterator[object]:
    """Yield the events of a traced step's file."""
    if not TRACE.fullmatch(name):
        raise RecordError(f"{name!r} is not the name of a trace; skipped")
    try:
        with gzip.open(folder / name, "rt", encoding="utf-8", errors="replace") as file:
            parts = iter(partial(file.read, _PART_LENGTH), "")
            yield from events_in(islice(parts, MAX_TRACE_NBYTES // _PART_LENGTH))
    except FileNotFoundError:
        raise no_trace(name) from None
    except (OSError, EOFError, zlib.error, RecordError) as err:
        raise RecordError(f"{name} cannot be read ({err}); skipped") from err


def _read_into(path: Path, file: _F) -> _F:
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            file.take(bounded_lines(lines))
    except OSError as err:
        return file.unread(err)
    return file


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRecords:
    """Newly read records and summaries; headers, configs and problems of the whole run."""

    run: RunRecords
    is_whole: bool
    """True if these are all records: on the first reading, and if a file was replaced or has
    shrunk."""


class RunReader:
    """Reads a run incrementally while it is being written."""

    def __init__(self, directory: Path, run_id: str) -> None:
        self._directory, self._run_id = directory, run_id
        self._forget()

    def read(self) -> NewRecords:
        """Return the records since the last reading; all readings together equal ``read_run``.

        An incomplete last line is deferred. Raises ``RecordError`` if nothing can be read.
        """
        folder = self._directory / "records" / self._run_id
        paths = rank_paths(folder)
        if not paths:
            raise missing_run_error(self._directory, self._run_id)
        is_whole = not self._tails or any(tail.is_other() for tail in self._tails.values())
        if is_whole or not self._ranks.keys() <= set(paths):
            self._forget()
            is_whole = True
        files = [self._read_rank(path) for path in paths]
        summaries = self._read_summaries(folder / SUMMARIES)
        run = join_ranks(self._run_id, files, summaries, _links(folder))
        return NewRecords(run=check_readable(run), is_whole=is_whole)

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
        # If it is never completed it is damage: report it, but keep no trace in case the rest
        # arrives.
        trial = replace(file, problems=[*file.problems])
        trial.take([torn.decode(errors="replace")])
        return replace(file, header=trial.header, problems=trial.problems)

    def _read_summaries(self, path: Path) -> SummaryFile | None:
        summary_file = self._summaries or SummaryFile(path.name)
        try:
            whole, _ = self._new_bytes(path)
        except FileNotFoundError:
            return self._summaries
        except OSError as err:
            return summary_file.unread(err)
        summary_file.take(_lines(whole))
        self._summaries = summary_file
        return summary_file


def _lines(data: bytes) -> list[str]:
    """Return the lines as an open text file yields them."""
    text = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors="replace")
    return list(bounded_lines(text))
