"""Times of operators from published tables: measured shapes as they are, all others by a fit."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from ..fit.batches import ShapeBatch, Timed, batch_of
from ..fit.machine import MachineModel, fit_machine
from ..fit.priors import device_prior
from ..importers.canonical_tables import CHOSEN, shape_sizes
from ..network.cluster import stated_network, with_domains_as_nodes
from ..network.collective_times import CollectiveModel, fit_transfers
from ..network.curves import Samples
from ..network.groups import Group
from ..network.systems import REACHED_FRAC, NetworkPrior, network_prior
from ..records.cluster import StatedNodes
from ..regressors.robust import first_minimum
from ..timeline.items import Floats
from ..workload.collectives import Collective
from ..workload.operators import Operator, OperatorKind, Phase

_MAX_ROWS = 150
"""Rows of an operator that the fit uses; more make it slow and no better."""
_FP32_ACCUMULATION = "fp32"
"""Marker in the name of groups whose weight gradients are added into an fp32 buffer."""
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
    """Median seconds by group, shape and element size."""

    def has(self, kind: OperatorKind, phase: Phase) -> bool:
        """Return True if any table times the operator."""
        return (kind, phase) in self.names

    def times_s(self, operators: Sequence[Operator]) -> Floats:
        """Return the seconds of operators of kinds that the tables have, shape (operators,)."""
        out = np.empty(len(operators))
        unmeasured: defaultdict[str, list[int]] = defaultdict(list)
        for place, operator in enumerate(operators):
            name = self._nearest(operator)
            time_s = self.measured_s.get((name, operator.shape, operator.element_nbytes))
            if time_s is None:
                unmeasured[name].append(place)
            else:
                out[place] = time_s
        for name, places in unmeasured.items():
            batch = batch_of([operators[place] for place in places])
            out[places] = np.exp(self.machine.predict(name, batch).log_time)
        return out

    def _nearest(self, operator: Operator) -> str:
        """Return the group that was measured at the most similar sizes, if a kind has several, such
        as the two products of attention."""
        names = self.names[operator.kind, operator.phase]
        if len(names) == 1:
            return names[0]
        sizes = np.log(operator.shape)
        apart = [float(np.abs(self.shapes[n] - sizes).sum(axis=1).min()) for n in names]
        return names[first_minimum(apart)]


def operator_tables(
    frames: Sequence[pd.DataFrame], *, device: str, without: tuple[str, ...] = ()
) -> OperatorTables:
    """Fit all canonical tables on the rows of one device.

    Flagged rows are left out, as are those of devices with another data sheet; rows of other
    devices with the same data sheet are used only if the device itself has none. If weight
    gradients were timed with and without accumulation in fp32, those with it are used: Megatron
    adds them into an fp32 buffer. Priors leave out the public tables that ``without`` names.
    """
    filled = [frame[_COLUMNS] for frame in frames if len(frame)]
    rows = _usable(pd.concat(filled or [pd.DataFrame(columns=_COLUMNS)]), device)
    groups: dict[str, Timed] = {}
    names: defaultdict[Key, list[str]] = defaultdict(list)
    measured: dict[tuple[str, Shape, int], float] = {}
    for (kind, phase), phase_rows in rows.groupby(["kind", "phase"], sort=True):
        key = OperatorKind(kind), Phase(phase)
        parts = list(_accumulated(phase_rows, key[1]).groupby("group"))
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
        names={key: tuple(phase_rows) for key, phase_rows in names.items()},
        shapes={name: np.log(timed.batch.sizes) for name, timed in groups.items()},
        measured_s=measured,
    )


def _usable(rows: pd.DataFrame, device: str) -> pd.DataFrame:
    wanted = device_prior(device).name
    is_alike = np.array([device_prior(str(d)).name == wanted for d in rows["device"]], dtype=bool)
    is_same = (rows["device"].astype(str) == device).to_numpy()
    return rows[(is_same if is_same.any() else is_alike) & (rows["flag"] == "").to_numpy()]


def _accumulated(rows: pd.DataFrame, phase: Phase) -> pd.DataFrame:
    """Return the rows accumulated into an fp32 buffer, if a weight gradient has such; else all."""
    if phase is not Phase.WEIGHT_GRADIENT:
        return rows
    is_into_fp32 = rows["group"].str.contains(_FP32_ACCUMULATION)
    return rows[is_into_fp32] if is_into_fp32.any() else rows


_COLUMNS = ["device", "group", "kind", "phase", "shape", "element_nbytes", "time_s", "flag"]


def timed_rows(rows: pd.DataFrame) -> Timed:
    """Convert rows of a canonical table, of one kind and phase, to samples for a fit."""
    batch = ShapeBatch(
        kind=OperatorKind(rows["kind"].iloc[0]),
        phase=Phase(rows["phase"].iloc[0]),
        sizes=shape_sizes(rows["shape"]),
        element_nbytes=rows["element_nbytes"].to_numpy(dtype=np.float64),
    )
    time_s = rows["time_s"].to_numpy(dtype=np.float64)
    return Timed(batch=batch, time_s=time_s, weight=np.ones(len(rows)))


def _medians(name: str, rows: pd.DataFrame) -> dict[tuple[str, Shape, int], float]:
    medians = rows.groupby(["shape", "element_nbytes"])["time_s"].median()
    sizes = shape_sizes(pd.Series([shape for shape, _ in medians.index]))
    return {
        (name, tuple(map(round, size)), int(nbytes)): float(time_s)
        for size, (_, nbytes), time_s in zip(sizes.tolist(), medians.index, medians, strict=True)
    }


def _thinned(timed: Timed) -> Timed:
    """Return evenly spaced rows in the order of sizes, if there are too many."""
    if len(timed) <= _MAX_ROWS:
        return timed
    order = np.lexsort(timed.batch.sizes.T[::-1])
    return timed.take(order[np.linspace(0, len(order) - 1, _MAX_ROWS).astype(np.int64)])


_MAX_TRANSFER_ROWS = 400
"""Payloads of a group that its curve passes through; more are averaged."""


_GIGA = 1e9
_CARDS: tuple[tuple[str, float], ...] = (
    ("slingshot-10", 12.5 * _GIGA),
    ("slingshot-11", 25 * _GIGA),
    ("slingshot", 25 * _GIGA),
    ("xdr", 100 * _GIGA),
    ("ndr", 50 * _GIGA),
    ("hdr", 25 * _GIGA),
    ("edr", 12.5 * _GIGA),
)
"""Bytes/s of one network card by the name of its generation."""


def network_of(place: str, device: str, stated: StatedNodes | None = None) -> NetworkPrior:
    """Return the links of a cluster: the device's usual ones, the network that its name contains,
    and the stated nodes.

    >>> network_of("Alps (4xGH200, Slingshot-11)", "GH200").links.network_bytes_per_s
    22500000000.0
    """
    return with_domains_as_nodes(stated_network(stated or StatedNodes(), _named(place, device)))


def _named(place: str, device: str) -> NetworkPrior:
    usual = network_prior(device)
    words = place.lower()
    rate = next((rate for name, rate in _CARDS if re.search(rf"\b{name}\b", words)), None)
    if rate is None or usual.links is None:
        return usual
    links = replace(usual.links, network_bytes_per_s=REACHED_FRAC * rate)
    return replace(usual, links=links)


def transfer_tables(
    frames: Sequence[pd.DataFrame], *, device: str, network: NetworkPrior | None = None
) -> CollectiveModel:
    """Fit curves through all canonical tables of one device; without rows, use its ``network``.

    Of a table of several fabrics (clusters, or versions of the library), the one with most rows is
    used. Flagged rows are left out.
    """
    prior = network or device_prior(device).network
    wanted = device_prior(device).name
    samples: dict[Group, Samples] = {}
    for frame in frames:
        is_here = [device_prior(str(name)).name == wanted for name in frame["device"]]
        rows = frame[np.array(is_here, dtype=bool) & (frame["flag"] == "").to_numpy()]
        if len(rows):
            rows = rows[rows["fabric"] == rows["fabric"].value_counts().idxmax()]
            samples.update(_samples(rows))
    return fit_transfers(samples, prior)


def groups_of(rows: pd.DataFrame) -> Iterator[tuple[Group, pd.DataFrame]]:
    """Yield the rows of each group of a canonical table; within a node, deduplicated sends to other
    nodes (``CHOSEN``) do not apply."""
    chosen = rows[CHOSEN].fillna(0) if CHOSEN in rows.columns else 0
    rows = rows.assign(**{CHOSEN: np.where(rows["num_nodes"] > 1, chosen, 0)})
    for _, group_rows in rows.groupby(["collective", "num_ranks", "num_nodes", CHOSEN]):
        first = group_rows.iloc[0]
        group = Group(
            collective=Collective(str(first["collective"])),
            num_ranks=int(first["num_ranks"]),
            num_nodes=int(first["num_nodes"]),
            num_chosen=int(first[CHOSEN]),
        )
        if group.collective is not Collective.OTHER:
            yield group, group_rows


def _samples(rows: pd.DataFrame) -> dict[Group, Samples]:
    out = {}
    for group, group_rows in groups_of(rows):
        # A step adds up hundreds of equal transfers: their mean counts, not the fastest.
        ordered = group_rows[["nbytes", "time_s"]].to_numpy(dtype=np.float64)
        ordered = ordered[np.argsort(ordered[:, 0], kind="stable")]
        means = pd.DataFrame(ordered, columns=["nbytes", "time_s"]).groupby("nbytes").mean()
        parts = np.array_split(means.reset_index().to_numpy(), min(len(means), _MAX_TRANSFER_ROWS))
        nbytes, time_s = np.array([part.mean(axis=0) for part in parts]).T
        out[group] = Samples(nbytes=nbytes, time_s=time_s, weight=np.ones(len(parts)))
    return out
