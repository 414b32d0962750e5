"""The space of layouts that a run could have, and the best of them, proven.

``space`` defines the choices, ``cells`` enumerates them as columns, and ``best_first`` bounds time
and memory of all cells in bulk and evaluates in ``variants`` those that can still be best.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .best_first import best_layouts
    from .cells import cells_of, num_variants
    from .results import TOP, Effort, MemoryBudget, Proof, SearchResult, Tally
    from .space import (
        FSDP_OPTIONS,
        OFFLOAD_OPTIONS,
        modules_of,
        num_nodes,
        recomputes,
        states,
    )
    from .variants import rounded_log

__getattr__ = lazy_getattr(__name__)
