"""From samples to estimates of operators: laws, rates, priors, outliers, the calibration.

In: a ``SampleTable``, or tables of a device. Out: ``Estimates`` with intervals and provenance.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .batches import ShapeBatch, Timed, batch_of
    from .calibration import Calibration, calibrate, calibration_for_device, combine_with_other
    from .device_transfer import transfer_to_device
    from .estimates import Estimates, Estimator, Source
    from .laws import Ceilings, columns, family, work, work_of
    from .machine import MachineModel, Prediction, fit_machine
    from .measured_rows import measured_operators
    from .operator_kinds import KINDS, Columns, OperatorFamily, WorkKind
    from .outliers import Refusal, refuse
    from .pools import coordinates
    from .priors import UNKNOWN_DEVICE, DevicePrior, device_prior, is_processor
    from .rate_priors import (
        BARE_LOG,
        SourceRates,
        data_sheet,
        generation,
        measured_devices,
        pool_name,
        rates_prior,
    )
    from .rates import Form, Rates, fit_rates

__getattr__ = lazy_getattr(__name__)
