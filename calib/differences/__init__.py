"""Two runs, or two windows of one, held against each other: what is slower, and where it is lost.

In: two sample tables.  Out: a verdict with an interval, the settings and the terms that differ.
"""

from typing import TYPE_CHECKING

from ...faces import names_on_demand

if TYPE_CHECKING:
    from .levels import (
        Change,
        Difference,
        Floats,
        Side,
        TermChange,
        Verdict,
        again_log,
        change,
        log_level,
    )
    from .norms import Normal, bus_rates, modelled_nearest, near_rows, normal
    from .terms import ALL_ELSE, step_windows
    from .two_runs import difference

__getattr__ = names_on_demand(__name__)
