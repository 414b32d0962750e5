"""Efficiency over numbers of GPUs, predicted from the smallest of a published series and measured.

    python benchmarks/scale_out.py DATA_DIR [--table NAME ...] [--factor 4] [--json OUT]

Every series of a table over two or more numbers of GPUs, ``--factor`` apart at least: the steps on
the smallest number calibrate, efficiency of all larger ones is predicted by the functions that
``forerun plan`` calls, for the fastest layout that was measured on each.  Beside it the trivial
rule that efficiency stays 1.
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
"""Two doublings: less tells noise apart from scaling badly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One larger number of GPUs of a series."""

    table: str
    series: str
    from_num_ranks: int
    num_ranks: int
    measured_frac: float
    """Tokens/s of a GPU over those on the smallest number."""
    predicted_frac: float
    low_frac: float
    high_frac: float

    @property
    def error_frac(self) -> float:
        """Of the predicted efficiency."""
        return self.predicted_frac / self.measured_frac - 1.0

    @property
    def is_held(self) -> bool:
        """The measured one lies within the 90 % interval."""
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
    found = [held for name in sorted(names) for held in _of_table(arguments, name)]
    print(_markdown(found))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(held) for held in found], indent=1) + "\n")


def _of_table(arguments: argparse.Namespace, name: str) -> Iterator[Held]:
    try:
        rows = steps_of(arguments.data, name).rows
    except ForerunError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return
    for label, positions in series(rows, 2).items():
        members = [rows[position] for position in positions]
        counts = [row.num_ranks for row in members]
        if max(counts) >= arguments.factor * min(counts):
            yield from held_series(name, label, members)


def held_series(table: str, label: str, rows: Sequence[StepRow]) -> Iterator[Held]:
    """Each larger number of GPUs of one series against what the smallest tells of it."""
    least = min(row.num_ranks for row in rows)
    known = [KnownStep.of(row) for row in rows if row.num_ranks == least]
    fastest: dict[int, StepRow] = {}
    for row in sorted(rows, key=_gpu_time_s, reverse=True):
        fastest[row.num_ranks] = row
    ordered = [fastest[count] for count in sorted(fastest)]
    steps = table_steps(ordered[0], known)
    chosen = compare(ordered[0].config, [row.config for row in ordered], steps)
    for row, point in zip(ordered[1:], compute_scaling(chosen, steps).points[1:], strict=True):
        yield Held(
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


def _markdown(found: Sequence[Held]) -> str:
    """A line for each table, and one for all."""
    tables = list(dict.fromkeys(held.table for held in found))
    lines = [_line(name, [held for held in found if held.table == name]) for name in tables]
    if len(tables) > 1:
        lines.append(_line("all", found))
    head = ["table", "series", "larger sizes", "GPUs", "measured", "error, median", "p95"]
    return markdown_table([*head, "within 90 %", "error of the rule"], lines)


def _line(name: str, held: Sequence[Held]) -> list[object]:
    errors = sorted(abs(one.error_frac) for one in held)
    rule = median(abs(1.0 / one.measured_frac - 1.0) for one in held)
    seen = [one.measured_frac for one in held]
    return [
        name,
        len({one.series for one in held}),
        len(held),
        f"{min(one.from_num_ranks for one in held)} to {max(one.num_ranks for one in held)}",
        f"{min(seen):.2f} to {max(seen):.2f}",
        f"{100 * median(errors):.1f} %",
        f"{100 * errors[math.ceil(0.95 * len(errors)) - 1]:.1f} %",
        f"{sum(one.is_held for one in held)} of {len(held)}",
        f"{100 * rule:.1f} %",
    ]


if __name__ == "__main__":
    main()
