"""The sample table: one row per operator or transfer, with the ranks' clocks aligned.

In: runs of ``records``. Out: a ``SampleTable`` of pandas frames, stored as Parquet.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .columns import FRAMES, normalise, parse_shape, shape_text
    from .neighbours import smooth_over_neighbours
    from .rank_compute import RankCompute, newest_rank_compute
    from .recent import RecentWindows
    from .reduce import (
        MAD_EFFICIENCY,
        MAD_TO_SIGMA,
        MEDIAN_OVER_MEAN,
        mad_sigma,
        median_error_log,
        median_of_others,
    )
    from .store import RunReader, check_parquet, read_run, read_table, run_ids, write_table
    from .table import SampleTable, build_table, only_windows, windows_of

__getattr__ = lazy_getattr(__name__)
