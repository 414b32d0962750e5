"""The step model over published tables, and the layouts that are most worth measuring.

If a table has profiles of whole layers, these replace operators. A profile times one layer as a
stack ran it on tp ranks, including its launches and the all-reduces of tensor parallelism. A
layout's layer is a list of operators; its query-key-value product gets the time of the layer, and
everything else in it takes none.

The layouts to measure are those that inform the step times of all layouts most.

I-optimal design (Atkinson, Donev & Tobias 2007, section 10.6): the mean variance of the predicted
log step times over all layouts is minimised for a number of measurements, by greedy choice, then
exchange of one row at a time (Fedorov 1972) while that helps. Variances are those of the step
model, linearised at its priors, with its residual deviation.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from forerun.calib.errors import ConfigError
from forerun.calib.fit.estimates import Estimates, Source
from forerun.calib.fit.priors import DevicePrior, device_prior
from forerun.calib.importers.canonical_tables import shape_sizes, table_kind
from forerun.calib.records.cluster import StatedNodes
from forerun.calib.records.step_rows import StepPredictions, StepRow, Trait
from forerun.calib.regressors.robust import first_minimum
from forerun.calib.steps._operator_tables import OperatorTables, operator_tables
from forerun.calib.steps._posterior import MODEL_SIGMA_LOG
from forerun.calib.steps._priced_items import SCALE
from forerun.calib.steps.base_times import BaseTimes, Conditions
from forerun.calib.steps.known_steps import MEASURED_SIGMA_LOG, KnownStep, correlations
from forerun.calib.steps.model import ERROR_INFLATION, FittedSteps, fit_steps
from forerun.calib.steps.step_tables import row_times
from forerun.calib.timeline.items import Floats, Item
from forerun.calib.workload.collectives import GroupRole
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

Kind = OperatorKind
_NO_TIME_S = 1e-9
"""Keeps logarithms finite if a profile has no time."""
_TENSOR_FRAC = 0.5
"""Rate of TF32 products over that of two-byte elements on the data sheet."""
_IN_LAYER = frozenset(
    {
        *(Kind.NORM, Kind.RMS_NORM, Kind.POSITION, Kind.ROTARY, Kind.CORE_ATTENTION),
        *(Kind.LINEAR_PROJ, Kind.RESIDUAL, Kind.LINEAR_FC1, Kind.ACTIVATION, Kind.LINEAR_FC2),
    }
)
_PROFILED_KINDS = _IN_LAYER | {Kind.LINEAR_QKV}
_STATED: Mapping[str, float] = {
    "floor": math.log(_NO_TIME_S),
    "compute": 0.0,
    "tp": 0.0,
    "misaligned": 0.0,
    "host_microbatch": math.log(1e-5),
}
"""Log centres of constants whose effect a profile of whole layers already includes."""
_PROFILED: Mapping[str, float] = {"compute": 0.1, "backward": 0.05}
"""Remaining deviations for a layer timed as a whole: its neighbours and its launches."""


class TableSteps:
    """Step models for many calibrations over the same tables, whose fit is cached."""

    name = "ours"

    def __init__(
        self,
        tables: Sequence[pd.DataFrame] = (),
        stated: StatedNodes | None = None,
        *,
        without: tuple[str, ...] = (),
    ) -> None:
        self._stated, self._without = stated, without
        self._operators = tuple(t for t in tables if table_kind(t) == "operators")
        self._collectives = tuple(t for t in tables if table_kind(t) != "operators")
        self._times: dict[Hashable, BaseTimes] = {}

    def fit(self, rows: Sequence[StepRow]) -> CalibratedRows:
        """Calibrate on rows of one machine; without rows, on tables and priors alone."""
        return CalibratedRows(self, tuple(rows))

    def base(self, row: StepRow) -> BaseTimes:
        """Return the base times of the machine that a row ran on."""
        key = times_key(row)
        if key not in self._times:
            self._times[key] = self._row_times(row)
        return self._times[key]

    def _row_times(self, row: StepRow) -> BaseTimes:
        """Return the times of tables; a profile of whole layers takes precedence over operators."""
        profiles = [t for t in self._operators if (t["kind"] == Kind.LAYER.value).any()]
        operators = () if profiles else self._operators
        times = row_times(row, operators, self._collectives, self._stated, without=self._without)
        if not profiles:
            return times
        return layer_times(profiles, device=row.config.device, rest=times)


class CalibratedRows:
    """Rows of one machine, and the step model calibrated on them."""

    def __init__(self, tables: TableSteps, rows: tuple[StepRow, ...]) -> None:
        self._tables, self._rows = tables, rows

    def predict(self, rows: Sequence[StepRow]) -> StepPredictions:
        """Return medians and 90 % intervals of rows of the same machine."""
        return self.steps(rows[0]).predict([row.config for row in rows])

    def steps(self, row: StepRow) -> FittedSteps:
        """Return the step model of the machine of the known rows, which is that of ``row``."""
        return self._fitted if self._rows else fit_steps(self._tables.base(row))

    @cached_property
    def _fitted(self) -> FittedSteps:
        known = [KnownStep.of(row) for row in self._rows]
        return fit_steps(self._tables.base(self._rows[0]), known)


def times_key(row: StepRow) -> Hashable:
    """Return a key: rows with equal keys have equal base times."""
    config = row.config
    has_first_flash = Trait.FIRST_FLASH in row.traits
    stated = (config.is_attention_fused, has_first_flash, config.has_open_widths)
    return config.device, row.machine, *stated


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTimes:
    """Profiles of layers on one device, and ``rest`` for everything else."""

    layers: OperatorTables
    models: Mapping[int, tuple[int, int]]
    """Heads and sequence length of the profiled model of each hidden size."""
    prior: DevicePrior
    rest: BaseTimes
    conditions: Conditions

    def has(self, kind: OperatorKind, phase: Phase) -> bool:
        """Return True if the operator was timed apart from its layer."""
        return self.rest.has(kind, phase)

    def estimates(self, items: Sequence[Item]) -> Estimates:
        """See ``BaseTimes``."""
        estimates = self.rest.estimates(items)
        sources = tuple(
            Source.FITTED if isinstance(item, Operator) and item.kind in _PROFILED_KINDS else source
            for item, source in zip(items, estimates.sources, strict=True)
        )
        return replace(estimates, time_s=self._times_s(items, estimates.time_s), sources=sources)

    def _times_s(self, items: Sequence[Item], out: Floats) -> Floats:
        out = out.copy()
        layers: dict[int, Operator] = {}
        for place, item in enumerate(items):
            if not isinstance(item, Operator):
                if item.role is GroupRole.TP:
                    out[place] = _NO_TIME_S
            elif item.kind is Kind.LINEAR_QKV:
                layers[place] = self._layer(item)
            elif item.kind in _IN_LAYER:
                out[place] = _NO_TIME_S
            elif item.kind is Kind.LOGITS:
                out[place] = self._head_s(item)
        if layers:
            out[list(layers)] = self.layers.times_s(list(layers.values()))
        return out

    def _layer(self, product: Operator) -> Operator:
        """Return the layer that a query-key-value product (tokens, hidden, 3 hidden / tp) belongs
        to."""
        tokens, hidden, width = product.shape
        sizes = sorted(self.models)
        known = sizes[first_minimum([abs(math.log(other / hidden)) for other in sizes])]
        heads, seq = self.models[known]
        heads = max(1, round(heads * hidden / known))
        is_backward = product.phase is Phase.BACKWARD
        return Operator(
            kind=Kind.LAYER,
            phase=Phase.BACKWARD if is_backward else Phase.FORWARD,
            shape=(max(1, tokens // seq), heads, seq, hidden, max(1, round(3 * hidden / width))),
            element_nbytes=product.element_nbytes,
        )

    def _head_s(self, item: Operator) -> float:
        """Return the seconds of the product of a head, as TF32 runs it."""
        number = 2 if item.phase is Phase.BACKWARD else 1
        rate = _TENSOR_FRAC * self.prior.ceilings_for(2).flop_per_s
        return number * 2.0 * math.prod(item.shape) / rate


def layer_times(frames: Sequence[pd.DataFrame], *, device: str, rest: BaseTimes) -> LayerTimes:
    """Build layer times from canonical tables on one device.

    The last of several rows of one shape is used: the first layer of a model is profiled
    separately.
    """
    prior = device_prior(device)
    rows = pd.concat(list(frames), ignore_index=True)
    rows = rows[rows["device"].map(lambda name: device_prior(str(name)).name == prior.name)]
    identity = ["device", "group", "kind", "phase", "shape", "element_nbytes"]
    rows = rows.groupby(identity, sort=False).last().reset_index()
    layers = rows[(rows["kind"] == Kind.LAYER.value) & (rows["flag"] == "")]
    sizes = shape_sizes(layers["shape"]).astype(int).tolist()
    return LayerTimes(
        layers=operator_tables((layers,), device=device),
        models={hidden: (heads, seq) for _, heads, seq, hidden, _ in sizes},
        prior=prior,
        rest=rest,
        conditions=replace(
            rest.conditions, log_centers=_STATED, log_sigmas=_PROFILED, has_tf32=False
        ),
    )


_MAX_EXCHANGES = 50
"""Upper bound on exchange rounds, which normally end after a few."""
_GAIN_FRAC = 1e-6
"""Relative gain below which an exchange is rounding."""
_NOISE_SIGMA_LOG = float(np.hypot(MEASURED_SIGMA_LOG, 0.02))
"""Deviation of a measured step from the constants: its own scatter does not inform them."""


def design(rows: Sequence[StepRow], num_rows: int) -> list[int]:
    """Return positions of the rows to calibrate on, in the order of choice; no measured time is
    read.

    Raises ``ConfigError`` if there are fewer rows than requested.
    """
    if not 0 <= num_rows <= len(rows):
        raise ConfigError(f"--rows {num_rows} is not within the {len(rows)} rows there are")
    if num_rows == 0:
        return []
    study = _study(rows)
    chosen: list[int] = []
    for _ in range(num_rows):
        chosen.append(study.most_informative(chosen))
    return _exchanged(study, chosen)


def expected_sigma_log(rows: Sequence[StepRow], chosen: Sequence[int]) -> float:
    """Return the root mean variance of log step time over all rows once the chosen are measured."""
    return float(np.sqrt(_study(rows).mean_variance(list(chosen))))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Study:
    covariance: Floats
    """Covariance of log step times without measurement noise, shape (rows, rows)."""

    def posterior(self, chosen: list[int]) -> Floats:
        """Return the covariance once the chosen rows are measured."""
        if not chosen:
            return self.covariance
        shared = self.covariance[:, chosen]
        seen = self.covariance[np.ix_(chosen, chosen)] + _NOISE_SIGMA_LOG**2 * np.eye(len(chosen))
        return self.covariance - shared @ np.linalg.solve(seen, shared.T)

    def mean_variance(self, chosen: list[int]) -> float:
        """Return the mean variance of all rows."""
        return float(np.mean(np.diag(self.posterior(chosen))))

    def most_informative(self, chosen: list[int]) -> int:
        """Return the row that reduces the mean variance most; the first of equals."""
        covariance = self.posterior(chosen)
        gain = np.einsum("ri,ri->i", covariance, covariance) / (
            np.diag(covariance) + _NOISE_SIGMA_LOG**2
        )
        gain[chosen] = -1.0
        return first_minimum(-gain)


def _study(rows: Sequence[StepRow]) -> _Study:
    base = row_times(rows[0])
    estimates = fit_steps(base).estimates([row.config for row in rows])
    names = sorted({name for one in estimates for name in one.error_log})
    slopes = np.array([[one.error_log.get(name, 0.0) for name in names] for one in estimates])
    # Effects common to all rows cannot be separated from the machine's own constants.
    is_effect = np.array([not name.startswith(SCALE) for name in names])
    is_shared = is_effect & (slopes != 0.0).all(axis=0)
    identifiable_slopes = slopes[:, ~is_shared] / ERROR_INFLATION
    discrepancy = MODEL_SIGMA_LOG**2 * correlations([row.config for row in rows])
    return _Study(covariance=identifiable_slopes @ identifiable_slopes.T + discrepancy)


def _exchanged(study: _Study, chosen: list[int]) -> list[int]:
    """Exchange one row at a time for a better one until none is."""
    best = study.mean_variance(chosen)
    for _ in range(_MAX_EXCHANGES):
        before = best
        for place in range(len(chosen)):
            others = chosen[:place] + chosen[place + 1 :]
            trial = [*chosen[:place], study.most_informative(others), *chosen[place + 1 :]]
            variance = study.mean_variance(trial)
            if variance < best * (1 - _GAIN_FRAC):
                chosen, best = trial, variance
        if best == before:
            break
    return chosen
