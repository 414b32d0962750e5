"""The whole answer on a run, worked out once for each window.

In: a ``SampleTable`` and a ``Request``. Out: an ``Answer`` with transcript and history.
"""

from typing import TYPE_CHECKING

from ...faces import names_on_demand

if TYPE_CHECKING:
    from .analysis import analyse, finish_lines, renewed
    from .answer import Answer, Modelled
    from .finish_line import moment
    from .measured_steps import (
        CPU_SESSION_SIGMA_LOG,
        SESSION_SIGMA_LOG,
        config_on,
        fit_own,
        known_elsewhere,
        known_step,
        layout_left,
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
    from .transcript import PREFIX, prefixed, run_line
    from .what_if import predict_words

__getattr__ = names_on_demand(__name__)
