"""Protocols for operator models: fit on one side of a split of a table, score on the other.

- ``small_to_large``: the smaller half of an operator's samples is known, its largest fifth scored.
- ``few_8``, ``few_24``: that many random samples of each operator are known.
- ``leave_gpu`` (products and attention): another device is known, in turn; the rates of the new one
  come from its data sheet and 32 samples of each group, one constant from 8 of these.
- ``leave_device``, ``leave_device_0``, ``leave_device_200``: the device nearest in years is known,
  and 32, 0 or 200 samples of the new one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from forerun.benchmarks.protocols.operator_samples import (
    Cell,
    OperatorSamples,
    generator,
    operator_samples,
    splits,
)
from forerun.benchmarks.protocols.scores import MAX_ROWS, PROTOCOLS, Split, concat_scored, scored
from forerun.calib.fit._device_transfer import transfer_to_device as transfer_machine
from forerun.calib.fit.batches import Timed
from forerun.calib.fit.machine import fit_machine
from forerun.calib.fit.priors import device_prior
from forerun.calib.fit.rate_priors import generation
from forerun.calib.workload.operators import OperatorKind

OPERATOR_PROTOCOLS = {
    "random": PROTOCOLS["operators"]["random"],
    "small_to_large": "an operator with 23 samples or more",
    "few_8": "an operator with 13 samples or more",
    "few_24": "an operator with 29 samples or more",
    "leave_tp": PROTOCOLS["operators"]["leave_tp"],
    "leave_gpu": "products or attention measured on two devices or more",
    "leave_device": "an operator measured on two devices or more",
    "leave_device_0": "an operator measured on two devices or more",
    "leave_device_200": "an operator measured on two devices or more",
}
"""Requirements of each protocol on the table."""
TRANSFERRED = frozenset(
    {
        OperatorKind.BATCHED_PRODUCT,
        OperatorKind.GROUPED_LINEAR,
        OperatorKind.FLASH_ATTENTION,
        OperatorKind.CORE_ATTENTION,
    }
)
"""Kinds that ``leave_gpu`` scores besides the linears."""
DEVICE_PROBES = {"leave_device": 32, "leave_device_0": 0, "leave_device_200": 200}
"""Known samples of each operator on the new device, none of which is scored; everything is known of
the device nearest to it in years."""
_FEWEST_SCORED = 5
NUM_CALIBRATION = 8
"""Samples on the new device that calibrate each group's one constant under ``leave_gpu``."""
NUM_PROBES = 32
"""Samples of an operator on the new device that give its rates, including those of the constant;
none is scored."""


Fit = Callable[..., Any]
"""Fits a model to rows by group (``<operator>/<phase>``) and the ``device`` they were measured on.
Its ``predict(name, batch)`` gives ``log_time`` and the ends ``low`` and ``high`` of the 90 %
interval, natural logs of seconds, ``(rows,)`` each."""
Transfer = Callable[..., Any]
"""Transfers a model to another ``device``; ``probes`` are a few rows measured there, by the name of
the model's group that predicts them."""


def validate_operators(
    frame: pd.DataFrame,
    *,
    seeds: Sequence[int] = range(5),
    protocols: Sequence[str] = tuple(OPERATOR_PROTOCOLS),
    fit: Fit = fit_machine,
    transfer: Transfer = transfer_machine,
) -> pd.DataFrame:
    """Return scored rows of every protocol that the canonical table ``frame`` supports.

    A group is an operator in one phase; devices and seeds are pooled.  All operators of a device
    are fitted together.  A split that does not depend on the seed is run once.  At most
    ``MAX_ROWS`` shapes of an operator train, and as many are scored, for each seed.  The package's
    own models are fitted without a prior: every figure is from the table alone.
    """
    devices: dict[str, list[OperatorSamples]] = {}
    for samples in operator_samples(frame):
        devices.setdefault(samples.device, []).append(samples)
    parts: list[pd.DataFrame] = []
    for protocol in protocols:
        if protocol == "leave_gpu":
            parts += _leave_gpu(devices, seeds, fit, transfer)
            continue
        if protocol in DEVICE_PROBES:
            number = DEVICE_PROBES[protocol]
            parts += _leave_device(devices, protocol, number, seeds, fit, transfer)
            continue
        for members in devices.values():
            parts += scored_cells(members, protocol, seeds, fit)
    return concat_scored(parts)


def scored_cells(
    members: Sequence[OperatorSamples],
    protocol: str,
    seeds: Sequence[int],
    fit: Fit,
    *,
    draw: Callable[[OperatorSamples, str, int], Iterable[tuple[str, Split]]] = splits,
) -> Iterator[pd.DataFrame]:
    """Return the scored rows of each cell of one device, with their index in the cell.

    One fit is made for each seed and label of a split.
    """
    for position, seed in enumerate(seeds):
        fits: dict[str, list[tuple[OperatorSamples, Split]]] = {}
        for samples in members:
            for label, split in draw(samples, protocol, seed):
                fits.setdefault(label, []).append((samples, split))
        for planned in fits.values():
            scored_splits = [(s, split) for s, split in planned if split.is_drawn or position == 0]
            if not scored_splits:
                continue
            train = _groups((s, split.train) for s, split in planned)
            model = fit(train, device=members[0].device)
            for samples, split in scored_splits:
                for cell in samples.cells:
                    if split.test[cell.sample].any() and split.train[cell.sample].any():
                        yield _scored(protocol, cell, split.test, cell.name, model)


def _leave_gpu(
    devices: Mapping[str, Sequence[OperatorSamples]],
    seeds: Sequence[int],
    fit: Fit,
    transfer: Transfer,
) -> Iterator[pd.DataFrame]:
    """Predict each device from each other one: known ceilings, one fitted constant per group."""
    known = {
        device: usable
        for device, members in devices.items()
        if (usable := [s for s in members if s.kind.is_linear or s.kind in TRANSFERRED])
    }
    for seed in seeds if len(known) > 1 else ():
        models = {
            device: fit(
                _groups((s, _drawn(s, "leave_gpu", seed, MAX_ROWS)) for s in members),
                device=device,
            )
            for device, members in known.items()
        }
        for device, members in known.items():
            for source in known:
                if source == device:
                    continue
                probes = _probes(members, known[source], seed)
                moved = transfer(models[source], device=device, probes=probes)
                for samples in members:
                    yield from _transferred(samples, known[source], moved, seed)


def _leave_device(
    devices: Mapping[str, Sequence[OperatorSamples]],
    protocol: str,
    number: int,
    seeds: Sequence[int],
    fit: Fit,
    transfer: Transfer,
) -> Iterator[pd.DataFrame]:
    """Predict each device from the one nearest in years, with some probes; without probes the seed
    only draws the scored samples."""
    for position, seed in enumerate(seeds if len(devices) > 1 else ()):
        if position and not number:
            return
        models: dict[str, Any] = {}
        for device, members in devices.items():
            source = _nearest(device, devices)
            if source not in models:
                rows = ((s, _drawn(s, protocol, seed, MAX_ROWS)) for s in devices[source])
                models[source] = fit(_groups(rows), device=source)
            for cells in _rounds(members, devices[source]):
                yield from _by_probes(
                    cells, protocol, number, seed, partial(transfer, models[source], device=device)
                )


Named = tuple[OperatorSamples, Cell, str]
"""A cell of the new device, and the group of the other device that predicts it."""


def _rounds(
    members: Sequence[OperatorSamples], sources: Sequence[OperatorSamples]
) -> list[list[Named]]:
    """Return cells with their counterparts, in rounds in which no two share a counterpart: each is
    probed as a separate operator."""
    rounds: list[list[Named]] = []
    used: Counter[str] = Counter()
    for samples in members:
        for cell in samples.cells:
            name = _counterpart(cell, sources)
            if name is not None:
                if used[name] == len(rounds):
                    rounds.append([])
                rounds[used[name]].append((samples, cell, name))
                used[name] += 1
    return rounds


def _by_probes(
    cells: Sequence[Named],
    protocol: str,
    number: int,
    seed: int,
    transfer: Callable[..., Any],
) -> Iterator[pd.DataFrame]:
    probes = {
        name: rows
        for samples, cell, name in cells
        if number
        if len(rows := cell.where(_drawn(samples, protocol, seed, number)))
    }
    moved = transfer(probes=probes)
    for samples, cell, name in cells:
        test = _drawn(samples, protocol, seed, MAX_ROWS + number)
        test &= ~_drawn(samples, protocol, seed, number)
        is_known = not number or name in probes
        if is_known and test[cell.sample].sum() >= _FEWEST_SCORED:
            yield _scored(protocol, cell, test, name, moved)


def _nearest(device: str, devices: Mapping[str, Sequence[OperatorSamples]]) -> str:
    """Return the other device of the nearest generation; on a tie, that with the most samples."""
    target = generation(device_prior(device).name)
    others = [
        (target.years_to(generation(device_prior(other).name)), -sum(map(len, members)), other)
        for other, members in devices.items()
        if other != device
    ]
    return min(others)[2]


def _probes(
    members: Sequence[OperatorSamples], sources: Sequence[OperatorSamples], seed: int
) -> dict[str, Timed]:
    """Return rows of the new device that give its rates, none of which is scored."""
    probes = {}
    for samples in members:
        drawn = _drawn(samples, "leave_gpu", seed, NUM_PROBES)
        for cell in samples.cells:
            name, rows = _counterpart(cell, sources), cell.where(drawn)
            if name is not None and len(rows):
                probes.setdefault(name, rows)
    return probes


def _transferred(
    samples: OperatorSamples, sources: Sequence[OperatorSamples], moved: Any, seed: int
) -> Iterator[pd.DataFrame]:
    calibration = _drawn(samples, "leave_gpu", seed, NUM_CALIBRATION)
    probes = _drawn(samples, "leave_gpu", seed, NUM_PROBES)
    test = _drawn(samples, "leave_gpu", seed, MAX_ROWS + NUM_PROBES) & ~probes
    for cell in samples.cells:
        calibrated, name = cell.where(calibration), _counterpart(cell, sources)
        if name is None or not len(calibrated) or not test[cell.sample].any():
            continue
        offset = float(
            np.median(np.log(calibrated.time_s) - moved.predict(name, calibrated.batch).log_time)
        )
        yield _scored("leave_gpu", cell, test, name, moved, offset=offset)


def _counterpart(cell: Cell, sources: Sequence[OperatorSamples]) -> str | None:
    """Return the other device's group to predict with: the same name, else the same kind and phase
    with the most rows."""
    candidates = [
        other
        for samples in sources
        for other in samples.cells
        if other.timed.batch.kind is cell.timed.batch.kind and other.phase is cell.phase
    ]
    candidates.sort(key=lambda other: (other.name != cell.name, -len(other.timed), other.name))
    return candidates[0].name if candidates else None


def _groups(
    chosen: Iterable[tuple[OperatorSamples, NDArray[np.bool_]]],
) -> dict[str, Timed]:
    """Return training rows by group, without empty groups."""
    groups = {cell.name: cell.where(mask) for samples, mask in chosen for cell in samples.cells}
    return {name: timed for name, timed in groups.items() if len(timed)}


def _drawn(samples: OperatorSamples, purpose: str, seed: int, count: int) -> NDArray[np.bool_]:
    """Return a mask of ``count`` random samples, or of all if there are fewer."""
    mask = np.zeros(len(samples), dtype=bool)
    order = generator(samples, purpose, seed).permutation(len(samples))
    mask[order[:count]] = True
    return mask


def _scored(
    protocol: str,
    cell: Cell,
    test: NDArray[np.bool_],
    name: str,
    model: Any,
    *,
    offset: float = 0.0,
) -> pd.DataFrame:
    """Return the rows of the samples ``test``, predicted as those of the model's group ``name``."""
    timed = cell.where(test)
    predicted = model.predict(name, timed.batch)
    logs = (one + offset for one in (predicted.log_time, predicted.low, predicted.high))
    rows = scored(protocol, cell.name, timed.time_s, *logs)
    return rows.set_axis(np.flatnonzero(test[cell.sample]))
