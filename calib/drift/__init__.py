"""Changes of level while a run goes on, and their causes.

In: step times and sample tables. Out: drift events, each with a cause where one is found.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .attribution import Cause, CauseKind, find_causes, find_group_causes
    from .monitor import (
        SCHEMA,
        Drift,
        DriftEvent,
        DriftKind,
        DriftMonitor,
        drift_causes,
        transfer_causes,
    )
    from .stragglers import Clock, WaitingReport, waiting_report

__getattr__ = lazy_getattr(__name__)
