"""The process beside training: it reads records, answers after each window, scores itself.

In: events of the session. Out: files, lines in the log, values for sinks, orders.
"""

from typing import TYPE_CHECKING

from ...faces import names_on_demand

if TYPE_CHECKING:
    from .program import main

__getattr__ = names_on_demand(__name__)
