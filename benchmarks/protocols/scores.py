"""Validation of the models on a table of measurements: held-out samples and their scores.

- Operators: ``random`` scores 20 % of the samples of each operator, ``leave_tp`` each degree of
  tensor parallelism in turn.  A sample is a shape (its k-th repeat if it was measured more than
  once) in all its phases, which always fall on one side.
- Collectives: ``random`` scores 20 % of the payloads of each curve (a collective on a number
  of ranks and nodes); all repeats of one fall on one side.  ``leave_span`` trains on curves of at
  most a quarter of the nodes, of which one crosses nodes; inside a node on all but the most ranks.
- Steps: ``calibrate_K`` trains on K rows of a machine, ``leave_one_out`` on all but one.

Machines never share a fit.  Scored rows are a frame with ``protocol``, ``group``, measured and
predicted times, and the ends of the 90 % interval (``TIMES``), all draws together.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import kendalltau

from forerun.calib.errors import ForerunError
from forerun.calib.memory.peak import memory
from forerun.calib.network.collective_times import CollectiveModel, fit_transfers
from forerun.calib.network.curves import Samples
from forerun.calib.network.groups import Group
from forerun.calib.network.systems import network_prior
from forerun.calib.records.step_rows import StepKind, StepPredictions, StepRow
from forerun.calib.regressors.robust import first_minimum
from forerun.calib.steps._operator_tables import groups_of
from forerun.calib.workload.collectives import Collective

RANDOM, LEAVE_TP, LEAVE_SPAN, LEAVE_ONE_OUT = "random", "leave_tp", "leave_span", "leave_one_out"
PROTOCOLS: Mapping[str, Mapping[str, str]] = {
    "operators": {
        RANDOM: "an operator with 23 samples or more",
        LEAVE_TP: "an operator with samples at two tensor-parallel degrees or more",
    },
    "collectives": {
        RANDOM: "a collective with five payloads or more on one group shape",
        LEAVE_SPAN: "one fabric measured on several numbers of nodes or, on one node, of ranks",
    },
    "steps": {LEAVE_ONE_OUT: "a machine with two rows or more"},
}
"""Requirements of each protocol; ``calibrate_K`` needs a machine with more than K rows."""
ALL_GROUPS = "all"
TIMES = ("measured_s", "predicted_s", "low_s", "high_s")
FIGURES = (
    *("mape_frac", "median_ape_frac", "p90_ape_frac", "bias_frac"),
    *("coverage_90_frac", "interval_width_frac"),
)
RANK_FIGURES = ("kendall_tau", "kendall_tau_without_ties", "regret_median_frac", "regret_p95_frac")
MAX_ROWS = 2000
"""Upper bound, per seed, on an operator's training samples and on its scored samples."""
TEST_FRAC = 0.2
_LEAST_TRAIN, _LEAST_TEST, _LEAST_PAYLOADS = 8, 5, 5
"""A protocol with fewer samples or payloads than these is skipped."""
_NODES_FACTOR = 4
MAX_SUBSETS = 256
"""Number of subsets of rows up to which all of them calibrate."""
MAX_HELD_OUT = 200
"""Upper bound on the rows of a machine that are held out one at a time; drawn if there are more."""
MIN_RANKED = 4
"""Layouts that a group needs for its ranking to be scored."""
TIE_FRAC = 0.02
"""Measured times closer than this count as equal in ``kendall_tau_without_ties``."""
NUM_WORST = 10
Mask = NDArray[np.bool_]
Vector = NDArray[np.float64]
Fit = Callable[..., Any]


def figures(rows: pd.DataFrame) -> dict[str, float]:
    """Return the six figures of scored rows; errors are ``(predicted - measured) / measured``, the
    width is half the interval over the prediction."""
    measured, predicted, low, high = (rows[name].to_numpy(dtype=np.float64) for name in TIMES)
    error = (predicted - measured) / measured
    values = (
        np.mean(np.abs(error)),
        np.median(np.abs(error)),
        np.quantile(np.abs(error), 0.9),
        np.mean(error),
        np.mean((low <= measured) & (measured <= high)),
        np.mean((high - low) / 2 / predicted),
    )
    return dict(zip(FIGURES, map(float, values), strict=True))


def score_rows(rows: pd.DataFrame, table: str) -> list[dict[str, Any]]:
    """Return one JSON row per protocol and group of scored rows, preceded by one with the group
    ``all``.

    ``all`` weighs every group equally: each figure is the mean over the groups, ``n`` their sum.
    """
    records: list[dict[str, Any]] = []
    for protocol, members in rows.groupby("protocol", sort=False):
        parts = {str(group): part for group, part in members.groupby("group", sort=False)}
        each = {group: figures(part) for group, part in parts.items()}
        mean = {name: np.mean([one[name] for one in each.values()]) for name in FIGURES}
        for group, one in {ALL_GROUPS: mean, **each}.items():
            labels = {"table": table, "protocol": protocol, "group": group}
            rounded = {name: round(float(value), 6) for name, value in one.items()}
            records.append({**labels, "n": len(parts.get(group, members)), **rounded})
    return records


def concat_scored(parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate scored rows; empty if there are no parts."""
    frames = list(parts) or [pd.DataFrame(columns=["protocol", "group", *TIMES])]
    return pd.concat(frames, ignore_index=True)


def scored(protocol: str, group: str, measured_s: Vector, *logs: Vector) -> pd.DataFrame:
    """Return scored rows of one group; ``logs`` are of the prediction and both ends of its
    interval."""
    times = dict(zip(TIMES, (measured_s, *map(np.exp, logs)), strict=True))
    return pd.DataFrame({"protocol": protocol, "group": group, **times})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """Masks over samples of one operator, or over rows of one table of transfers."""

    train: Mask
    test: Mask
    is_drawn: bool = True
    """False if every seed gives the same split."""


def noise_floors(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the deviation of repeats of one shape from their median, which no predictor can beat.

    The columns are ``mean_frac`` and ``median_frac`` of ``|t - median of its shape| / median`` over
    the rows of repeated shapes, by group of a canonical operator table; none for a group without
    any.
    """
    frame = frame[frame["flag"] == ""]
    name = frame["group"] + "/" + frame["phase"]
    keys = [name, frame["device"], frame["shape"], frame["element_nbytes"]]
    grouped = frame["time_s"].groupby(keys)
    median, count = grouped.transform("median"), grouped.transform("size")
    spread = ((frame["time_s"] - median).abs() / median)[count > 1]
    by_name = spread.groupby(name, sort=False)
    return pd.DataFrame({"mean_frac": by_name.mean(), "median_frac": by_name.median()})


def samples_of(rows: pd.DataFrame) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sample of one operator that each row belongs to, and the tensor-parallel degree of
    each sample, 0 if unknown."""
    tp = pd.to_numeric(rows["tp"]).fillna(0).astype(np.int64)
    shape = [rows["kind"], rows["shape"], rows["element_nbytes"], tp]
    repeat = rows.groupby(["phase", *shape], sort=False).cumcount()
    sample = rows.groupby([*shape, repeat], sort=False).ngroup().to_numpy()
    degrees = np.zeros(int(sample.max()) + 1, dtype=np.int64)
    degrees[sample] = tp
    return sample, degrees


def sample_splits(
    tp: NDArray[np.int64], protocol: str, rng: np.random.Generator
) -> Iterator[tuple[str, Split]]:
    """Yield the splits of samples of one operator by their degrees, each with the label of its fit;
    none if there are too few samples, or a single degree for ``leave_tp``."""
    planned: dict[str, Mask] = {}
    if protocol == RANDOM:
        place = np.argsort(rng.permutation(len(tp)))
        planned[""] = place < len(tp) - round(TEST_FRAC * len(tp))
    elif len(degrees := np.unique(tp[tp > 0])) > 1:
        planned = {f"tp {degree}": tp != degree for degree in degrees}
    for label, train in planned.items():
        yield from usable(label, Split(train=train, test=~train, is_drawn=protocol == RANDOM), rng)


def usable(label: str, split: Split, rng: np.random.Generator) -> Iterator[tuple[str, Split]]:
    """Yield the split with at most ``MAX_ROWS`` samples on either side, drawn if there are more;
    nothing if there are too few."""
    if split.train.sum() < _LEAST_TRAIN or split.test.sum() < _LEAST_TEST:
        return
    masks = {}
    for side in ("train", "test"):
        rows = np.flatnonzero(getattr(split, side))
        if len(rows) > MAX_ROWS:
            masks[side] = np.zeros(len(split.train), dtype=bool)
            masks[side][rng.choice(rows, MAX_ROWS, replace=False)] = True
    yield label, replace(split, **masks, is_drawn=split.is_drawn or bool(masks))


def generator(device: str, group: str, protocol: str, seed: int) -> np.random.Generator:
    """Return the generator of one operator's draws, which do not depend on the rest of the
    table."""
    return np.random.default_rng([seed, zlib.crc32(f"{device}/{group}/{protocol}".encode())])


def fit_network(samples: Mapping[Group, Samples], device: str) -> CollectiveModel:
    """Fit the transfer model of one machine's curves."""
    return fit_transfers(samples, network_prior(device))


def score_collectives(
    frame: pd.DataFrame,
    protocol: str,
    seeds: Sequence[int],
    *,
    fit: Fit = fit_network,
    draw: Callable[[pd.DataFrame, str, Sequence[int]], Iterator[Split]] | None = None,
    label: Callable[[Group], str] = lambda group: group.collective.value,
) -> pd.DataFrame:
    """Return scored rows of a canonical table of collectives, with ``nbytes``, by group; none if no
    machine (a device on a fabric) is large enough for the protocol."""
    usable = (frame["flag"] == "") & (frame["num_ranks"] > 1) & (frame["time_s"] > 0)
    rows = frame[usable].replace({"collective": {Collective.RECV.value: Collective.SEND.value}})
    parts = []
    for (device, _), machine in rows.groupby(["device", "fabric"], sort=True):
        for split in (draw or transfer_splits)(machine, protocol, seeds):
            model = fit(
                {g: _samples(group_rows) for g, group_rows in groups_of(machine[split.train])},
                device,
            )
            for group, group_rows in groups_of(machine[split.test]):
                test_samples = _samples(group_rows)
                prediction = model.estimate(group, test_samples.nbytes)
                low, high = (prediction.log_time + k * prediction.half_width_log for k in (-1, 1))
                scored_rows = scored(
                    protocol, label(group), test_samples.time_s, prediction.log_time, low, high
                )
                parts.append(scored_rows.assign(nbytes=test_samples.nbytes))
    return concat_scored(parts).sort_values("group", kind="stable", ignore_index=True)


def transfer_splits(machine: pd.DataFrame, protocol: str, seeds: Sequence[int]) -> Iterator[Split]:
    """Yield a protocol's splits of one machine's rows; nothing if it cannot be run."""
    nodes, ranks = machine["num_nodes"].to_numpy(), machine["num_ranks"].to_numpy()
    if protocol == RANDOM:
        for seed in seeds:
            yield from payload_splits(machine, np.random.default_rng(seed), _drawn_payloads)
    elif nodes.max() > 1:
        yield from splits_by_nodes(nodes, lambda number: nodes <= number / _NODES_FACTOR)
    elif (ranks < ranks.max()).any():
        yield Split(train=ranks < ranks.max(), test=ranks == ranks.max())


def payload_splits(
    machine: pd.DataFrame,
    rng: np.random.Generator,
    choose: Callable[[Vector, np.random.Generator], tuple[Vector, Vector]],
) -> Iterator[Split]:
    """Yield the split of each curve's payloads into those that ``choose`` trains on and scores;
    short curves are left out."""
    train, test = np.zeros((2, len(machine)), dtype=np.bool_)
    nbytes = machine["nbytes"].to_numpy()
    curves = machine.groupby(["collective", "num_ranks", "num_nodes"], sort=True)
    for rows in curves.indices.values():
        sizes = np.unique(nbytes[rows])
        if len(sizes) >= _LEAST_PAYLOADS:
            train[rows], test[rows] = (np.isin(nbytes[rows], s) for s in choose(sizes, rng))
    if test.any():
        yield Split(train=train, test=test)


def splits_by_nodes(nodes: Vector, is_known: Callable[[int], Mask]) -> Iterator[Split]:
    """Yield a split for each number of nodes, if the training rows include a transfer between
    nodes."""
    for number in np.unique(nodes).tolist():
        train = is_known(number)
        if (nodes[train] > 1).any():
            yield Split(train=train, test=nodes == number)


def _drawn_payloads(sizes: Vector, rng: np.random.Generator) -> tuple[Vector, Vector]:
    test = rng.choice(sizes, max(1, round(TEST_FRAC * len(sizes))), replace=False)
    return np.setdiff1d(sizes, test), test


def _samples(rows: pd.DataFrame) -> Samples:
    nbytes, time_s = (rows[name].to_numpy(dtype=np.float64) for name in ("nbytes", "time_s"))
    return Samples(nbytes=nbytes, time_s=time_s, weight=np.ones(len(rows)))


@dataclass(frozen=True, slots=True)
class Fold:
    """Positions of rows of a machine: those in ``train`` calibrate, all others are scored."""

    protocol: str
    machine: str
    draw: int
    positions: Sequence[int]
    train: Sequence[int]

    @property
    def test(self) -> tuple[int, ...]:
        """Positions of the rows that are scored."""
        known = frozenset(self.train)
        return tuple(i for i in self.positions if i not in known)


class ScoredSteps(Protocol):
    """A step model calibrated on some rows."""

    def predict(self, rows: Sequence[StepRow]) -> StepPredictions:
        """Return step times with 90 % intervals; the rows' measured figures are removed."""
        ...


def machines(rows: Sequence[StepRow]) -> dict[str, list[int]]:
    """Return the positions of the usable rows of each machine, in the order of the table."""
    positions_by_machine: dict[str, list[int]] = {}
    for position, row in enumerate(rows):
        if not row.flag:
            positions_by_machine.setdefault(row.machine, []).append(position)
    return positions_by_machine


def step_folds(rows: Sequence[StepRow], known: int | None, num_draws: int = 1) -> Iterator[Fold]:
    """Yield folds: ``known`` random rows of each machine calibrate and its others are scored; if it
    is None, each row is held out in turn.

    All subsets are used if they are few, else ``num_draws``, drawn with the machine's name and the
    draw as seed. For ``known=0`` there is one fold per machine.
    """
    for machine, positions in machines(rows).items():
        if known is None:
            for held_out in draw_held_out(machine, positions) if len(positions) > 1 else ():
                train = [i for i in positions if i != held_out]
                yield Fold(LEAVE_ONE_OUT, machine, 0, positions, train)
        elif len(positions) > known:
            for draw, train in enumerate(_subsets(machine, positions, known, num_draws)):
                yield Fold(f"calibrate_{known}", machine, draw, positions, train)


def draw_held_out(machine: str, values: Sequence[Any]) -> list[Any]:
    """Return ``MAX_HELD_OUT`` of the values, drawn if there are more."""
    rng = np.random.default_rng(zlib.crc32(machine.encode()))
    chosen = np.sort(rng.permutation(len(values))[:MAX_HELD_OUT])
    return [values[int(i)] for i in chosen]


def score_folds(
    rows: Sequence[StepRow], folds: Iterable[Fold], fit: Callable[[list[StepRow]], ScoredSteps]
) -> list[pd.DataFrame]:
    """Return the scored rows of each fold. The model never sees a measured figure of a scored row.

    Additional columns to those of all scored rows (``group`` is the row's) are the ``row`` itself,
    ``draw`` and ``machine`` of the fold, ``error_frac`` (predicted over measured, minus one; NaN if
    the model abstains, with its ``reason``), and ``memory_nbytes``, the peak of the fullest rank
    plus the median offset of the calibration rows (NaN if none was measured or can be estimated).
    """
    frames = []
    for one in folds:
        train, test = [rows[i] for i in one.train], [rows[i] for i in one.test]
        blind = [replace(row, measured_s=math.nan, measured_memory_nbytes=None) for row in test]
        predictions = fit(train).predict(blind)
        measured_s = np.array([row.measured_s for row in test], dtype=np.float64)
        offsets = [r.measured_memory_nbytes - _peak(r) for r in train if r.measured_memory_nbytes]
        offset = float(np.nanmedian(offsets)) if offsets else 0.0
        columns = {
            **{name: getattr(one, name) for name in ("protocol", "draw", "machine")},
            "group": [row.group for row in test],
            "row": test,
            **dict(
                zip(
                    TIMES,
                    (measured_s, predictions.time_s, predictions.low_s, predictions.high_s),
                    strict=True,
                )
            ),
            "error_frac": predictions.time_s / measured_s - 1,
            "reason": list(predictions.reasons or ("",) * len(test)),
            "memory_nbytes": [_peak(row) + offset for row in test],
        }
        frames.append(pd.DataFrame(columns))
    return frames


def step_results(rows: pd.DataFrame, table: str) -> list[dict[str, Any]]:
    """Return one JSON row per protocol and group; first ``all``, then each machine, then each
    group.

    Every figure is over the rows of all draws together, each with equal weight. Kendall's tau is
    scipy's tau-b of predicted against measured times within a ranking group and draw that scores
    four rows or more, then the mean over these; ``..._without_ties`` leaves out pairs whose
    measured times are within 2 %. Regret is the measured time of the layout that the model would
    choose over the best measured one, minus 1. Figures without data are None.
    """
    results = []
    for protocol, members in rows.groupby("protocol", sort=False):
        is_synthetic = {row.kind for row in members["row"]} == {StepKind.SYNTHETIC}
        by = ["machine", "group"] if members["machine"].nunique() > 1 else ["group"]
        parts = (part for name in by for part in members.groupby(name, sort=False))
        for name, part in ((ALL_GROUPS, members), *parts):
            head = {"table": table, "protocol": protocol, "group": name}
            last = {"is_synthetic": True} if is_synthetic else {}
            results.append({**head, **_step_figures(part), **last})
    return results


def worst_rows(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows with the largest mean absolute error over draws, with the mean signed error;
    empty for a frame without rows, which may have no columns either."""
    if rows.empty:
        return []
    predicted_rows = rows[np.isfinite(rows["error_frac"])]
    parts = [*predicted_rows.groupby(predicted_rows["row"].map(lambda row: row.row_id), sort=False)]
    parts.sort(key=lambda part: -part[1]["error_frac"].abs().mean())
    return [
        {
            "row_id": row_id,
            "layout": layout_text(part["row"].iloc[-1]),
            "error_frac": round(float(part["error_frac"].mean()), 6),
            "mean_ape_frac": round(float(part["error_frac"].abs().mean()), 6),
        }
        for row_id, part in parts[:NUM_WORST]
    ]


def layout_text(row: StepRow) -> str:
    """Return the layout of a row as text, with one word for each degree other than one.

    Micro-batch size and number of micro-batches are always included: ``tp8 pp4 dp2 mb1x32``.
    """
    par, config = row.config.parallelism, row.config
    degrees = {name: getattr(par, name) for name in ("tp", "pp", "vp", "dp", "cp", "ep")}
    parts = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
    return " ".join([*parts, f"mb{config.batch.micro_batch_size}x{config.num_microbatches}"])


def tau_without_ties(measured: Vector, predicted: Vector) -> float:
    """Return Kendall's (C - D) / (C + D) over the pairs whose measured times differ by more than 2
    %."""
    first, second = np.triu_indices(len(measured), 1)
    apart = measured[first] - measured[second]
    signs = np.sign(apart) * np.sign(predicted[first] - predicted[second])
    least = TIE_FRAC * np.minimum(measured[first], measured[second])
    return _mean(signs[np.abs(apart) > least])


def _subsets(
    machine: str, positions: Sequence[int], num_rows: int, num_draws: int
) -> Iterator[tuple[int, ...]]:
    if math.comb(len(positions), num_rows) <= MAX_SUBSETS:
        yield from itertools.combinations(positions, num_rows)
        return
    for draw in range(num_draws):
        rng = np.random.default_rng([zlib.crc32(machine.encode()), num_rows, draw])
        chosen = rng.choice(len(positions), size=num_rows, replace=False)
        yield tuple(positions[i] for i in sorted(chosen))


def _peak(row: StepRow) -> float:
    """Return the estimated peak memory of a row; NaN if none was measured, or if it cannot be
    estimated."""
    try:
        nbytes = memory(row.config).allocated_nbytes if row.measured_memory_nbytes else math.nan
    except ForerunError:
        return math.nan
    return float(nbytes)


def _step_figures(rows: pd.DataFrame) -> dict[str, Any]:
    is_predicted = np.isfinite(rows["predicted_s"])
    interval_rows = rows[is_predicted & np.isfinite(rows["low_s"])]
    names = (*FIGURES, "p90_draw_mape_frac", *RANK_FIGURES, "memory_mape_frac", "max_ape_frac")
    all_figures: dict[str, Any] = dict.fromkeys(names)
    if len(interval_rows):
        size = rows["error_frac"].abs()[is_predicted]
        of_draws = size.groupby(rows["draw"][is_predicted]).mean()
        all_figures |= figures(interval_rows)
        all_figures["p90_draw_mape_frac"] = np.quantile(of_draws, 0.9)
        all_figures["max_ape_frac"] = interval_rows["error_frac"].abs().max()
    peaks = np.array([row.measured_memory_nbytes or math.nan for row in rows["row"]])
    all_figures["memory_mape_frac"] = _mean(np.abs(rows["memory_nbytes"].to_numpy() / peaks - 1))
    all_figures |= _ranking(rows[is_predicted])
    rounded = {
        name: None if value is None else _number(value) for name, value in all_figures.items()
    }
    return {"n": len(rows), "num_abstained": int((~is_predicted).sum()), **rounded}


def _ranking(rows: pd.DataFrame) -> dict[str, Any]:
    taus, plain, regrets = [], [], []
    for _, part in rows.groupby(["machine", "draw", "group"], sort=False):
        if len(part) >= MIN_RANKED:
            measured, predicted = part["measured_s"].to_numpy(), part["predicted_s"].to_numpy()
            taus.append(float(np.asarray(kendalltau(predicted, measured))[0]))
            plain.append(tau_without_ties(measured, predicted))
            regrets.append(float(measured[first_minimum(predicted)] / measured.min() - 1))
    if not regrets:
        return {}
    values = _mean(taus), _mean(plain), np.median(regrets), np.quantile(regrets, 0.95)
    return dict(zip(RANK_FIGURES, values, strict=True))


def _mean(values: Sequence[float] | Vector) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    finite = [v for v in values if math.isfinite(v)]
    return float(np.mean(finite)) if finite else math.nan


def _number(value: float) -> float | None:
    return round(float(value), 6) if math.isfinite(value) else None
