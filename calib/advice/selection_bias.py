"""The bias of the best of many estimates: a low error helped it to be chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .plan import Candidate

# The mean of 512 draws has 1/22 of their scatter; a fixed seed gives the same plan the same value.
_NUM_DRAWS = 512
_SEED = 0
_NEAR_SIGMAS = 6.0
"""Layouts further behind the best one cannot have been mistaken for it."""


def selection_bias_log(chosen: Candidate, candidates: Sequence[Candidate]) -> float:
    """By how much the log ratio of the fastest of some layouts is too low, on average.

    Errors are drawn anew as the plan states them, those of one name alike for all
    layouts, and the fastest is chosen again: its mean error is the bias (parametric bootstrap;
    Efron and Tibshirani, 1993, chapter 10).  0 for a single layout; the same rows give the same
    value.
    """
    best_log = math.log1p(chosen.time_frac)
    near = [
        c
        for c in candidates
        if math.log1p(c.time_frac) - best_log
        <= _NEAR_SIGMAS * max(c.log_ratio_sigma, chosen.log_ratio_sigma)
    ]
    if len(near) < 2:
        return 0.0
    logs = np.array([math.log1p(c.time_frac) for c in near])
    names = sorted({name for c in near for name in c.error_log})
    shared = np.array([[c.error_log.get(name, 0.0) for name in names] for c in near])
    shared = shared.reshape(len(near), len(names))
    sigmas = np.array([c.log_ratio_sigma for c in near])
    own = np.sqrt(np.maximum(sigmas**2 - (shared**2).sum(axis=1), 0.0))
    random = np.random.default_rng(_SEED)
    errors = own * random.standard_normal((_NUM_DRAWS, len(near)))
    errors += random.standard_normal((_NUM_DRAWS, len(names))) @ shared.T
    winners = (logs + errors).argmin(axis=1)
    return max(0.0, -float(errors[np.arange(_NUM_DRAWS), winners].mean()))
