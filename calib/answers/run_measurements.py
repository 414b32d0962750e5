"""Measurements of the running layout in a sample table: its step, and the overhead of hooks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..advice.decision import MIN_STEPS
from ..errors import CalibrationError, check_ascending
from ..forecast.forecasts import DRIFT_FRAC, mean_estimate
from ..memory.devices import known_nbytes
from ..memory.peak import memory_offset
from ..regressors.robust import Z_90
from ..samples.reduce import mad_sigma
from ..samples.table import SampleTable, windows_of
from ..units import format_frac
from ..workload.collectives import GroupRole
from ..workload.operators import OperatorKind, Phase
from .routing import with_measured_routing

ONE_STEP_SIGMA_LOG = 0.1
"""Standard deviation (log) of single steps, used if only one step was measured."""
_HOST_KINDS = (OperatorKind.HOST_MICROBATCH.value, OperatorKind.HOST_STEP.value)
_EXCHANGES = tuple(role.value for role in (GroupRole.EP, GroupRole.EXPERT_TP_EP))
_SEED = 20250929
"""Arbitrary fixed seed, for reproducibility."""
_NUM_RESAMPLES = 2000
"""Twice the 1000 that percentile intervals need (Efron and Tibshirani, 1993, 13.3)."""
_MIN_STEPS = 2
"""Fewest steps of either kind, as one difference has no scatter."""
_LAUNCH_BOUND_FRAC = 0.1
"""Smallest share of waiting for the host that is remarked on; the threshold of drifts as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Extra time of a hooked step as a share of a bare one, with a 90 % interval."""

    overhead_frac: float
    low_frac: float
    high_frac: float
    num_hooked: int
    num_bare: int
    noise_frac: float = 0.0
    """Half of the 90 % interval of a single bare step, as a share of the median one."""
    at_operators: tuple[float, float, float] | None = None
    """Part of it in passes with recorded operators, against others of the same steps, with its
    interval; None if no step has both."""

    def __post_init__(self) -> None:
        check_ascending("cost of hooks", -1.0, self.low_frac, self.overhead_frac, self.high_frac)

    @property
    def below_frac(self) -> float | None:
        """Bound on an overhead hidden by noise, as a share of a step; None if not hidden."""
        if self.low_frac > 0:
            return None
        return self.high_frac if self.high_frac > 0 else -self.low_frac

    @property
    def values(self) -> dict[str, float]:
        """The overhead as files and sinks store it: its value, or its bound if hidden by noise.

        >>> Overhead(overhead_frac=-0.01, low_frac=-0.1, high_frac=0.08, num_hooked=4,
        ...          num_bare=4).values
        {'overhead_below_frac': 0.08}
        """
        if self.below_frac is not None:
            return {"overhead_below_frac": self.below_frac}
        return {"overhead_frac": self.overhead_frac}

    @property
    def text(self) -> str:
        """The overhead in words, a value or a bound."""
        if self.below_frac is not None:
            return f"not measurable (below {format_frac(self.below_frac)})"
        return format_frac(self.overhead_frac)


@dataclass(frozen=True, slots=True, kw_only=True)
class HookSummary:
    """Hooks, operators and groups recorded in a window."""

    num_fired: int
    num_installed: int
    num_operator_kinds: int
    num_groups: int
    remarks: tuple[str, ...] = ()
    """Parts that hooks cannot measure here, or that are disabled, in words."""


def measured_step_s(table: SampleTable) -> float:
    """Return the median bare step of the newest window that has enough steps, seconds; of all clean
    steps if none is bare.

    Raises ``CalibrationError`` if there is no clean step.
    """
    newest = _newest_steps(table)
    times = newest.step_times_s(is_hooked=False)
    if not times.size:
        times = newest.step_times_s()
    if not times.any():
        raise CalibrationError(
            "no clean step in the newest window (each one saved, evaluated or collected garbage); "
            "record more steps"
        )
    return float(np.median(times))


def _newest_steps(table: SampleTable) -> SampleTable:
    """Return the table with the steps of one window only: the newest that the run's end has not cut
    short, if there is one."""
    steps, windows = table.newest("steps"), windows_of(table)
    num_steps = steps[steps["is_clean"]].groupby("window")["step"].nunique()
    full = [window for window in windows if num_steps[window] >= MIN_STEPS] or windows
    return replace(table, steps=steps[steps["window"] == full[-1]])


def measured_sigma_log(table: SampleTable) -> float:
    """Return the standard error (log) of the level of the newest window's bare steps."""
    newest = _newest_steps(table)
    times = newest.step_times_s(is_hooked=False)
    if times.size < 2:
        times = newest.step_times_s()
    if times.size < 2:
        return ONE_STEP_SIGMA_LOG
    estimate = mean_estimate(times)
    return math.hypot(estimate.standard_error / estimate.mean, DRIFT_FRAC)


def recalibration_s(table: SampleTable) -> float:
    """Return the cost of a new calibration, seconds: the excess of the first window, with warm-up,
    over as many bare steps."""
    steps = table.newest("steps")
    first = steps[steps["window"] == steps["window"].min()]
    times = first.groupby("step", sort=True)["time_s"].median()
    return max(0.0, float(times.sum()) - len(times) * measured_step_s(table))


def memory_capacity_nbytes(table: SampleTable) -> int | None:
    """Return the memory of the run's device as recorded, else by the device's name; None if
    unknown."""
    return table.device_memory_nbytes() or known_nbytes(table.config().device)


def memory_offset_nbytes(table: SampleTable) -> int | None:
    """Return the newest run's measured memory peak minus its estimate; None if not measured."""
    peaks = table.memory_peak_nbytes()
    if not peaks:
        return None
    return memory_offset(with_measured_routing(table.config(), table), max(peaks.values()))


def mean_waiting_s(table: SampleTable, routed_s: float = 0.0) -> float:
    """Return the wait for later ranks per step in the newest window, mean over ranks, seconds.

    A rank's step is its work plus its waiting; averaged over ranks that is an identity, so this
    part of a step belongs to no operator.  Excluded is what the step model has already: waiting of
    pipeline stages for each other, and ``routed_s``, the wait where tokens are exchanged for the
    rank with the most tokens.
    """
    rows = table.newest("skew")
    rows = rows[rows["role"] != "pp"]
    rows = rows[rows["window"] == rows["window"].max()]
    waited = rows.groupby(rows["role"].isin(_EXCHANGES))["wait_s"].sum()
    num_ranks = max(1, rows["rank"].nunique())
    at_experts, elsewhere = (float(waited.get(key, 0.0)) / num_ranks for key in (True, False))
    return elsewhere + max(0.0, at_experts - routed_s)


def perturbed_frac(table: SampleTable, cost: Overhead | None) -> float:
    """Return the share of a hooked step, apart from the time inside the hooks, that they add to it.

    Operators are timed in hooked steps, while nearly all steps of the run are bare. The rest of a
    modelled step is positive, however much the few steps scatter.
    """
    if cost is None:
        return 0.0
    inside = table.phases[table.phases["name"].isin(["forward-backward", "optimizer"])]
    hooked = table.steps[table.steps["is_clean"] & table.steps["is_hooked"]]
    known_s = float(hooked["hook_s"].median())
    known_s += float(inside.groupby(["rank", "step"])["hook_s"].sum().median())
    bare = table.steps[table.steps["is_clean"] & ~table.steps["is_hooked"]]
    bare_s = float(bare["time_s"].median())
    added_s = max(0.0, cost.overhead_frac * bare_s - known_s)
    return added_s / (bare_s + added_s)


def hook_summary(table: SampleTable) -> HookSummary:
    """Return the newest window's installed and fired hooks, and operator kinds and groups."""
    rows = table.newest("coverage")
    rows = rows[rows["window"] == rows["window"].max()]
    seen = table.operators[~table.operators["is_probe"]]
    transfers = table.collectives[~table.collectives["is_probe"]]
    kinds = set(seen["kind"]) - set(_HOST_KINDS)
    groups = set(zip(transfers["role"], transfers["num_ranks"], strict=True))
    return HookSummary(
        num_fired=int(rows["fired"].clip(upper=rows["installed"]).sum()),
        num_installed=int(rows["installed"].sum()),
        num_operator_kinds=len(kinds),
        num_groups=len(groups),
        remarks=(
            *sorted(set(rows.loc[rows["installed"] == 0, "name"])),
            *launch_bound_remark(launch_bound_frac(table)),
        ),
    )


def launch_bound_frac(table: SampleTable) -> float:
    """Return the share of the operators' forward and backward time in which the device waited for
    the host, in the newest window of the newest run; 0 without samples."""
    rows = table.newest("samples")
    rows = rows[(rows["row"] == "operator") & ~rows["is_probe"] & ~rows["kind"].isin(_HOST_KINDS)]
    rows = rows[(rows["window"] == rows["window"].max()) & (rows["phase"] != Phase.STEP.value)]
    times_s = rows["time_s"] * rows["count"]
    return float((times_s * rows["host_bound_frac"]).sum() / times_s.sum()) if len(rows) else 0.0


def launch_bound_remark(frac: float) -> tuple[str, ...]:
    """Return the remark on a share of waiting; empty if it is small.

    >>> launch_bound_remark(0.05)
    ()
    """
    if frac < _LAUNCH_BOUND_FRAC:
        return ()
    return (
        f"launch-bound: the GPU waited for the host in {format_frac(frac)} of the operators' time, "
        "which includes the host's launches; intervals of other shapes are wider; a larger "
        "micro-batch or CUDA graphs would raise throughput",
    )


def measured_overhead(table: SampleTable) -> Overhead | None:
    """Return the overhead over all windows; None if there are too few steps of either kind."""
    steps = table.newest("steps")
    steps = steps[steps["is_clean"]]
    by_step = steps.groupby("step", sort=True).agg(
        time_s=("time_s", "median"), is_hooked=("is_hooked", "max")
    )
    try:
        whole = overhead(by_step["time_s"].to_numpy(), by_step["is_hooked"].to_numpy())
    except CalibrationError:
        return None
    added_s = steps[steps["added_s"] != 0.0].groupby("step", sort=True)["added_s"].median()
    if len(added_s) < _MIN_STEPS:
        return whole
    bare_s = by_step.loc[~by_step["is_hooked"], "time_s"].median()
    at, low, high = (max(0.0, end / bare_s) for end in _interval(added_s.to_numpy()))
    return replace(whole, at_operators=(at, low, high))


def overhead(step_times_s: ArrayLike, is_hooked: ArrayLike) -> Overhead:
    """Return the median difference of neighbouring hooked and bare steps over the median bare step.

    ``step_times_s`` are in the order in which the steps ran.  Each hooked step is compared with the
    mean of its nearest bare steps before and after, so that a slow trend cancels.  The interval is
    a percentile bootstrap over these differences, with a fixed seed for reproducibility.
    Raises ``CalibrationError`` if there are fewer than two steps of either kind.
    """
    times = np.asarray(step_times_s, dtype=np.float64)
    hooked = np.asarray(is_hooked, dtype=bool)
    num_hooked, num_bare = int(hooked.sum()), int((~hooked).sum())
    if min(num_hooked, num_bare) < _MIN_STEPS:
        raise CalibrationError(
            f"{num_hooked} hooked and {num_bare} bare steps are too few; "
            f"record at least {_MIN_STEPS} of each"
        )
    differences = _differences(times, hooked)
    bare = float(np.median(times[~hooked]))
    # No step is shorter than 0, but differences from noisy neighbours may be.
    cost, low, high = (max(-1.0, end / bare) for end in _interval(differences))
    return Overhead(
        overhead_frac=cost,
        low_frac=low,
        high_frac=high,
        num_hooked=num_hooked,
        num_bare=num_bare,
        noise_frac=Z_90 * mad_sigma(times[~hooked]) / bare,
    )


def _interval(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the median with its 90 % interval."""
    random = np.random.default_rng(_SEED)
    picks = random.integers(values.size, size=(_NUM_RESAMPLES, values.size))
    medians = np.median(values[picks], axis=1)
    # A bootstrap of few values is too narrow by sqrt((n - 1) / n).
    centre = float(np.median(values))
    widen = (values.size / (values.size - 1)) ** 0.5
    low, high = centre + widen * (np.quantile(medians, [0.05, 0.95]) - centre)
    return centre, float(low), float(high)


def _differences(times: NDArray[np.float64], hooked: NDArray[np.bool_]) -> NDArray[np.float64]:
    bare = np.flatnonzero(~hooked)
    out = []
    for place in np.flatnonzero(hooked):
        after = int(np.searchsorted(bare, place))
        near = [int(bare[i]) for i in (after - 1, after) if 0 <= i < bare.size]
        out.append(times[place] - np.mean(times[near]))
    return np.asarray(out)
