"""What ``forerun probe`` prints: operators, and bandwidths as nccl-tests counts them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from ...calib.fit.laws import work
from ...calib.network.groups import bus_factor
from ...calib.records.record_kinds import CollectiveRecord, OperatorRecord, Record
from ...calib.units import format_bytes, format_time
from ...calib.workload.collectives import Collective
from ...calib.workload.operators import Operator
from ..report.table import ReportTable, console, show_table
from .outcome import print_json

_GIGA, _TERA = 1e9, 1e12


def show_probes(
    records: Sequence[Record],
    *,
    device: str,
    copy_bytes_per_s: float,
    directory: Path,
    is_json: bool,
) -> None:
    """Print what one rank has measured."""
    operators, transfers = _operator_rows(records), _transfer_rows(records)
    if is_json:
        value = {"device": device, "copy_bytes_per_s": copy_bytes_per_s}
        value |= {"operators": operators, "collectives": transfers, "directory": str(directory)}
        print_json(value)
        return
    out = console()
    peak = max((row["flop_per_s"] for row in operators), default=0.0)
    counts = f"{len(operators)} operators · {len(transfers)} transfers"
    rates = f"products {peak / _TERA:.3g} TFLOP/s · copies {copy_bytes_per_s / _GIGA:.4g} GB/s"
    _say(out, f"[forerun] {device} · {rates} · {counts}")
    for table in (_operator_table(operators), _transfer_table(transfers)):
        if table.rows:
            show_table(table, out)
    _say(out, f"next: forerun plan {directory}, or forerun predict {directory} --config FILE")


def _say(out: Console, text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def _operator_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    times: defaultdict[Operator, list[int]] = defaultdict(list)
    for record in records:
        if isinstance(record, OperatorRecord):
            operator = Operator(
                kind=record.kind,
                phase=record.phase,
                shape=record.shape,
                element_nbytes=record.element_nbytes,
            )
            times[operator].append(record.duration_ns)
    rows = []
    for operator, spent in times.items():
        time_s = max(median(spent), 1) * 1e-9
        done = work(operator)
        rows.append(
            {
                "kind": operator.kind.value,
                "phase": operator.phase.value,
                "shape": list(operator.shape),
                "time_s": time_s,
                "flop_per_s": done.flop / time_s,
                "bytes_per_s": done.nbytes / time_s,
            }
        )
    return rows


def _transfer_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Each transfer once, whatever roles it stands for; bandwidths as nccl-tests counts them."""
    times: defaultdict[tuple[Collective, int, int], list[int]] = defaultdict(list)
    seen: set[tuple[str, int]] = set()
    for record in records:
        if isinstance(record, CollectiveRecord):
            event = (record.group.rpartition("/")[0], record.sequence)
            kind = record.collective
            kind = Collective.SEND if kind is Collective.RECV else kind
            if event not in seen:
                seen.add(event)
                size = 2 if kind is Collective.SEND else len(record.ranks)
                times[kind, size, record.nbytes].append(record.duration_ns)
    rows = []
    for (kind, size, nbytes), spent in times.items():
        time_s = max(median(spent), 1) * 1e-9
        bandwidth = nbytes / time_s
        rows.append(
            {
                "collective": kind.value,
                "num_ranks": size,
                "nbytes": nbytes,
                "time_s": time_s,
                "algorithm_bytes_per_s": bandwidth,
                "bus_bytes_per_s": bandwidth * bus_factor(kind, size),
            }
        )
    return rows


def _operator_table(rows: list[dict[str, Any]]) -> ReportTable:
    cells = [
        (
            row["kind"],
            row["phase"],
            "x".join(str(size) for size in row["shape"]),
            format_time(row["time_s"]),
            f"{row['flop_per_s'] / _TERA:.3g}",
            f"{row['bytes_per_s'] / _GIGA:.4g}",
        )
        for row in rows
    ]
    return ReportTable(
        key="probed_operators",
        title="Operators",
        columns=("operator", "phase", "shape", "time", "TFLOP/s", "GB/s fitted"),
        rows=tuple(cells),
    )


def _transfer_table(rows: list[dict[str, Any]]) -> ReportTable:
    cells = [
        (
            row["collective"],
            str(row["num_ranks"]),
            format_bytes(row["nbytes"]),
            format_time(row["time_s"]),
            f"{row['algorithm_bytes_per_s'] / _GIGA:.4g}",
            f"{row['bus_bytes_per_s'] / _GIGA:.4g}",
        )
        for row in rows
    ]
    return ReportTable(
        key="probed_collectives",
        title="Collectives",
        columns=("collective", "ranks", "payload", "time", "algbw GB/s", "busbw GB/s"),
        rows=tuple(cells),
    )
