"""Measured facts of a run, without a model: its step, memory, waiting, and the cost of hooks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ..advice.decision import MIN_STEPS
from ..drift.stragglers import Floats, WaitingReport, waiting_report
from ..errors import CalibrationError, check_ascending
from ..fit.calibration import Calibration, calibrate
from ..forecast.forecasts import DRIFT_FRAC, mean_estimate
from ..forecast.modelled import at_batch_size, batch_size_at
from ..forecast.remaining_run import MeasuredRun
from ..memory.devices import known_nbytes
from ..memory.peak import memory_offset
from ..records.record_kinds import LoopRecord
from ..regressors.robust import Z_90
from ..samples.reduce import mad_sigma
from ..samples.table import SampleTable, newest_window, windows_of
from ..search.results import MemoryBudget
from ..steps.known_steps import KnownStep
from ..units import format_bytes, format_frac, format_time
from ..workload.collectives import GroupRole
from ..workload.config import RunConfig
from ..workload.model_shape import RankLoad
from ..workload.operators import OperatorKind, Phase
from .routing import MeasuredRouting, measured_loads, measured_routing, with_measured_routing

ONE_STEP_SIGMA_LOG = 0.1
"""Standard deviation (log) of single steps, used if only one step was measured."""
_HOST_KINDS = (OperatorKind.HOST_MICROBATCH.value, OperatorKind.HOST_STEP.value)
_EXCHANGES = tuple(role.value for role in (GroupRole.EP, GroupRole.EXPERT_TP_EP))
_UNMEASURED = (
    "its transfers are not measured: DistributedDataParallel issues them in C++, where only "
    "PyTorch's flight recorder sees them, and it recorded nothing here; set "
    "TORCH_FR_BUFFER_SIZE=2000 to switch it on"
)
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
    """Hooks of a window."""

    num_fired: int
    num_installed: int
    remarks: tuple[str, ...] = ()
    """Parts that hooks cannot measure here, or that are disabled, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredGroup:
    """One kind of transfer in groups of one role, per step and rank."""

    role: str
    num_ranks: int
    collective: str = ""
    calls: float = 0.0
    nbytes: float = 0.0
    time_s: float = 0.0
    is_bound: bool = False
    """``time_s`` is an upper bound, as the end of some transfers was not recorded."""
    note: str = ""
    """Unmeasured parts and the reason; empty if everything was measured."""

    def line(self, step_s: float) -> str:
        """Return the transfers of a step in words, without a time bound that exceeds the step."""
        what = f"group {self.role}, {self.num_ranks} ranks"
        if self.note:
            return f"{what}: {self.note}"
        times = f"{self.calls:.3g} per step, {format_bytes(self.nbytes)}"
        if self.is_bound and self.time_s > step_s:
            return f"{what}: {self.collective} {times}, whose end is not recorded"
        bound = "at most " if self.is_bound else ""
        return f"{what}: {self.collective} {times}, {bound}{format_time(self.time_s)} of transfers"


@dataclass(frozen=True, kw_only=True, eq=False)
class Measurements:
    """Measurements of the newest run in a sample table, each computed when it is first used."""

    table: SampleTable = field(repr=False)

    @cached_property
    def run_id(self) -> str:
        """The run that started last."""
        return self.table.run_id

    @cached_property
    def device(self) -> str:
        """Driver's name of the accelerators, or ``cpu``."""
        return self.table.device

    @cached_property
    def loop(self) -> LoopRecord:
        """Recorded properties of the training loop."""
        return self.table.loop()

    @cached_property
    def recorded_config(self) -> RunConfig:
        """Layout that the run recorded; ``CalibrationError`` if it is unknown."""
        return self.table.config()

    @cached_property
    def loads(self) -> tuple[RankLoad, ...]:
        """Load of the busiest rank of experts, for each number of ranks."""
        return measured_loads(self.table)

    @cached_property
    def routed_config(self) -> RunConfig:
        """The recorded layout with measured routing."""
        return with_measured_routing(self.recorded_config, self.loads)

    @cached_property
    def config(self) -> RunConfig:
        """``routed_config`` at the batch size of the last step.

        A batch-size ramp may have advanced since the run recorded its layout.
        """
        config, num_steps = self.routed_config, self.num_steps
        return at_batch_size(config, batch_size_at(config, num_steps)) if num_steps else config

    @cached_property
    def calibration(self) -> Calibration:
        """Models of operators and collectives, fitted on the samples."""
        return calibrate(self.table, device=self.recorded_config.device)

    @cached_property
    def run(self) -> MeasuredRun:
        """Begin, ranks and bare steps."""
        runs = self.table.newest("runs")
        return MeasuredRun(
            started_unix_s=float(runs["started_unix_s"].min()),
            num_ranks=int(runs["world_size"].max()),
            is_cpu=str(runs["device"].iloc[0]) == "cpu",
            recorded_s=tuple(self.bare_s.tolist()),
        )

    @cached_property
    def num_steps(self) -> int:
        """Iteration of the last recorded step, from 1; 0 if none was recorded."""
        steps = self.table.newest("steps")["step"]
        return 0 if steps.empty else int(steps.max()) + 1

    @cached_property
    def clean_steps(self) -> pd.DataFrame:
        """Steps of all ranks that none of them flagged."""
        steps = self.table.newest("steps")
        return steps[steps["is_clean"]]

    @cached_property
    def bare_s(self) -> pd.Series:
        """Seconds of each clean step without hooks, median over ranks, by step from 0."""
        return _step_times_s(self.clean_steps[~self.clean_steps["is_hooked"]])

    @cached_property
    def _newest_s(self) -> tuple[Floats, Floats]:
        """Seconds of the bare and of all clean steps of one window: the newest that the run's end
        has not cut short, if there is one."""
        windows = windows_of(self.table)
        num_steps = self.clean_steps.groupby("window")["step"].nunique()
        full = [window for window in windows if num_steps[window] >= MIN_STEPS] or windows
        steps = self.clean_steps[self.clean_steps["window"] == full[-1]]
        bare_s = _step_times_s(steps[~steps["is_hooked"]])
        return bare_s.to_numpy(dtype=np.float64), _step_times_s(steps).to_numpy(dtype=np.float64)

    @cached_property
    def step_s(self) -> float:
        """Median bare step of the newest window that has enough steps, seconds; of all clean steps
        if none is bare.

        Raises ``CalibrationError`` if there is no clean step.
        """
        bare_s, all_s = self._newest_s
        times = bare_s if bare_s.size else all_s
        if not times.any():
            raise CalibrationError(
                "no clean step in the newest window (each one saved, evaluated or collected "
                "garbage); record more steps"
            )
        return float(np.median(times))

    @cached_property
    def step_sigma_log(self) -> float:
        """Standard error (log) of the level of the newest window's bare steps."""
        bare_s, all_s = self._newest_s
        times = bare_s if bare_s.size >= 2 else all_s
        if times.size < 2:
            return ONE_STEP_SIGMA_LOG
        estimate = mean_estimate(times)
        return math.hypot(estimate.standard_error / estimate.mean, DRIFT_FRAC)

    @cached_property
    def known_step(self) -> KnownStep:
        """The layout and its measured step."""
        return KnownStep(config=self.config, time_s=self.step_s, sigma_log=self.step_sigma_log)

    @cached_property
    def recalibration_s(self) -> float:
        """Cost of a new calibration, seconds: the excess of the first window, with warm-up, over as
        many bare steps."""
        steps = self.table.newest("steps")
        times = _step_times_s(steps[steps["window"] == steps["window"].min()])
        return max(0.0, float(times.sum()) - len(times) * self.step_s)

    @cached_property
    def memory_peak_nbytes(self) -> int:
        """Largest memory peak of a rank; 0 if not measured."""
        peaks = self.table.newest("windows")["memory_peak_nbytes"]
        return 0 if peaks.empty else int(peaks.max())

    @cached_property
    def budget(self) -> MemoryBudget:
        """Memory of the smallest device as recorded, else by its name, and the offset of the
        measured peak."""
        sizes, peak = self.table.newest("windows")["device_memory_nbytes"], self.memory_peak_nbytes
        known = sizes[sizes > 0]
        return MemoryBudget(
            capacity_nbytes=known_nbytes(self.recorded_config.device)
            if known.empty
            else int(known.min()),
            offset_nbytes=memory_offset(self.routed_config, peak) if peak > 0 else None,
        )

    @cached_property
    def skew_s(self) -> dict[int, float]:
        """Each rank's mean waiting per step for later ranks, in the newest window."""
        waits = newest_window(self.table.newest("skew")).groupby("rank", sort=True)["wait_s"].sum()
        return dict(zip(waits.index.tolist(), waits.tolist(), strict=True))

    @cached_property
    def waiting(self) -> WaitingReport:
        """Waiting and stragglers in the newest window."""
        return waiting_report(self.table, self.step_s)

    def mean_waiting_s(self, routed_s: float = 0.0) -> float:
        """Return the wait for later ranks per step in the newest window, mean over ranks, seconds.

        A rank's step is its work plus its waiting; averaged over ranks that is an identity, so this
        part of a step belongs to no operator.  Excluded is what the step model has already: waiting
        of pipeline stages for each other, and ``routed_s``, the wait where tokens are exchanged for
        the rank with the most tokens.
        """
        rows = self.table.newest("skew")
        rows = newest_window(rows[rows["role"] != "pp"])
        waited = rows.groupby(rows["role"].isin(_EXCHANGES))["wait_s"].sum()
        num_ranks = max(1, rows["rank"].nunique())
        at_experts, elsewhere = (float(waited.get(key, 0.0)) / num_ranks for key in (True, False))
        return elsewhere + max(0.0, at_experts - routed_s)

    @cached_property
    def routing(self) -> MeasuredRouting | None:
        """Routing of tokens; None if no experts on several ranks received any."""
        return measured_routing(self.table)

    @cached_property
    def overhead(self) -> Overhead | None:
        """Overhead of hooks over all windows; None if there are too few steps of either kind."""
        steps = self.clean_steps
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

    @cached_property
    def perturbed_frac(self) -> float:
        """Share of a hooked step, apart from the time inside the hooks, that they add to it.

        Operators are timed in hooked steps, while nearly all steps of the run are bare. The rest of
        a modelled step is positive, however much the few steps scatter.
        """
        if self.overhead is None:
            return 0.0
        phases, steps = self.table.newest("phases"), self.clean_steps
        inside = phases[phases["name"].isin(["forward-backward", "optimizer"])]
        known_s = float(steps.loc[steps["is_hooked"], "hook_s"].median())
        known_s += float(inside.groupby(["rank", "step"])["hook_s"].sum().median())
        bare_s = float(steps.loc[~steps["is_hooked"], "time_s"].median())
        added_s = max(0.0, self.overhead.overhead_frac * bare_s - known_s)
        return added_s / (bare_s + added_s)

    @cached_property
    def hooks(self) -> HookSummary:
        """The newest window's installed and fired hooks."""
        rows = newest_window(self.table.newest("coverage"))
        return HookSummary(
            num_fired=int(rows["fired"].clip(upper=rows["installed"]).sum()),
            num_installed=int(rows["installed"].sum()),
            remarks=(
                *sorted(set(rows.loc[rows["installed"] == 0, "name"])),
                *launch_bound_remark(self.launch_bound_frac),
            ),
        )

    @cached_property
    def launch_bound_frac(self) -> float:
        """Share of the operators' forward and backward time in which the device waited for the
        host, in the newest window; 0 without samples."""
        rows = self.table.newest("samples")
        is_device = (rows["row"] == "operator") & ~rows["kind"].isin(_HOST_KINDS)
        rows = newest_window(rows[is_device & ~rows["is_probe"]])
        rows = rows[rows["phase"] != Phase.STEP.value]
        times_s = rows["time_s"] * rows["count"]
        if rows.empty:
            return 0.0
        return float((times_s * rows["host_bound_frac"]).sum() / times_s.sum())

    @cached_property
    def groups(self) -> tuple[MeasuredGroup, ...]:
        """Groups of ranks and their transfers in the newest window.

        A group that is known only from the model's wrapper has a note instead of transfers.
        """
        rows = self.table.newest("samples")
        rows = newest_window(rows[(rows["row"] == "collective") & ~rows["is_probe"]])
        # Count a transfer once for all of its recorded ranks; a size may be recorded on one rank or
        # in one step only.
        here = rows[["num_ranks", "num_seen"]].min(axis=1)
        kinds = ["role", "num_ranks", "kind"]
        seen = rows.groupby(kinds)["num_seen"].transform("max")
        calls = rows["count"] * here / (rows["num_steps"].max() * seen).clip(lower=1)
        rows = rows.assign(
            calls=calls, nbytes=rows["nbytes"] * calls, time_s=rows["time_s"] * calls
        )
        groups = [
            MeasuredGroup(
                role=str(role),
                num_ranks=int(num_ranks),
                collective=str(kind),
                calls=float(part["calls"].sum()),
                nbytes=float(part["nbytes"].sum()),
                time_s=float(part["time_s"].sum()),
                is_bound=bool(part["is_bound"].any()),
            )
            for (role, num_ranks, kind), part in rows.groupby(kinds, sort=True)
        ]
        if self.loop.num_replicas > 1 and not groups:
            size = format_bytes(self.loop.grad_nbytes)
            note = f"gradients of {size} are averaged in every step; {_UNMEASURED}"
            return (
                MeasuredGroup(role=GroupRole.DP.value, num_ranks=self.loop.num_replicas, note=note),
            )
        return tuple(groups)


def _step_times_s(steps: pd.DataFrame) -> pd.Series:
    """Return the seconds of each step, median over ranks."""
    return steps.groupby("step", sort=True)["time_s"].median()


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
