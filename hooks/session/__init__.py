"""One session per process: schedules hooks, recording, probes and traces, and removes them all.

In: calls of an adapter. Out: records, and events to the companion. Imports all packages of
``hooks`` except ``adapters``.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .attaching import AttachedRun, attach, new_session
    from .chain import chain_of, roles_in, unseen_in
    from .data_watch import DataWatch, LoopObserver
    from .first_step import FrameworkSettings
    from .instruments import Instruments, device_name, stopwatch_for
    from .ledger import Ledger
    from .mark_budget import MarkBudget
    from .session import EVAL, SAVE, Session, begin, running

__getattr__ = lazy_getattr(__name__)
