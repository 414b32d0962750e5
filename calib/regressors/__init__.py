"""Regressors without knowledge of training: Gaussian process, forest, trees, robust fits.

In and out: numpy arrays, or an estimate. Imports no other package of this project but errors.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .estimate import Estimate
    from .gaussian import GaussianProcess, Inputs, fit_gaussian, stacked
    from .robust import (
        PRIOR_WEIGHT,
        SAMPLE_SIGMA_LOG,
        STUDENT_90,
        UNMEASURED_SIGMA_LOG,
        Z_90,
        clip_residuals,
        drawn_sigma_log,
        first_minimum,
        robust_minimum,
        robust_sigma,
        shrunk_sigma_log,
    )
    from .trees import Forest, Line, Trees, fit_forest, fit_line, fit_trees

__getattr__ = lazy_getattr(__name__)
