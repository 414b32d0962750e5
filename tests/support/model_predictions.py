"""Prints predictions of every fitted model on this processor as a JSON object of lists of logs.

Run as a program, so that libraries choose their kernels by its environment.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from planted_machine import A100, H100, PlantedMachine, batch, random_shapes
from threadpoolctl import threadpool_info

from forerun.benchmarks.baselines.steps import TenTerms
from forerun.benchmarks.protocols.collectives import scored_rows
from forerun.benchmarks.protocols.table_steps import TableSteps, design
from forerun.calib.fit._device_transfer import transfer_to_device
from forerun.calib.fit.machine import MachineModel, fit_machine
from forerun.calib.importers.canonical_steps import read_steps
from forerun.calib.importers.canonical_tables import read_table
from forerun.calib.workload.operators import OperatorKind as Kind
from forerun.calib.workload.operators import Phase

PUBLISHED = Path(__file__).parents[2] / "recipes" / "published"
SIZES = {Kind.NORM: 2, Kind.RESIDUAL: 2}
NUMBERS = {
    Kind.LINEAR_FC1: 8,
    Kind.LINEAR_QKV: 24,
    Kind.NORM: 40,
    Kind.ACTIVATION: 12,
    Kind.LINEAR_PROJ: 3,
    Kind.RESIDUAL: 90,
}
"""Shapes of each operator: enough for a Gaussian process alone, with a forest, or boosted trees."""


def main() -> None:
    """Print the predictions, and as ``cores`` the architectures that BLAS chose kernels for."""
    cores = sorted({library["architecture"] for library in _blas()})
    threads = sorted({library["num_threads"] for library in _blas()})
    result = {**_operators(), **_collectives(), **_steps()}
    print(json.dumps({"cores": cores, "threads": threads, "logs": result}))


def _blas() -> list[dict]:
    return [library for library in threadpool_info() if library["user_api"] == "blas"]


def _operators() -> dict[str, list[float]]:
    machine = PlantedMachine(efficiency={Kind.LINEAR_FC1: 0.8, Kind.LINEAR_QKV: 0.65})
    rng = np.random.default_rng(0)
    groups, queries = {}, {}
    for kind, number in NUMBERS.items():
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            shapes = random_shapes(rng, number, SIZES.get(kind, 3))
            name = f"{kind.value}/{phase.value}"
            # Repeats, and an outlier.
            of = batch(kind, phase, np.concatenate([shapes, shapes[:2]]))
            groups[name] = machine.measure(of, rng, noise=0.03)
            groups[name].time_s[0] *= 1.6
            queries[name] = batch(kind, phase, random_shapes(rng, 60, SIZES.get(kind, 3)))
    model = fit_machine(groups, device=A100, use_prior=True)
    probes = {
        name: machine.measure(queries[name].take(np.arange(2)), rng, noise=0.05)
        for name in list(groups)[:4]
    }
    moved = transfer_to_device(model, device=H100, probes=probes)
    return {
        f"{label} {name}": _logs(fitted, name, of)
        for label, fitted in (("operators", model), ("moved", moved))
        for name, of in queries.items()
    }


def _logs(model: MachineModel, name: str, of) -> list[float]:
    prediction = model.predict(name, of)
    return _list([*prediction.log_time, *prediction.low, *prediction.high])


def _collectives() -> dict[str, list[float]]:
    path = PUBLISHED / "example_collectives.csv"
    table = read_table(pd.read_csv(path), path.name)
    result = {}
    for protocol in ("random", "leave_span"):
        rows = scored_rows(table, protocol, seeds=[0])
        result[f"collectives {protocol}"] = _list(
            np.log(rows[["predicted_s", "low_s", "high_s"]].to_numpy(dtype=float)).ravel()
        )
    return result


def _steps() -> dict[str, list[float]]:
    path = PUBLISHED / "steps_simumax_b200_8gpu.csv.gz"
    rows = read_steps(pd.read_csv(path), path.name).rows
    rows = [row for row in rows if row.machine == rows[0].machine][:24]
    chosen = design(rows, 4)
    train = [rows[place] for place in chosen]
    result = {"design": [float(place) for place in chosen]}
    for name, model in (("steps", TableSteps()), ("ten terms", TenTerms())):
        predictions = model.fit(train).predict(rows)
        result[name] = _list(np.log([*predictions.time_s, *predictions.low_s, *predictions.high_s]))
    return result


def _list(values: Sequence[float] | np.ndarray) -> list[float]:
    return [float(value) for value in values]


if __name__ == "__main__":
    main()
