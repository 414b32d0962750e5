"""Advice: layouts worth offering, the plan, the decision to stop, and shapes to probe.

In: fitted steps and a forecast. Out: ``Plan``, ``Decision``, lists of probes.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .axes import changed, single_choices
    from .decision import (
        MIN_STEPS,
        UNKNOWN_LAYOUT,
        Decision,
        Reason,
        Rule,
        decide,
        odds_text,
        saving_text,
    )
    from .explanation import Change, Difference, Explained, Explanation, TermTime, explain
    from .named_layouts import named_layout
    from .obstacles import WhyNot, why_not
    from .planning import Candidate, Plan, compare, exclusion_reason, plan, unsupported_reason
    from .probe_sizes import (
        COLD_NBYTES,
        MOST_COPIES,
        OPTIMIZER_TENSORS,
        REPEATS,
        WARMUPS,
        CollectiveProbe,
        OperatorProbe,
        fingerprint,
    )
    from .probes import collective_probe, is_probed, operator_probe, probe_plan
    from .remedies import FittingLayouts, Remedy
    from .scaling import TRUSTED_FACTOR, Growth, ScalePoint, Scaling, best_on, compute_scaling

__getattr__ = lazy_getattr(__name__)
