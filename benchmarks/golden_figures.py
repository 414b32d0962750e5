"""Predictions of all models on small public tables, to hold them against stored ones.

Steps of each source of ``generalise.py``, from no row and from one, with the rows of
``tests/golden/steps`` and ``recipes/published``; operators and collectives of
``tests/golden/published`` by the protocols that a table supports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from forerun.benchmarks.generalise import SOURCES, Task, scored
from forerun.benchmarks.protocols.collectives import COLLECTIVE_PROTOCOLS, validate_collectives
from forerun.benchmarks.protocols.operator_samples import OperatorSamples, operator_samples
from forerun.benchmarks.protocols.operators import (
    OPERATOR_PROTOCOLS,
    scored_cells,
    validate_operators,
)
from forerun.benchmarks.protocols.scores import Split, concat_scored
from forerun.benchmarks.published.readers import RECIPES, read_published
from forerun.calib.fit import fit_machine

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
ABSENT = "huggingface/nanotron"
"""Source without rows among those of this repository."""
STEPS = tuple(source.name for source in SOURCES if source.name != ABSENT)
COLLECTIVES = tuple(sorted((GOLDEN / "published").glob("coll_*.csv")))
OPERATORS = tuple(sorted((GOLDEN / "published").glob("ops_*.csv")))
TABLES = (
    *COLLECTIVES, *OPERATORS,
    RECIPES / "example_collectives.csv", RECIPES / "example_operators.csv",
)  # fmt: skip
FIGURES = {
    **{f"steps_{place}": name for place, name in enumerate(STEPS)},
    **{path.stem: path for path in TABLES},
}
"""Source or table of each set of figures, by name."""


def figures(name: str) -> dict[str, Any]:
    """Return predictions with their intervals, in seconds, by row and what was known."""
    with threadpool_limits(1):
        if name.startswith("steps_"):
            return {"steps": list(_steps(FIGURES[name]))}
        return {"rows": list(_rows(FIGURES[name]))}


def _steps(source: Any) -> Iterator[list[Any]]:
    place = [one.name for one in SOURCES].index(source)
    tasks = [Task(data=GOLDEN / "steps", place=place, num_known=known, draws=1) for known in (0, 1)]
    for line in scored(tasks, 1):
        for frame in line.ours:
            for row in frame.to_dict("records"):
                times = [row["predicted_s"], row["low_s"], row["high_s"]]
                yield [line.num_known, row["row"].row_id, *map(float, times)]


def _rows(path: Any) -> Iterator[list[Any]]:
    table = read_published(pd.read_csv(path), path.stem)
    if "collective" in table:
        parts = [validate_collectives(table, seeds=(0,), protocols=tuple(COLLECTIVE_PROTOCOLS))]
    else:
        alone = validate_operators(table, seeds=(0,), protocols=tuple(OPERATOR_PROTOCOLS))
        parts = [alone, concat_scored(_every_second(operator_samples(table)))]
    for rows in parts:
        for row in rows.to_dict("records"):
            yield [value for value in row.values() if isinstance(value, str | int | float)]


def _every_second(samples: Sequence[OperatorSamples]) -> Iterator[pd.DataFrame]:
    """Yield scored rows of each device with every second sample known, on top of its prior."""
    for device in dict.fromkeys(one.device for one in samples):
        members = [one for one in samples if one.device == device]
        yield from scored_cells(
            members, "every_second", (0,), partial(fit_machine, use_prior=True), draw=_split
        )


def _split(samples: OperatorSamples, protocol: str, seed: int) -> Iterator[tuple[str, Split]]:
    is_known = np.arange(len(samples)) % 2 == seed
    yield protocol, Split(train=is_known, test=~is_known)
