"""What the traced step adds: device time by operator, and linears' backward phase in two parts."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from ..workload.operators import OperatorKind, Phase

_KEYS = ["window", "kind", "phase", "shape", "element_nbytes", "stage"]
_GRADIENTS = (Phase.INPUT_GRADIENT.value, Phase.WEIGHT_GRADIENT.value)


def traced_rows(traces: pd.DataFrame) -> pd.DataFrame:
    """One row per operator of the traced steps: median time, and the most kernels of a run of it.

    ``time_s`` is what its kernels took without the gaps between them; on a CPU, its calls.
    """
    groups = traces.groupby(_KEYS, sort=True)
    return groups.agg(
        time_s=("time_s", "median"),
        count=("time_s", "size"),
        num_kernels=("num_kernels", "max"),
    ).reset_index()


def weight_fracs(traced: pd.DataFrame) -> Mapping[OperatorKind, float]:
    """Share of the weight's gradient in the backward time of each kind of linear, 0 to 1.

    Zero-bubble schedules put that part off.  Kinds whose two parts the trace does not separate are
    left out.
    """
    split = traced[traced["phase"].isin(_GRADIENTS)]
    times = (split["time_s"] * split["count"]).groupby([split["kind"], split["phase"]]).sum()
    sums = times.unstack("phase").reindex(columns=list(_GRADIENTS)).dropna()
    shares = sums[_GRADIENTS[1]] / sums.sum(axis=1)
    return {OperatorKind(str(kind)): float(share) for kind, share in shares.items()}
