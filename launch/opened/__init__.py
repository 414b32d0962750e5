"""A calibrated run as a Python object, ``forerun.load(DIR)``, which the verbs use too."""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .other_run import OtherRun
    from .placement import place_among_published, placement_lines
    from .row_command import BREAK, RowCommand
    from .run import Run, load, unmeasured

__getattr__ = lazy_getattr(__name__)
