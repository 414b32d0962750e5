"""From marks to records: attribution, windows, traces, which rank records, the writer's thread.

In: marks of ``sensors``. Out: lines of ``calib.records``. Imports ``process`` and ``sensors``.
"""

from typing import TYPE_CHECKING

from ...faces import names_on_demand

if TYPE_CHECKING:
    from .attribution import Attribution
    from .bounded_window import BoundedWindow, line_of
    from .exchange import Exchange, RecordingRole
    from .flight_recorder import (
        COLLECTIVES,
        NUM_CALLS,
        FlightRecorder,
        FlightWindow,
        beside_captures,
        find_dump,
        find_exchange,
        prepare,
    )
    from .kineto import Tracer, reason_against, traced_samples
    from .traced import TracedStep
    from .window import NUM_WARMUP_STEPS, StepPlan, WindowPlan, pass_microbatches, samples, thinned
    from .window_records import WindowRecords, coverage_name
    from .writer import RecordWriter, WindowEnd, header_of

__getattr__ = names_on_demand(__name__)
