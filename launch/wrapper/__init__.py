"""``forerun run``: launch wrapper for scheduler limits, stops on advice, and resubmission.

Standard library only.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .log_lines import (
        finish,
        log_error,
        log_line,
        print_line,
        reserve_standard_descriptors,
    )
    from .resubmit import relaunch, script, try_write_script
    from .slurm import GIVEN, Allocation, allocation, duration_s, num_jobs
    from .wrapped import Outcome, WrapOptions, WrappedLaunch

__getattr__ = lazy_getattr(__name__)
