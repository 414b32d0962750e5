"""What the passes and messages of a pipeline take, for many layouts side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .graph import Duration

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCosts:
    """Seconds per micro-batch, none negative; the second axis is that of the alternatives.

    Passes have a row per chunk (chunk c runs on stage c % pp), messages one per boundary between
    chunk b and chunk b + 1.  Without interleaving a chunk is a stage.
    """

    forward_s: Floats
    backward_s: Floats
    """Whole backward passes, weight gradients included."""
    weight_gradient_s: Floats
    """The part of ``backward_s`` that may come later; read by zero-bubble schedules only."""
    activation_s: Floats
    gradient_s: Floats
    both_s: Floats
    """An activation down and a gradient up in one exchange."""
    start_s: Floats
    """When a stage may begin, shape (stages, alternatives)."""

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return int(self.start_s.shape[0])

    @property
    def num_chunks(self) -> int:
        """Pieces of the model."""
        return int(self.forward_s.shape[0])

    @property
    def num_columns(self) -> int:
        """Alternatives side by side."""
        return int(self.forward_s.shape[1])


def pipeline_costs(
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    *,
    weight_gradient_s: ArrayLike = 0.0,
    activation_s: ArrayLike = 0.0,
    gradient_s: ArrayLike = 0.0,
    both_s: ArrayLike | None = None,
    start_s: ArrayLike = 0.0,
    num_virtual_stages: int = 1,
) -> PipelineCosts:
    """Costs from per-chunk values; a single column where alternatives are not given.

    Messages and starts may be scalars; ``both_s`` is the longer of the two directions where left
    out.
    """
    forward = _columns(forward_s)
    shape = forward.shape
    edges = (max(shape[0] - 1, 0), shape[1])
    activation = _shaped(activation_s, edges)
    gradient = _shaped(gradient_s, edges)
    both = np.maximum(activation, gradient) if both_s is None else _shaped(both_s, edges)
    return PipelineCosts(
        forward_s=forward,
        backward_s=_shaped(backward_s, shape),
        weight_gradient_s=_shaped(weight_gradient_s, shape),
        activation_s=activation,
        gradient_s=gradient,
        both_s=both,
        start_s=_shaped(start_s, (shape[0] // num_virtual_stages, shape[1])),
    )


def joined(many: Sequence[PipelineCosts]) -> PipelineCosts:
    """Alternatives of equal numbers of stages side by side, for one simulation of all."""
    names = PipelineCosts.__dataclass_fields__
    return PipelineCosts(
        **{name: np.concatenate([getattr(costs, name) for costs in many], axis=1) for name in names}
    )


def cost_tables(costs: PipelineCosts, *, splits_backward: bool) -> dict[Duration, Floats]:
    """The rows of each cost that an event may have."""
    backward = costs.backward_s
    return {
        Duration.FORWARD: costs.forward_s,
        Duration.BACKWARD: backward - costs.weight_gradient_s if splits_backward else backward,
        Duration.WEIGHT_GRADIENT: costs.weight_gradient_s,
        Duration.ACTIVATION: costs.activation_s,
        Duration.GRADIENT: costs.gradient_s,
        Duration.BOTH: costs.both_s,
    }


def least_makespans(
    forward_s: Floats,
    backward_s: Floats,
    num_microbatches: int | NDArray[np.int64],
    *,
    num_stages: int,
    drains: bool = True,
    message_s: Floats | float = 0.0,
) -> Floats:
    """Seconds below which no schedule ends, shape (alternatives,), in closed form.

    A stage begins when a micro-batch has passed those before it, does all its passes one after
    another, and the last gradient passes those before it once more.  Passes have shape (chunks,
    alternatives), messages of one direction (chunks - 1, alternatives); a schedule that splits the
    backward phase need not drain.

    >>> ones = np.ones((4, 1))
    >>> least_makespans(ones, 2 * ones, 8, num_stages=4).tolist()
    [33.0]
    """
    chunks = np.stack([forward_s, backward_s]).reshape(2, -1, num_stages, forward_s.shape[-1])
    busy = num_microbatches * chunks.sum(axis=(0, 1))
    way = chunks[0, 0, :-1] + drains * chunks[1, 0, :-1]
    hops = np.broadcast_to(message_s, (len(forward_s) - 1, forward_s.shape[-1]))
    before = np.cumsum(way + (1 + drains) * hops[: num_stages - 1], axis=0)
    busy[1:] += before
    return busy.max(axis=0)


def _columns(values: ArrayLike) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    return array[:, np.newaxis] if array.ndim == 1 else array


def _shaped(values: ArrayLike, shape: tuple[int, ...]) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 1:
        array = array[:, np.newaxis]
    return np.broadcast_to(array, shape)
