"""Comparison of two runs, or of two windows of one: which is slower, and in which terms.

In: two sample tables.  Out: a verdict with an interval, and the settings and terms that differ.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .levels import (
        Change,
        Difference,
        Floats,
        Side,
        TermChange,
        Verdict,
        compare_levels,
        estimate_repeat_sigma_log,
        log_level,
    )
    from .norms import Normal, bus_rates, modelled_nearest, near_rows, normal
    from .terms import ALL_ELSE, step_windows
    from .two_runs import difference

__getattr__ = lazy_getattr(__name__)
