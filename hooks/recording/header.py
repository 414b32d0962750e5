"""The first line of a rank's file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ...calib.errors import RecordError
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


def line_end_after(path: Path) -> str:
    """What comes between the file that an earlier process left at ``path`` and our own header.

    A file whose first line cannot be read is moved aside: it would make ours unreadable.
    """
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        first = file.readline(_MAX_HEADER_NBYTES)
        file.seek(max(0, os.fstat(file.fileno()).st_size - 1))
        end = file.read()
    if not first:
        return ""
    try:
        parse_header(first.decode())
    except (RecordError, ValueError):
        path.replace(path.with_name(path.name + ".damaged"))
        return ""
    return "" if end == b"\n" else "\n"
