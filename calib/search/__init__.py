"""The space of layouts that a run could have, and the best of them.

``space`` defines the choices, ``cells`` enumerates them as columns, and ``best_layouts`` tries them
in the order of ``rough_times``.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .best_layouts import best_layouts
    from .cells import cells_of, choices_of, num_variants
    from .results import TOP, Effort, MemoryBudget, SearchResult, Tried
    from .space import FSDP_OPTIONS, OFFLOAD_OPTIONS, modules_of, num_nodes, recomputes, states

__getattr__ = lazy_getattr(__name__)
