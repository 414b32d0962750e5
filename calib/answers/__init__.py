"""The complete answer for a run, computed once per window.

In: a ``SampleTable`` and a ``Request``. Out: an ``Answer`` with its transcript.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .analysis import analyse, finish_lines, with_end, with_new_forecast
    from .answer import Answer, Modelled
    from .finish_line import duration_s, ended_text, finish_text, format_moment
    from .measured_steps import (
        CPU_SESSION_SIGMA_LOG,
        SESSION_SIGMA_LOG,
        config_on,
        fit_run_steps,
        known_elsewhere,
        known_step,
        remaining_layout,
        run_steps,
        running_config,
        steps_on,
    )
    from .request import Request
    from .routing import with_measured_routing
    from .run_end import RunEnd
    from .run_measurements import (
        ONE_STEP_SIGMA_LOG,
        measured_step_s,
        memory_capacity_nbytes,
        memory_offset_nbytes,
        overhead,
    )
    from .step_traces import PREDICTED, step_trace
    from .transcript import PREFIX, run_line, with_prefix
    from .what_if import predict_words

__getattr__ = lazy_getattr(__name__)
