"""``forerun run``: around a launcher, for schedulers' limits, stops on advice, resubmission.

Standard library alone.
"""

from typing import TYPE_CHECKING

from ...faces import names_on_demand

if TYPE_CHECKING:
    from .log_lines import answer, complain, finish, hold_standard_descriptors, one_line, say
    from .resubmit import MARK, is_ours, is_written, relaunch, script, sealed
    from .slurm import GIVEN, Allocation, allocation, duration_s, num_jobs, time_option
    from .wrapped import Outcome, WrapOptions, Wrapped

__getattr__ = names_on_demand(__name__)
