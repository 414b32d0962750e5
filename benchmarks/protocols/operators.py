"""Protocols for operator models: fit on one side of a split of a table, score on the other.

- ``random``, ``leave_tp``: those of ``forerun validate``.
- ``small_to_large``: the smaller half of an operator's samples is known, its largest fifth scored.
- ``few_8``, ``few_24``: so many random samples of each operator are known.
- ``leave_gpu`` (products and attention): another device is known, in turn; the rates of the new one
  come from its data sheet and 32 samples of each group, one constant from 8 of these.
- ``leave_device``, ``leave_device_0``, ``leave_device_200``: the device nearest in years is known,
  and so many samples of the new one.
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
from forerun.calib.fit import Timed, device_prior, fit_machine, generation
from forerun.calib.fit import transfer as transfer_machine
from forerun.calib.validation import MAX_ROWS, PROTOCOLS, Split, joined, scored
from forerun.calib.workload import OperatorKind

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
"""What a table has to hold for each."""
TRANSFERRED = frozenset(
    {
        OperatorKind.BATCHED_PRODUCT,
        OperatorKind.GROUPED_LINEAR,
        OperatorKind.FLASH_ATTENTION,
        OperatorKind.CORE_ATTENTION,
    }
)
"""What ``leave_gpu`` scores beside the linears."""
DEVICE_PROBES = {"leave_device": 32, "leave_device_0": 0, "leave_device_200": 200}
"""Samples of each operator that are known of the new device, none of which is scored; everything is
known of the device that is nearest to it in years."""
_FEWEST_SCORED = 5
NUM_CALIBRATION = 8
"""Samples of the new device that give each group its one constant under ``leave_gpu``."""
NUM_PROBES = 32
"""Samples of an operator on the new device that give its rates, those of the constant among them;
none of them is scored."""


Fit = Callable[..., Any]
"""From rows by group (``<operator>/<phase>``) and the ``device`` they were measured on to a model:
``predict(name, batch)`` of it gives ``log_time`` and the ends ``low`` and ``high`` of the 90 %
interval, natural logs of seconds, ``(rows,)`` each."""
Transfer = Callable[..., Any]
"""From a model to the same on another ``device``; ``probes`` are a few rows measured there, by the
name of the group of the model that answers for them."""


def validate_operators(
    frame: pd.DataFrame,
    *,
    seeds: Sequence[int] = range(5),
    protocols: Sequence[str] = tuple(OPERATOR_PROTOCOLS),
    fit: Fit = fit_machine,
    transfer: Transfer = transfer_machine,
) -> pd.DataFrame:
    """Scored rows of every protocol that the canonical table ``frame`` can carry.

    A group is an operator in one phase; devices and seeds are pooled.  All operators of a device
    are fitted together.  A split that no seed changes is run once.  At most ``MAX_ROWS`` shapes of
    an operator train, and as many are scored, for each seed.  The package's own models are fitted
    without a prior: every figure is from the table alone.
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
    return joined(parts)


def scored_cells(
    members: Sequence[OperatorSamples],
    protocol: str,
    seeds: Sequence[int],
    fit: Fit,
    *,
    draw: Callable[[OperatorSamples, str, int], Iterable[tuple[str, Split]]] = splits,
) -> Iterator[pd.DataFrame]:
    """The scored rows of each cell of one device, with their places in the cell as index.

    One fit for each seed and label of a split.
    """
    for position, seed in enumerate(seeds):
        fits: dict[str, list[tuple[OperatorSamples, Split]]] = {}
        for samples in members:
            for label, split in draw(samples, protocol, seed):
                fits.setdefault(label, []).append((samples, split))
        for planned in fits.values():
            asked = [(s, split) for s, split in planned if split.is_drawn or position == 0]
            if not asked:
                continue
            train = _groups((s, split.train) for s, split in planned)
            model = fit(train, device=members[0].device)
            for samples, split in asked:
                for cell in samples.cells:
                    if split.test[cell.sample].any() and split.train[cell.sample].any():
                        yield _scored(protocol, cell, split.test, cell.name, model)


def _leave_gpu(
    devices: Mapping[str, Sequence[OperatorSamples]],
    seeds: Sequence[int],
    fit: Fit,
    transfer: Transfer,
) -> Iterator[pd.DataFrame]:
    """Each device from each other one: ceilings known, one constant a group calibrated."""
    known = {
        device: kept
        for device, members in devices.items()
        if (kept := [s for s in members if s.kind.is_linear or s.kind in TRANSFERRED])
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
    """Each device from the one nearest in years, with some probes; without any the seed only draws
    what is scored."""
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
"""A cell of the new device, and the group of the other one that it is predicted with."""


def _rounds(
    members: Sequence[OperatorSamples], sources: Sequence[OperatorSamples]
) -> list[list[Named]]:
    """Cells with their counterparts, such that no two of a round have the same one: each is probed
    as an operator of its own."""
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
    """The other device of the nearest generation, of these the one with the most samples."""
    own = generation(device_prior(device).name)
    others = [
        (own.years_to(generation(device_prior(other).name)), -sum(map(len, members)), other)
        for other, members in devices.items()
        if other != device
    ]
    return min(others)[2]


def _probes(
    members: Sequence[OperatorSamples], sources: Sequence[OperatorSamples], seed: int
) -> dict[str, Timed]:
    """Rows of the new device that give its rates, none of which is scored."""
    found = {}
    for samples in members:
        drawn = _drawn(samples, "leave_gpu", seed, NUM_PROBES)
        for cell in samples.cells:
            name, rows = _counterpart(cell, sources), cell.where(drawn)
            if name is not None and len(rows):
                found.setdefault(name, rows)
    return found


def _transferred(
    samples: OperatorSamples, sources: Sequence[OperatorSamples], moved: Any, seed: int
) -> Iterator[pd.DataFrame]:
    calibration = _drawn(samples, "leave_gpu", seed, NUM_CALIBRATION)
    probes = _drawn(samples, "leave_gpu", seed, NUM_PROBES)
    test = _drawn(samples, "leave_gpu", seed, MAX_ROWS + NUM_PROBES) & ~probes
    for cell in samples.cells:
        own, name = cell.where(calibration), _counterpart(cell, sources)
        if name is None or not len(own) or not test[cell.sample].any():
            continue
        offset = float(np.median(np.log(own.time_s) - moved.predict(name, own.batch).log_time))
        yield _scored("leave_gpu", cell, test, name, moved, offset=offset)


def _counterpart(cell: Cell, sources: Sequence[OperatorSamples]) -> str | None:
    """The group of the other device to predict with: the same name, else the same kind and phase
    with the most rows."""
    found = [
        other
        for samples in sources
        for other in samples.cells
        if other.timed.batch.kind is cell.timed.batch.kind and other.phase is cell.phase
    ]
    found.sort(key=lambda other: (other.name != cell.name, -len(other.timed), other.name))
    return found[0].name if found else None


def _groups(
    chosen: Iterable[tuple[OperatorSamples, NDArray[np.bool_]]],
) -> dict[str, Timed]:
    """Training rows by group; groups without any are left out."""
    groups = {cell.name: cell.where(mask) for samples, mask in chosen for cell in samples.cells}
    return {name: timed for name, timed in groups.items() if len(timed)}


def _drawn(samples: OperatorSamples, purpose: str, seed: int, count: int) -> NDArray[np.bool_]:
    """A mask of ``count`` random samples, of all where there are fewer."""
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
    """The rows of the samples ``test``, predicted as those of the model's group ``name``."""
    timed = cell.where(test)
    predicted = model.predict(name, timed.batch)
    logs = (one + offset for one in (predicted.log_time, predicted.low, predicted.high))
    rows = scored(protocol, cell.name, timed.time_s, *logs)
    return rows.set_axis(np.flatnonzero(test[cell.sample]))
