"""A canonical table of collectives with planted times."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd

from forerun.calib.workload.collectives import Collective

SIZES = [2**k for k in range(10, 31)]
PER_NODE = 4


def planted_collectives(
    *nodes: int, repeats: int = 2, noise: float = 0.02, seed: int = 0
) -> pd.DataFrame:
    """Return rings with a hop of 4 us on a network of 80 GB/s, each payload timed repeatedly."""
    rng = np.random.default_rng(seed)
    rows = []
    for num, nbytes, _ in itertools.product(nodes, SIZES, range(repeats)):
        ranks = PER_NODE * num
        time_s = 8.1e-6 + (ranks - 1) * (4e-6 + nbytes / ranks / 80e9)
        rows.append(
            {
                "device": "NVIDIA A100-SXM4-40GB",
                "fabric": "planted",
                "collective": Collective.ALL_GATHER.value,
                "num_ranks": ranks,
                "num_nodes": num,
                "nbytes": nbytes,
                "time_s": time_s * float(np.exp(noise * rng.normal())),
                "flag": "",
            }
        )
    return pd.DataFrame(rows)
