"""Operators as rows of numbers: what efficiency is learned on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..workload.operators import Operator
from .ceilings import FittedLaw, Key, costs

LAW_COLUMN = 0
"""Column of the logarithm of the law's time, in which efficiency may only rise."""


def log_sizes(operators: Sequence[Operator]) -> NDArray[np.float64]:
    """Log of each size and of the element's bytes, ``(operators, sizes + 1)``; of one kind."""
    return np.log([[*o.shape, o.element_nbytes] for o in operators])


def efficiency_features(
    law: FittedLaw, key: Key, operators: Sequence[Operator]
) -> NDArray[np.float64]:
    """Columns: log law time, log FLOP, log bytes, log intensity, then ``log_sizes``."""
    _, flop, nbytes = np.log(np.maximum(costs(operators), 1.0)).T
    return np.column_stack(
        [law.log_time(key, operators), flop, nbytes, flop - nbytes, log_sizes(operators)]
    )
