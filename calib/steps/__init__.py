"""The step model, the only source of step times, in any layout.

In: base times (calibration, tables or priors) and known steps. Out: ``FittedSteps``, which
estimates any layout with its interval.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .base_times import BaseTimes, prior_times
    from .estimate import StepEstimate, StepTerms
    from .known_steps import (
        MEASURED_SIGMA_LOG,
        KnownStep,
        same_layout,
        similarity,
    )
    from .launches import launch_times
    from .live import live_times
    from .model import MISFIT, FittedSteps, fit_steps
    from .scales import CONTENTION
    from .slices import Place, Slice
    from .step_tables import machine_times, table_steps

__getattr__ = lazy_getattr(__name__)
