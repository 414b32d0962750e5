"""Times of operators from published tables: what was measured as it is, all else by a fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..fit.batches import ShapeBatch, Timed, batch_of
from ..fit.machine import MachineModel, fit_machine
from ..fit.priors import device_prior
from ..importers.own_format import shape_sizes
from ..regressors.choices import first_of_least
from ..timeline.items import Floats
from ..workload.operators import Operator, OperatorKind, Phase

_MAX_ROWS = 150
"""Rows of an operator that the fit is given; more make it slow and no better."""
_FP32_ACCUMULATION = "fp32"
"""Found in the name of groups whose weight gradients are added into an fp32 buffer."""
Key = tuple[OperatorKind, Phase]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorTables:
    """The operators of one device, by kind and phase."""

    machine: MachineModel
    names: Mapping[Key, tuple[str, ...]]
    """Fitted groups of each kind and phase."""
    shapes: Mapping[str, Floats]
    """Logs of the measured sizes of each group."""
    measured_s: Mapping[tuple[str, Shape, int], float]
    """Median by group, shape and element size."""

    def has(self, kind: OperatorKind, phase: Phase) -> bool:
        """Whether any table times it."""
        return (kind, phase) in self.names

    def times_s(self, operators: Sequence[Operator]) -> Floats:
        """Seconds of operators of kinds that the tables have, shape (operators,)."""
        out = np.empty(len(operators))
        asked: defaultdict[str, list[int]] = defaultdict(list)
        for place, operator in enumerate(operators):
            name = self._nearest(operator)
            found = self.measured_s.get((name, operator.shape, operator.element_nbytes))
            if found is None:
                asked[name].append(place)
            else:
                out[place] = found
        for name, places in asked.items():
            batch = batch_of([operators[place] for place in places])
            out[places] = np.exp(self.machine.predict(name, batch).log_time)
        return out

    def _nearest(self, operator: Operator) -> str:
        """Of several groups of one kind, such as the two products of attention, the one that was
        measured at the most similar sizes."""
        names = self.names[operator.kind, operator.phase]
        if len(names) == 1:
            return names[0]
        sizes = np.log(operator.shape)
        apart = [float(np.abs(self.shapes[n] - sizes).sum(axis=1).min()) for n in names]
        return names[first_of_least(apart)]


def operator_tables(
    frames: Sequence[pd.DataFrame], *, device: str, without: tuple[str, ...] = ()
) -> OperatorTables:
    """The fit of all canonical tables on the rows of one device.

    Flagged rows are left out, and those of devices with another data sheet; of devices with the
    same one only where the device itself has none.  Where weight gradients were timed with and
    without accumulation in fp32, those with are taken: Megatron adds them into an fp32 buffer.
    Priors leave out the public tables that ``without`` names.
    """
    filled = [frame[_COLUMNS] for frame in frames if len(frame)]
    rows = _usable(pd.concat(filled or [pd.DataFrame(columns=_COLUMNS)]), device)
    groups: dict[str, Timed] = {}
    names: defaultdict[Key, list[str]] = defaultdict(list)
    measured: dict[tuple[str, Shape, int], float] = {}
    for (kind, phase), found in rows.groupby(["kind", "phase"], sort=True):
        key = OperatorKind(kind), Phase(phase)
        parts = list(_accumulated(found, key[1]).groupby("group"))
        for group, part in parts:
            name = f"{kind}/{phase}" + (f"/{group}" if len(parts) > 1 else "")
            names[key].append(name)
            groups[name] = timed_rows(part)
            measured.update(_medians(name, part))
    return OperatorTables(
        machine=fit_machine(
            {name: _thinned(timed) for name, timed in groups.items()},
            device=device,
            use_prior=True,
            without=without,
        ),
        names={key: tuple(found) for key, found in names.items()},
        shapes={name: np.log(timed.batch.sizes) for name, timed in groups.items()},
        measured_s=measured,
    )


def _usable(rows: pd.DataFrame, device: str) -> pd.DataFrame:
    wanted = device_prior(device).name
    is_alike = np.array([device_prior(str(d)).name == wanted for d in rows["device"]], dtype=bool)
    is_same = (rows["device"].astype(str) == device).to_numpy()
    return rows[(is_same if is_same.any() else is_alike) & (rows["flag"] == "").to_numpy()]


def _accumulated(rows: pd.DataFrame, phase: Phase) -> pd.DataFrame:
    """The rows that were added into an fp32 buffer, where a weight gradient has such."""
    if phase is not Phase.WEIGHT_GRADIENT:
        return rows
    is_into_fp32 = rows["group"].str.contains(_FP32_ACCUMULATION)
    return rows[is_into_fp32] if is_into_fp32.any() else rows


_COLUMNS = ["device", "group", "kind", "phase", "shape", "element_nbytes", "time_s", "flag"]


def timed_rows(rows: pd.DataFrame) -> Timed:
    """Rows of a canonical table, of one kind and phase, as regressors learn from them."""
    batch = ShapeBatch(
        kind=OperatorKind(rows["kind"].iloc[0]),
        phase=Phase(rows["phase"].iloc[0]),
        sizes=shape_sizes(rows["shape"]),
        element_nbytes=rows["element_nbytes"].to_numpy(dtype=np.float64),
    )
    time_s = rows["time_s"].to_numpy(dtype=np.float64)
    return Timed(batch=batch, time_s=time_s, weight=np.ones(len(rows)))


def _medians(name: str, rows: pd.DataFrame) -> dict[tuple[str, Shape, int], float]:
    found = rows.groupby(["shape", "element_nbytes"])["time_s"].median()
    sizes = shape_sizes(pd.Series([shape for shape, _ in found.index]))
    return {
        (name, tuple(map(round, size)), int(nbytes)): float(time_s)
        for size, (_, nbytes), time_s in zip(sizes.tolist(), found.index, found, strict=True)
    }


def _thinned(timed: Timed) -> Timed:
    """Every k-th row by size, where there are very many."""
    if len(timed) <= _MAX_ROWS:
        return timed
    order = np.lexsort(timed.batch.sizes.T[::-1])
    return timed.take(order[np.linspace(0, len(order) - 1, _MAX_ROWS).astype(np.int64)])
