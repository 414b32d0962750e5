"""The first line of a rank's file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ...calib.errors import RecordError
from ...calib.records.files import open_own
from ...calib.records.record_kinds import SCHEMA, Header
from ...calib.records.run_records import parse_header
from ..process.interpreter import own_version

if TYPE_CHECKING:
    from ...calib.plain_json import JsonObject
    from ..process.host import Host
    from ..process.settings import RankInfo

# A header has 2 to 5 kB; a longer first line is no file of ours.
_MAX_HEADER_NBYTES = 65_536


def header_of(
    rank: RankInfo,
    host: Host | None,
    *,
    device: str,
    started_unix_s: float,
    cluster: JsonObject | None = None,
) -> Header:
    """Whose records follow, as far as it is known."""
    return Header(
        schema=SCHEMA,
        run_id=rank.run_id,
        rank=rank.rank,
        world_size=rank.world_size,
        created_by=f"{__name__.partition('.')[0]} {own_version()}".strip(),
        device=device,
        started_unix_s=started_unix_s,
        stage=host.stage if host else 0,
        tp_rank=host.tp_rank if host else 0,
        dp_rank=host.dp_rank if host else 0,
        cluster=cluster or {},
    )


def open_records(path: Path) -> IO[bytes]:
    """The file of a rank, ready for a header; a restarted worker goes on after what it finds.

    A file whose first line cannot be read is moved aside: it would make ours unreadable.  Raises
    ``OSError`` as ``open_own``.
    """
    file = open_own(path)
    file.seek(0)
    first = file.readline(_MAX_HEADER_NBYTES)
    if not first:
        return file
    try:
        parse_header(first.decode())
    except (RecordError, ValueError):
        file.close()
        path.replace(path.with_name(path.name + ".damaged"))
        return open_own(path)
    file.seek(-1, os.SEEK_END)
    if file.read(1) != b"\n":
        file.write(b"\n")
    return file
