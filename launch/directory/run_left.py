"""What is left of the run of a directory, as its newest forecast says it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...calib.forecast import RunLeft
from ...calib.workload import Goals, RunConfig
from .bounded_files import read_object
from .run_folders import paths_of, top_of

_FORECAST, _REQUEST = "forecast.json", "request.json"


def run_left(
    directory: Path,
    run_id: str,
    running: RunConfig,
    step_time_s: float | None = None,
    *,
    price_per_gpu_hour: float | None = None,
) -> RunLeft | None:
    """The rest of a run, whose running layout takes ``step_time_s`` in the plan that asks (None: as
    the forecast has it).

    None where the directory has no forecast of that run, or nothing is left.  Price and cost of a
    restart are those that the run was given, unless a price is given here.
    """
    left = None
    for said in _objects(directory, _FORECAST, run_id):
        left = RunLeft.from_forecast(said, running, step_time_s)
        break
    if left is None:
        return None
    asked: Mapping[str, Any] = next(_objects(directory, _REQUEST, run_id), {})
    own_price, restart_s = asked.get("price_per_gpu_hour"), asked.get("restart_cost_s")
    price = own_price if price_per_gpu_hour is None else price_per_gpu_hour
    return replace(
        left,
        price_per_gpu_hour=float(price) if isinstance(price, int | float) else None,
        restart_s=float(restart_s) if isinstance(restart_s, int | float) else Goals.restart_cost_s,
    )


def _objects(directory: Path, name: str, run_id: str) -> Iterator[Mapping[str, Any]]:
    """The readable ones of that name and run, the newest first."""
    home, _ = top_of(directory)
    for path in (directory / name, *paths_of(home, name)):
        value = read_object(path)
        if value is not None and value.get("run_id") == run_id:
            yield value
