"""Memory of a rank: weights, optimizer states, activations in flight by schedule, the peak.

In: a ``RunConfig`` or a ``LayoutTable``. Out: bytes by kind, and whether they fit. Imports
``workload`` and ``layers``.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .activations import (
        OFFLOADED_MODULES,
        expert_tensors,
        layer_tensors,
        offloaded_nbytes,
        stashed_nbytes,
    )
    from .devices import known_device, known_nbytes
    from .peak import (
        FITS_PROBABILITY,
        OVERHEAD_SIGMA_FRAC,
        RESERVE_FRAC,
        SIGMA_FRAC,
        MemoryEstimate,
        Verdict,
        fit_probability,
        host_nbytes,
        memory,
        memory_offset,
        memory_with_offset,
        verdict,
    )
    from .pipelines import needed_nbytes

__getattr__ = lazy_getattr(__name__)
