"""Files that users have: our own CSV format, Kineto traces, logs of nccl-tests, of NCCL's Inspector
plugin and of training.

In: frames and text. Out: frames in our own format, steps; a bad row or column is named.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .canonical_steps import (
        REQUIRED,
        SPLIT_COLUMNS,
        canonical_frame,
        read_steps,
        refuse_unread,
        with_split_columns,
    )
    from .canonical_tables import (
        CHOSEN,
        COLLECTIVES,
        MICROSECOND_S,
        NEEDED,
        OPERATOR_COLUMNS,
        degrees,
        read_table,
        shape_sizes,
        table_kind,
        unknown_table_error,
    )
    from .kineto import kineto_tables
    from .kineto_origins import TraceShares
    from .nccl_inspector import inspector_operations
    from .nccl_tests import nccl_tests_collectives
    from .rank_operations import joined_ranks
    from .training_log import LogLine, TrainingLog, logged_arguments, read_training_log

__getattr__ = lazy_getattr(__name__)
