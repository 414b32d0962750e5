"""Knowledge of a machine: runs of a directory, imported tables, and the fitted step model.

In: directories. Out: a ``Machine``, whose step model every verb uses.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .machine import Machine, absent_in, launch_of_command, launch_of_run, plan_on
    from .machine_fits import device_machine
    from .machines import open_machine
    from .node_links import detect_links, write_links
    from .runs import EarlierRuns, Loaded, full_run_id, has_run, load, newest_run_id, read
    from .scheduler import Ask, ask_slurm
    from .table_files import (
        ENDINGS,
        FOLDER,
        check_ending,
        import_table,
        published_rows,
        read_frame,
        with_normal,
        write_frame,
    )

__getattr__ = lazy_getattr(__name__)
