"""Operators as rows of numbers: what efficiency is learned on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..workload.operators import Operator
from .laws import Ceilings, work, work_time_s

LAW_COLUMN = 0
"""Column of the logarithm of the law's time, in which efficiency may only rise."""


def log_sizes(operators: Sequence[Operator]) -> NDArray[np.float64]:
    """Log of each size and of the element's bytes, ``(operators, sizes + 1)``; of one kind."""
    return np.log([[*o.shape, o.element_nbytes] for o in operators])


def log_law_time(operators: Sequence[Operator], ceilings: Ceilings) -> NDArray[np.float64]:
    """Logarithm of the law's seconds, ``(operators,)``."""
    return np.log([work_time_s(work(o), ceilings) for o in operators])


def efficiency_features(
    operators: Sequence[Operator], ceilings: Ceilings
) -> NDArray[np.float64]:
    """Columns: log law time, log FLOP, log bytes, log intensity, then ``log_sizes``."""
    done = [work(o) for o in operators]
    law = np.log([work_time_s(w, ceilings) for w in done])
    flop = np.log([max(w.flop, 1.0) for w in done])
    nbytes = np.log([max(w.nbytes, 1.0) for w in done])
    return np.column_stack([law, flop, nbytes, flop - nbytes, log_sizes(operators)])
