"""User requests: ``--calibrate-...`` flags, files of arguments.

In: words and files. Out: ``Settings`` and ``RunConfig``.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .config_files import OpenRun, completed, described_run
    from .flags import FLAGS, LIMIT, REQUESTS, parse, rank_info, read_cluster, split
    from .launch_scripts import LaunchScript, inner_launch_line, launch_script, script_hint
    from .plan_options import (
        PLAN_OPTIONS,
        Objective,
        PlanQuestion,
        Several,
        read_batch,
        read_prices,
        read_question,
        read_tokens,
    )

__getattr__ = lazy_getattr(__name__)
