"""Forecast of the run's end: remaining schedule, batch sizes, finish, and its evaluation.

In: fitted steps and measured step times. Out: ``Forecast``, and the evaluation of past ones.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .adaptive import AdaptiveInterval
    from .batch_ratios import PredictedStep
    from .evaluation import (
        Coverage,
        Ended,
        Evaluation,
        PastForecast,
        Settled,
        StepTally,
        evaluate,
    )
    from .forecasts import CPU_DRIFT_FRAC, DRIFT_FRAC, SCHEMA, Forecast, forecast, mean_estimate
    from .modelled import (
        ModelForecast,
        at_batch_size,
        batch_levels,
        batch_size_at,
        full_batch_size,
        model_forecast,
    )
    from .rates import (
        RemainingRun,
        RemainingRunCost,
        Throughput,
        peak_flop_per_s,
        remaining_run_cost,
        throughput,
    )
    from .remaining_run import (
        FEW_SIGMA_LOG,
        MeasuredRun,
        RunProgress,
        measured_forecast,
        run_forecast,
    )
    from .remaining_schedule import read_count, step_groups
    from .whole import WholeRun, whole_run

__getattr__ = lazy_getattr(__name__)
