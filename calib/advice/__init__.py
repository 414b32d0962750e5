"""What to do: layouts worth offering, the plan, the decision to stop, what to probe.

In: fitted steps and a forecast. Out: ``Plan``, ``Decision``, lists of probes.
"""

from typing import TYPE_CHECKING

from ...faces import names_on_demand

if TYPE_CHECKING:
    from .axes import AXES, axis_value, changed, layout_words, recompute_text, single_choices
    from .coverage import Breadth, WhyNot, breadth, why_not
    from .decision import (
        Decision,
        Reason,
        Rule,
        decide,
        lateness_probability,
        odds_text,
        saving_text,
    )
    from .explanation import Change, Difference, Explained, Explanation, TermTime, explain
    from .micro_batch import MicroBatchAdvice, micro_batch_advice
    from .named_layouts import named_layout
    from .planning import Candidate, Plan, compare, left_out, plan, unaskable
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
    from .remedies import MemoryRoom, Remedy
    from .scaling import TRUSTED_FACTOR, Growth, ScalePoint, Scaling, best_on, curve

__getattr__ = names_on_demand(__name__)
