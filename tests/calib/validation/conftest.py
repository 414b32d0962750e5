"""A canonical operator table with planted times."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest


def planted_rows(
    device: str, group: str, kind: str, *, num: int, scale_s: float, seed: int
) -> pd.DataFrame:
    """Forward and backward of ``num`` linears: ``scale_s`` a multiply-add, backward twice that."""
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


@pytest.fixture
def planted() -> pd.DataFrame:
    """Two operators on two devices, the second half as fast."""
    parts = [
        planted_rows(device, group, kind, num=80, scale_s=scale * speed, seed=seed)
        for device, speed in (("one", 1.0), ("two", 2.0))
        for seed, (group, kind, scale) in enumerate(
            (("qkv", "linear_qkv", 1e-14), ("fc1", "linear_fc1", 2e-14))
        )
    ]
    return pd.concat(parts, ignore_index=True).astype({"tp": "Int64"})
