"""Regressors that know nothing of training: Gaussian process, forest, trees, robust fits.

In and out: numpy arrays. Imports nothing of ours but errors.
"""

from typing import TYPE_CHECKING

from ...faces import names_on_demand

if TYPE_CHECKING:
    from .choices import first_of_least
    from .gaussian import GaussianProcess, Inputs, fit_gaussian, stacked
    from .intervals import (
        PRIOR_WEIGHT,
        STUDENT_90,
        UNMEASURED_SIGMA_LOG,
        Z_90,
        drawn_sigma_log,
        shrunk_sigma_log,
    )
    from .robust import SAMPLE_SIGMA_LOG, robust_minimum, robust_sigma, without_wild
    from .trees import Forest, Line, Trees, fit_forest, fit_line, fit_trees

__getattr__ = names_on_demand(__name__)
