"""Transfers extrapolated to unmeasured groups: other nodes, ranks per node, collectives.

    python benchmarks/carried.py DATA_DIR [NAME...]    all lines, or those whose names begin so

Each line is a protocol of ``protocols/collectives.py`` on rows of one published table; all groups
of ranks have equal weight, and no seed is used.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.protocols.collectives import scored_rows
from forerun.benchmarks.published.readers import read_published
from forerun.calib.units import MIB
from forerun.launch.known.table_files import read_frame

_LARGE_MIB = (16, 64)
_COLUMNS = (
    *("rows", "protocol", "n", "error"),
    *(f"from {size} MiB" for size in _LARGE_MIB),
    *("bias", "covers", "half-width"),
)
_NCCL_TESTS, _VIDUR, _ACESO = "coll_nccltests_public", "coll_vidur", "coll_aceso"
_IN_NODE, _VTRAIN = "coll_aic_nccl_intranode", "coll_vtrain_allreduce_intranode"
_POLARIS = r"Polaris README setup \([45]\)"
_CURVE = ["device", "fabric", "collective", "num_ranks", "num_nodes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Rows of a table, by fabric and numbers of nodes, and the rows held out."""

    name: str
    table: str
    protocol: str
    fabric: str = ""
    nodes: tuple[int, ...] = ()
    scored: str = ""
    """Suffix of the names of scored groups; empty scores all."""
    every: int = 1
    """Use every n-th payload of long curves."""
    takes_fallback: bool = False
    """Include rows flagged as a fallback to sockets; on this fabric all are."""
    prior: str = ""
    """Device whose prior is used instead of the table's own, as for a device that is not known."""

    def rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the rows of the canonical table that belong to this line."""
        frame = frame[frame["fabric"].str.contains(self.fabric, regex=True)]
        if self.nodes:
            frame = frame[frame["num_nodes"].isin(self.nodes)]
        if self.takes_fallback:
            is_fallback = frame["flag"].str.contains("fallback")
            frame = frame.assign(flag=frame["flag"].where(~is_fallback, ""))
        if self.prior:
            frame = frame.assign(device=self.prior)
        return frame[frame.groupby(_CURVE).cumcount() % self.every == 0]


def _line(name: str, table: str, protocol: str, **more: Any) -> Line:
    return Line(name=name, table=table, protocol=protocol, **more)


LINES = (
    _line("Polaris, 2 to 8 nodes", _NCCL_TESTS, "leave_nodes", fabric=_POLARIS, nodes=(1, 2, 8)),
    _line("Polaris, 2 and 8 to 128", _NCCL_TESTS, "leave_nodes", fabric=_POLARIS, scored="128"),
    _line("Polaris, 2 to 128", _NCCL_TESTS, "leave_span", fabric=_POLARIS, nodes=(2, 128)),
    _line("H100, 2 to 10 nodes", _NCCL_TESTS, "leave_nodes", fabric="xxrjun"),
    _line("H100, ranks a node", _NCCL_TESTS, "leave_ranks_per_node", fabric="xxrjun"),
    _line(
        "H100, one number of ranks a node known", _NCCL_TESTS, "one_ranks_per_node", fabric="xxrjun"
    ),
    _line(
        "Vidur a100_dgx, ranks a node", _VIDUR, "leave_ranks_per_node", fabric="a100_dgx", every=5
    ),
    _line("DeepEP, nodes", "coll_aic_deepep_alltoall", "leave_nodes", fabric=r"0\.5\.0"),
    _line("DeepEP, 2 to 8 nodes", "coll_aic_deepep_alltoall", "leave_span", fabric=r"0\.5\.0"),
    _line(
        "Perlmutter by sockets, nodes",
        "coll_ett",
        "leave_nodes",
        fabric="Perl",
        every=10,
        takes_fallback=True,
    ),
    _line("Perlmutter, 2 to 4 in a node", "coll_ett", "leave_span", fabric="Perl", every=10),
    _line("H100, collective", _NCCL_TESTS, "leave_collective", fabric="xxrjun"),
    _line(
        "Polaris, Sirius, Sophia, H100, collective",
        _NCCL_TESTS,
        "leave_collective",
        fabric="Polaris|Sirius|Sophia|xxrjun",
    ),
    _line("Polaris, collective", _NCCL_TESTS, "leave_collective", fabric=_POLARIS),
    _line("one node, ten systems, collective", _IN_NODE, "leave_collective"),
    _line("Vidur, collective", _VIDUR, "leave_collective", every=5),
    _line("Aceso, collective", _ACESO, "leave_collective"),
    _line("Perlmutter, collective", "coll_ett", "leave_collective", fabric="Perl", every=10),
    _line("one node, ten systems, two ranks to all", _IN_NODE, "pair_to_node"),
    _line("one node, ten systems, fewer ranks to all", _IN_NODE, "leave_span"),
    _line(
        "one node, ten systems as if of PCIe, fewer ranks to all",
        _IN_NODE,
        "leave_span",
        prior="l40",
    ),
    _line(
        "one node, ten systems as unknown, fewer ranks to all",
        _IN_NODE,
        "leave_span",
        prior="unknown",
    ),
    _line("vTrain, two ranks to all", _VTRAIN, "pair_to_node", every=5),
    _line("Aceso, two ranks to all", _ACESO, "pair_to_node"),
)


def scores(predictions: pd.DataFrame) -> Sequence[str]:
    """Return number of rows, then error, bias, coverage, half-width in percent, by group means."""
    measured = predictions["measured_s"]
    figures = pd.DataFrame(
        {
            "group": predictions["group"],
            "bias": predictions["predicted_s"] / measured - 1.0,
            "covers": measured.between(predictions["low_s"], predictions["high_s"]).astype(float),
            "half_width": np.log(predictions["high_s"].to_numpy() / predictions["low_s"].to_numpy())
            / 2.0,
        }
    )
    figures["error"] = figures["bias"].abs()
    for size in _LARGE_MIB:
        figures[size] = figures["error"].where(predictions["nbytes"] >= size * MIB)
    means = 100 * figures.groupby("group").mean().mean()
    names = ("error", *_LARGE_MIB, "bias", "covers", "half_width")
    return (str(len(predictions)), *(f"{means[name]:.1f}" for name in names))


def scored_line(line: Line, folder: Path) -> pd.DataFrame:
    """Return the scored rows of a line; none if its table does not support its protocol."""
    predictions = scored_rows(line.rows(_read(folder, line.table)), line.protocol, seeds=[0])
    if len(predictions):
        predictions = predictions[predictions["group"].str.endswith(line.scored)]
    return predictions


@cache
def _read(folder: Path, table: str) -> pd.DataFrame:
    path = folder / f"{table}.csv.gz"
    return read_published(read_frame(path), path.name)


def table(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield one row of text for each requested line that its table supports."""
    for line in LINES:
        if not names or any(line.name.startswith(name) for name in names):
            predictions = scored_line(line, folder)
            if len(predictions):
                yield line.name, line.protocol, *scores(predictions)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Score transfers that are carried.")
    parser.add_argument("folder", type=Path, metavar="DATA_DIR")
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()
    print(markdown_table(_COLUMNS, table(args.folder, args.names)))


if __name__ == "__main__":
    main()
