"""Two runs, or two windows of one, held against each other: what is slower, and where it is lost.

In: two sample tables.  Out: a verdict with an interval, the settings and the terms that differ.
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
