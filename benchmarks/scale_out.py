"""Scaling efficiency: predicted from a published series' smallest number of GPUs, and measured.

    python benchmarks/scale_out.py DATA_DIR [--table NAME ...] [--factor 4] [--json OUT]

Uses every series of a table over two or more numbers of GPUs, at least ``--factor`` apart: the
steps on the smallest number calibrate, and efficiency on all larger ones is predicted by the
functions that ``forerun plan`` calls, for the fastest layout that was measured on each.  The
baseline is the trivial rule that efficiency stays 1.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.protocols.steps import series
from forerun.benchmarks.published.readers import steps_of
from forerun.calib.advice import compare, compute_scaling
from forerun.calib.errors import ForerunError
from forerun.calib.records import StepRow
from forerun.calib.steps import KnownStep, table_steps

FACTOR = 4.0
"""Two doublings: over less, noise cannot be told from poor scaling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOutRow:
    """One larger number of GPUs of a series."""

    table: str
    series: str
    from_num_ranks: int
    num_ranks: int
    measured_frac: float
    """Tokens/s per GPU over those on the smallest number."""
    predicted_frac: float
    low_frac: float
    high_frac: float

    @property
    def error_frac(self) -> float:
        """Error of the predicted efficiency."""
        return self.predicted_frac / self.measured_frac - 1.0

    @property
    def is_covered(self) -> bool:
        """True if the measured efficiency is within the 90 % interval."""
        return self.low_frac <= self.measured_frac <= self.high_frac


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, metavar="DATA_DIR", help="public tables, CSV")
    parser.add_argument("--table", metavar="NAME", action="append", help="only these (all)")
    parser.add_argument("--factor", type=float, default=FACTOR, help="least growth of GPUs (4)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="all figures")
    arguments = parser.parse_args()
    names = arguments.table or [p.name.split(".")[0] for p in arguments.data.glob("e2e_*.csv*")]
    rows = [row for name in sorted(names) for row in _of_table(arguments, name)]
    print(_markdown(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _of_table(arguments: argparse.Namespace, name: str) -> Iterator[ScaleOutRow]:
    try:
        rows = steps_of(arguments.data, name).rows
    except ForerunError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return
    for label, positions in series(rows, 2).items():
        members = [rows[position] for position in positions]
        counts = [row.num_ranks for row in members]
        if max(counts) >= arguments.factor * min(counts):
            yield from series_rows(name, label, members)


def series_rows(table: str, label: str, rows: Sequence[StepRow]) -> Iterator[ScaleOutRow]:
    """Yield each larger number of GPUs of a series against its prediction from the smallest."""
    least = min(row.num_ranks for row in rows)
    known = [KnownStep.of(row) for row in rows if row.num_ranks == least]
    fastest: dict[int, StepRow] = {}
    for row in sorted(rows, key=_gpu_time_s, reverse=True):
        fastest[row.num_ranks] = row
    ordered = [fastest[count] for count in sorted(fastest)]
    steps = table_steps(ordered[0], known)
    chosen = compare(ordered[0].config, [row.config for row in ordered], steps)
    for row, point in zip(ordered[1:], compute_scaling(chosen, steps).points[1:], strict=True):
        yield ScaleOutRow(
            table=table,
            series=label,
            from_num_ranks=least,
            num_ranks=row.num_ranks,
            measured_frac=_gpu_time_s(ordered[0]) / _gpu_time_s(row),
            predicted_frac=point.efficiency_frac,
            low_frac=point.efficiency_low_frac,
            high_frac=point.efficiency_high_frac,
        )


def _gpu_time_s(row: StepRow) -> float:
    return row.measured_s * row.num_ranks / row.config.batch.global_batch_size


def _markdown(rows: Sequence[ScaleOutRow]) -> str:
    """Return a line for each table, and one for all."""
    tables = list(dict.fromkeys(row.table for row in rows))
    lines = [_line(name, [row for row in rows if row.table == name]) for name in tables]
    if len(tables) > 1:
        lines.append(_line("all", rows))
    head = ["table", "series", "larger sizes", "GPUs", "measured", "error, median", "p95"]
    return markdown_table([*head, "within 90 %", "error of the rule"], lines)


def _line(name: str, rows: Sequence[ScaleOutRow]) -> list[object]:
    errors = sorted(abs(one.error_frac) for one in rows)
    rule = median(abs(1.0 / one.measured_frac - 1.0) for one in rows)
    seen = [one.measured_frac for one in rows]
    return [
        name,
        len({one.series for one in rows}),
        len(rows),
        f"{min(one.from_num_ranks for one in rows)} to {max(one.num_ranks for one in rows)}",
        f"{min(seen):.2f} to {max(seen):.2f}",
        f"{100 * median(errors):.1f} %",
        f"{100 * errors[math.ceil(0.95 * len(errors)) - 1]:.1f} %",
        f"{sum(one.is_covered for one in rows)} of {len(rows)}",
        f"{100 * rule:.1f} %",
    ]


if __name__ == "__main__":
    main()
