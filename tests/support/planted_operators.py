"""A canonical operator table with planted times, and models that recover them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from forerun.calib.fit.batches import ShapeBatch, Timed


def planted_rows(
    device: str, group: str, kind: str, *, num: int, scale_s: float, seed: int
) -> pd.DataFrame:
    """Return forward and backward of ``num`` linears: ``scale_s`` per multiply-add, backward
    twice that."""
    rng = np.random.default_rng(seed)
    sizes = 64 * rng.integers(1, 64, size=(num, 3))
    tp = rng.choice([1, 2, 4], size=num)
    forward = pd.DataFrame(
        {
            "device": device,
            "group": group,
            "kind": kind,
            "phase": "forward",
            "shape": ["x".join(map(str, row)) for row in sizes],
            "element_nbytes": 2,
            "time_s": scale_s * sizes.prod(axis=1),
            "tp": tp,
            "flag": "",
        }
    )
    backward = forward.assign(phase="backward", time_s=2 * forward["time_s"])
    return pd.concat([forward, backward], ignore_index=True)


def planted_operators() -> pd.DataFrame:
    """Return two operators on two devices, the second half as fast."""
    parts = [
        planted_rows(device, group, kind, num=80, scale_s=scale * speed, seed=seed)
        for device, speed in (("one", 1.0), ("two", 2.0))
        for seed, (group, kind, scale) in enumerate(
            (("qkv", "linear_qkv", 1e-14), ("fc1", "linear_fc1", 2e-14))
        )
    ]
    return pd.concat(parts, ignore_index=True).astype({"tp": "Int64"})


@dataclass(frozen=True, kw_only=True)
class Line:
    """Predictions with an interval of 1 % either way."""

    log_time: NDArray[np.float64]

    @property
    def low(self) -> NDArray[np.float64]:
        return self.log_time - 0.01

    @property
    def high(self) -> NDArray[np.float64]:
        return self.log_time + 0.01


class Rates:
    """Model by the median rate of a group, exact on planted times."""

    def __init__(self, groups: Mapping[str, Timed]) -> None:
        self.seen = {name: timed.batch.sizes.tolist() for name, timed in groups.items()}
        self.predicted: dict[str, list[list[float]]] = {}
        self._log_rate = {
            name: np.median(np.log(timed.time_s / timed.batch.sizes.prod(axis=1)))
            for name, timed in groups.items()
        }

    def predict(self, name: str, batch: ShapeBatch) -> Line:
        self.predicted.setdefault(name, []).extend(batch.sizes.tolist())
        return Line(log_time=np.log(batch.sizes.prod(axis=1)) + self._log_rate[name])


class Method:
    """Method that fits ``Rates`` and stores them for inspection."""

    def __init__(self) -> None:
        self.models: list[Rates] = []

    def fit(self, groups: Mapping[str, Timed], *, device: str) -> Rates:
        self.models.append(Rates(groups))
        return self.models[-1]

    def transfer(self, source: Rates, *, device: str, probes: Mapping[str, Timed]) -> Rates:
        return source
