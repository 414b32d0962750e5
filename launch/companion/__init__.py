"""Companion process of training: reads records, answers after each window, scores its forecasts.

In: events of the session, or a training log. Out: files, log lines, values for sinks, orders.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .program import main
    from .replay import LoggedRun, replay_log

__getattr__ = lazy_getattr(__name__)
