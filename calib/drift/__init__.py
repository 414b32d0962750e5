"""Drift of the step time during a run, and its causes.

In: step times and sample tables. Out: drift events, each with its cause if one is identified.
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
