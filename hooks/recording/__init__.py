"""From marks to records: attribution, windows, traces, the choice of ranks, the writer's thread.

In: marks of ``sensors``. Out: lines of ``calib.records``. Imports ``process`` and ``sensors``.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .attribution import Attribution
    from .bounded_window import BoundedWindow, line_of
    from .exchange import Exchange, RecordingRole
    from .flight_recorder import (
        COLLECTIVES,
        NUM_CALLS,
        FlightRecorder,
        FlightWindow,
        capture_safe_dump,
        find_dumps,
        find_exchange,
        prepare,
    )
    from .kineto import Tracer, reason_against, traced_samples
    from .traced import TracedStep
    from .window import (
        NUM_WARMUP_STEPS,
        StepPlan,
        WindowPlan,
        layer_weights,
        pass_microbatches,
        samples,
        thin_samples,
    )
    from .window_records import WindowRecords, coverage_name
    from .writer import RecordWriter, WindowEnd, header_of

__getattr__ = lazy_getattr(__name__)
