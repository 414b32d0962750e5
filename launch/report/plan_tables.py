"""Plans for several numbers of GPUs and several devices beside each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...calib.advice import Candidate, ScalePoint
from ...calib.forecast import Throughput, WholeRun
from ...calib.units import format_count, format_frac, format_time
from .scaling_text import TOO_FAR
from .table import ReportTable, table_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BestLayout:
    """The fastest layout that fits on so many GPUs of a device, and what its tokens cost."""

    device: str
    num_ranks: int
    candidate: Candidate | None
    """None where none fits."""
    price_per_gpu_hour: float | None
    point: ScalePoint | None = None
    """The same on the curve of its device, where there are several numbers of GPUs."""
    whole_run: WholeRun | None = None
    """Its run to the tokens that were asked for."""

    @property
    def throughput(self) -> Throughput | None:
        """What its step time is worth; None where no layout fits."""
        return None if self.candidate is None else self.candidate.throughput

    @property
    def gpu_hours_per_giga_token(self) -> float | None:
        """Hours of all GPUs for 1e9 tokens; None where no layout fits."""
        found = self.throughput
        return None if found is None else found.gpu_hours_per_giga_token

    @property
    def cost_per_giga_token(self) -> float | None:
        """The same times the price of an hour of a GPU; None where that is not told."""
        hours = self.gpu_hours_per_giga_token
        price = self.price_per_gpu_hour
        return None if hours is None or price is None else hours * price

    @property
    def time_order(self) -> float:
        """What ``--objective time`` orders by: seconds of a token."""
        found = self.throughput
        return math.inf if found is None else 1.0 / found.tokens_per_s

    @property
    def cost_order(self) -> float:
        """What ``--objective cost`` orders by: cost, or hours where no price is told."""
        if self.gpu_hours_per_giga_token is None:
            return math.inf
        return self.cost_per_giga_token or self.gpu_hours_per_giga_token


def plans_table(rows: Sequence[BestLayout]) -> ReportTable:
    """The best layout of each plan, the numbers of GPUs and the devices in their order."""
    cells: dict[str, Callable[[BestLayout], str]] = {
        "GPUs": lambda row: str(row.num_ranks),
        "best layout": lambda row: row.candidate.label if row.candidate else "none fits",
        "step": lambda row: format_time(row.candidate.step_time_s) if row.candidate else "",
        "90 %": lambda row: _interval(row.candidate),
        "tokens/s": lambda row: format_count(row.throughput.tokens_per_s) if row.throughput else "",
        "efficiency": lambda row: format_frac(row.point.efficiency_frac) if row.point else "",
        "GPU-h for 1e9 tokens": lambda row: _figure(row.gpu_hours_per_giga_token),
    }
    if any(row.whole_run is not None for row in rows):
        cells["time"] = lambda row: row.whole_run.days.partition(" (")[0] if row.whole_run else ""
        del cells["GPU-h for 1e9 tokens"]
        cells["GPU-hours"] = lambda row: _count(row.whole_run and row.whole_run.gpu_hours)
        if any(row.price_per_gpu_hour is not None for row in rows):
            cells["cost"] = lambda row: _count(row.whole_run and row.whole_run.cost)
    elif any(row.price_per_gpu_hour is not None for row in rows):
        cells["cost of 1e9 tokens"] = lambda row: _figure(row.cost_per_giga_token)
    if len({row.num_ranks for row in rows}) == 1:
        del cells["efficiency"]
    if not all(row.point.is_trusted for row in rows if row.point):
        cells["trust"] = lambda row: TOO_FAR if row.point and not row.point.is_trusted else ""
    if len({row.device for row in rows}) > 1:
        cells = {"device": lambda row: row.device, **cells}
    table = table_of("plans", "The best on each number of GPUs", rows, cells)
    return table.sparing(
        *("GPU-h for 1e9 tokens", "cost of 1e9 tokens", "GPU-hours", "cost"),
        late=("90 %", "best layout", "tokens/s", "efficiency", "trust"),
        folded="best layout",
    )


def _interval(candidate: Candidate | None) -> str:
    if candidate is None:
        return ""
    return f"{format_time(candidate.low_s)} to {format_time(candidate.high_s)}"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"


def _count(value: float | None) -> str:
    return "" if value is None else format_count(value)
