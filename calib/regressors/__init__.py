"""Regressors that know nothing of training: Gaussian process, forest, trees, robust fits.

In and out: numpy arrays. Imports nothing of ours but errors.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .gaussian import GaussianProcess, Inputs, fit_gaussian, stacked
    from .robust import (
        PRIOR_WEIGHT,
        SAMPLE_SIGMA_LOG,
        STUDENT_90,
        UNMEASURED_SIGMA_LOG,
        Z_90,
        drawn_sigma_log,
        first_of_least,
        robust_minimum,
        robust_sigma,
        shrunk_sigma_log,
        without_wild,
    )
    from .trees import Forest, Line, Trees, fit_forest, fit_line, fit_trees

__getattr__ = lazy_getattr(__name__)
