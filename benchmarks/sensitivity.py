"""Sensitivity to the models' chosen numbers: held-out errors, with each number halved and doubled.

    python benchmarks/sensitivity.py DATA_DIR [--only TEXT] [--sources TEXT,...] [--draws 1]

Numbers are those of ``scoring/chosen_constants.py``, changed where they are defined; one used as a
class's default, or imported by another module, keeps its value there.  Sources are those of
``generalise.py``, from no row and from three random ones, and tables of operators and collectives,
with held-out rows.  Percent: mean absolute error, and in brackets the share of rows within the 90 %
interval.  Numbers that change nothing are listed at the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from forerun import calib
from forerun.benchmarks.generalise import KNOWN, SOURCES, Task, scored
from forerun.benchmarks.protocols.collectives import validate_collectives
from forerun.benchmarks.protocols.operators import validate_operators
from forerun.benchmarks.published.readers import read_published
from forerun.benchmarks.scoring.chosen_constants import chosen
from forerun.calib.fit import rate_priors

OPERATORS = ("ops_simumax_gemm_attention", ("few_8", "few_24", "leave_gpu"))
COLLECTIVES = ("coll_aceso", ("few_8", "leave_span"))
QUICK = "vTrain,llm-foundry,mlcommons,sailor,nanotron,small tables,estimate-train-time"
Cells = dict[str, str]


def main() -> None:
    """Score the models unchanged, then with each number changed."""
    parser = argparse.ArgumentParser(description="Errors with each number halved and doubled.")
    parser.add_argument("data", type=Path, metavar="DATA_DIR", help="public tables, CSV")
    parser.add_argument("--only", default="", metavar="TEXT", help="numbers with this text")
    parser.add_argument("--sources", default=QUICK, help=f"sources with these texts ({QUICK})")
    parser.add_argument("--draws", type=int, default=1, help="random calibrations (1)")
    arguments = parser.parse_args()
    names = [one for one in arguments.sources.split(",") if one]
    tasks = [
        Task(data=arguments.data, place=place, num_known=known, draws=arguments.draws)
        for place, source in enumerate(SOURCES)
        if any(name in source.name for name in names)
        for known in KNOWN
    ]
    numbers = [one for one in chosen(Path(calib.__path__[0])) if arguments.only in ".".join(one)]
    idle = [".".join(one) for one in numbers if not _printed(*one, arguments.data, tasks)]
    print(f"\nNo change: {', '.join(idle) or 'none'}.")


def _printed(module: str, name: str, data: Path, tasks: list[Task]) -> bool:
    """Print the effects of halving or doubling a number; return False if there are none."""
    before = _before(data, tuple(tasks))
    is_printed = False
    for factor in (0.5, 2.0):
        with changed(module, name, factor):
            texts = _figures(data, tasks)
        cells = [text if text != before[key] else "" for key, text in texts.items()]
        if any(cells):
            print(f"| {module}.{name} | {factor:g} | {' | '.join(cells)} |", flush=True)
            is_printed = True
    return is_printed


@cache
def _before(data: Path, tasks: tuple[Task, ...]) -> Cells:
    """Return the unchanged figures, printed as the head of the table."""
    texts = _figures(data, list(tasks))
    print(f"| number | factor | {' | '.join(texts)} |")
    print("| --- | ---: |" + " ---: |" * len(texts))
    print(f"| as it is | 1 | {' | '.join(texts.values())} |", flush=True)
    return texts


@contextmanager
def changed(module: str, name: str, factor: float) -> Iterator[None]:
    """Scale the number, or each of several, by ``factor``; whole numbers stay whole."""
    home = import_module(f"forerun.calib.{module}")
    old = getattr(home, name)
    _put(home, name, _times(old, factor))
    try:
        yield
    finally:
        _put(home, name, old)


def _put(home: ModuleType, name: str, value: object) -> None:
    setattr(home, name, value)
    for one in vars(rate_priors).values():
        if hasattr(one, "cache_clear"):
            one.cache_clear()


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, dict):
        return {key: _times(one, factor) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_times(one, factor) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: _times(getattr(value, f.name), factor) for f in fields(value)}
        )
    if isinstance(value, int) and not isinstance(value, bool):
        return round(value * factor)
    return value * factor if isinstance(value, (float, np.ndarray)) else value


def _figures(data: Path, tasks: list[Task]) -> Cells:
    """Return the text of each figure, by its name."""
    texts = {}
    for line in scored(tasks, 1):
        error = line.mape_frac("ours")
        if error is not None and line.coverage_frac is not None:
            texts[f"{line.source}, {line.num_known}"] = _cell(error, line.coverage_frac)
    with threadpool_limits(1):
        for table, protocols in (OPERATORS, COLLECTIVES):
            raw = pd.read_csv(data / f"{table}.csv.gz", low_memory=False)
            frame = read_published(raw, table)
            run = validate_operators if "kind" in frame.columns else validate_collectives
            rows = run(frame, seeds=range(1), protocols=protocols)
            for protocol, part in rows.groupby("protocol"):
                coverage = part["measured_s"].between(part["low_s"], part["high_s"]).mean()
                error = (part["predicted_s"] / part["measured_s"] - 1.0).abs().mean()
                texts[f"{table}, {protocol}"] = _cell(float(error), float(coverage))
    return texts


def _cell(error_frac: float, coverage_frac: float) -> str:
    return f"{100 * error_frac:.1f} ({100 * coverage_frac:.0f})"


if __name__ == "__main__":
    main()
