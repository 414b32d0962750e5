"""One table of transfers out of the files of several ranks; the shortest time of each counts."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from .canonical_tables import COLLECTIVE_COLUMNS

WAITING = "time of some of its ranks only, which may include waiting for the others"
_OPERATION = ("communicator", "collective", "number", "num_ranks", "num_nodes", "nbytes")
"""Columns that the ranks of one operation share."""


def joined_ranks(logs: Sequence[pd.DataFrame], files: str) -> tuple[pd.DataFrame, list[str]]:
    """Return a collective table in our own format, and notes on its times.

    ``logs`` are the ranks' operations, with device and fabric; of each operation the shortest time
    without a flag counts, and it has a flag unless all of its ranks are there. ``files`` is what
    the notes call the logs.
    """
    rows = pd.concat(logs, ignore_index=True)
    keys = list(_OPERATION)
    # Replays of a captured graph repeat a number.
    rows["repeat"] = rows.groupby([*keys, "rank"]).cumcount()
    rows["order"] = rows.groupby([*keys, "repeat"], sort=False).ngroup()
    rows["is_flagged"] = rows["flag"] != ""
    rows["known_rank"] = rows["rank"].where(rows["rank"] >= 0)
    is_partial = rows.groupby("order")["known_rank"].transform("nunique") < rows["num_ranks"]
    rows["flag"] = rows["flag"].where(~is_partial, (rows["flag"] + f"; {WAITING}").str.lstrip("; "))
    best = rows.sort_values(["order", "is_flagged", "time_s"]).drop_duplicates("order")
    return best[list(COLLECTIVE_COLUMNS)].reset_index(drop=True), _waits(rows, files)


def _waits(rows: pd.DataFrame, files: str) -> list[str]:
    """Return a note if the logs of some ranks of a communicator are not at hand."""
    by_communicator = rows.groupby("communicator")
    is_partial = by_communicator["known_rank"].nunique() < by_communicator["world"].max()
    if not is_partial.any():
        return []
    return [
        f"{is_partial.sum()} of {len(is_partial)} communicators lack the {files} of some ranks, so "
        f"that their times may include waiting and have a flag; give the {files} of all ranks"
    ]
