"""Autocorrelated noise."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def related_noise(
    draw: np.random.Generator, count: int, *, sigma: float, related: float
) -> NDArray[np.float64]:
    """Return a stationary AR(1) process with deviation ``sigma``; ``related`` is its lag-1
    correlation."""
    shocks = draw.normal(0.0, sigma * math.sqrt(1 - related**2), count)
    values = np.empty(count)
    values[0] = draw.normal(0.0, sigma)
    for place in range(1, count):
        values[place] = related * values[place - 1] + shocks[place]
    return values
