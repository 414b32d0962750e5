"""Hooks of hooked steps: modules, passes, transfers, timers, and the marks they leave.

In: the host's modules and groups. Out: marks in integer arrays. Imports ``process``.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .captured import (
        find_regions,
        graphs_remark,
        is_compiled,
        register_captured,
        why_no_operators,
    )
    from .compiling import CompileWatch, StallHooks
    from .dispatches import DispatchHooks
    from .module_calls import CALLS, entries_of
    from .modules import ModuleHooks
    from .optimizer_steps import OptimizerSteps
    from .passes import PassHooks
    from .process_groups import GroupRoles, ProcessGroupHooks, backends, is_described, was_called
    from .recorder import BACKWARD, FORWARD, OPTIMIZER, Recorder, backward_mark
    from .sites import dispatch_methods, find_mixers, transformers_config
    from .step_log import (
        BITS,
        MAX_MARKS,
        MAX_WINDOW_MARKS,
        NO_SHAPE,
        NO_SPAN,
        WAITING,
        Code,
        Site,
        StepLog,
        Transfer,
        TransferKind,
        unpack_mark,
    )
    from .stopwatch import (
        MAX_EVENTS,
        NO_TIME,
        STEP_STREAM,
        DeviceStopwatch,
        HostReadings,
        HostStopwatch,
        Readings,
        Stopwatch,
    )
    from .timers import TimerHooks

__getattr__ = lazy_getattr(__name__)
