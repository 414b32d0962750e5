"""A machine whose times are known in closed form, for models to recover."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from forerun.calib.fit.batches import ShapeBatch, Timed
from forerun.calib.workload.operators import OperatorKind, Phase

A100 = "NVIDIA A100-SXM4-80GB"
H100 = "NVIDIA H100 80GB HBM3"
_MULTIPLE = 64
_PASSES = {Phase.FORWARD: 3, Phase.BACKWARD: 6}


def batch(
    kind: OperatorKind,
    phase: Phase,
    shapes: Iterable[Sequence[float]],
    *,
    element_nbytes: int = 2,
) -> ShapeBatch:
    """Return a batch of the given shapes."""
    sizes = np.array(list(shapes), dtype=np.float64)
    return ShapeBatch(
        kind=kind,
        phase=phase,
        sizes=sizes,
        element_nbytes=np.full(len(sizes), float(element_nbytes)),
    )


def timed(of: ShapeBatch, time_s: NDArray[np.float64], *, weight: float = 1.0) -> Timed:
    """Return a batch with its times, all of one weight."""
    return Timed(batch=of, time_s=time_s, weight=np.full(len(of), weight))


def stacked(first: Timed, second: Timed) -> Timed:
    """Return the rows of both."""
    sizes = np.concatenate([first.batch.sizes, second.batch.sizes])
    nbytes = np.concatenate([first.batch.element_nbytes, second.batch.element_nbytes])
    return Timed(
        batch=replace(first.batch, sizes=sizes, element_nbytes=nbytes),
        time_s=np.concatenate([first.time_s, second.time_s]),
        weight=np.concatenate([first.weight, second.weight]),
    )


def random_shapes(
    rng: np.random.Generator, number: int, num_sizes: int, *, lowest: int = 256, highest: int = 8192
) -> NDArray[np.float64]:
    """Return distinct shapes, log-uniform in each size, in multiples of 64."""
    result: dict[tuple[float, ...], None] = {}
    while len(result) < number:
        draw = np.exp(rng.uniform(np.log(lowest), np.log(highest), num_sizes))
        result[tuple((_MULTIPLE * np.rint(draw / _MULTIPLE)).tolist())] = None
    return np.array(list(result))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedMachine:
    """Products take FLOP over a rate, other operators bytes over a rate, and each a constant."""

    flop_per_s: float = 200e12
    bytes_per_s: float = 1.4e12
    floor_s: float = 1e-5
    efficiency: dict[OperatorKind, float] = field(default_factory=dict)

    def time_s(self, of: ShapeBatch) -> NDArray[np.float64]:
        """Return seconds of each row, ``(rows,)``."""
        if of.kind.is_linear:
            rows, size_in, size_out = of.sizes.T
            number = 2.0 if of.phase is Phase.BACKWARD else 1.0
            work_s = number * 2 * rows * size_in * size_out / self.flop_per_s
            moved = rows * size_in + size_in * size_out + rows * size_out
            work_s = work_s + number * of.element_nbytes * moved / self.bytes_per_s
        else:
            elements = of.sizes.prod(axis=1)
            work_s = of.element_nbytes * _PASSES[of.phase] * elements / self.bytes_per_s
        return self.floor_s + work_s / self.efficiency.get(of.kind, 1.0)

    def measure(
        self, of: ShapeBatch, rng: np.random.Generator | None = None, *, noise: float = 0.0
    ) -> Timed:
        """Return the times of a batch, each multiplied by a random factor."""
        factor = np.exp(noise * rng.normal(size=len(of))) if rng is not None else 1.0
        return timed(of, self.time_s(of) * factor)
