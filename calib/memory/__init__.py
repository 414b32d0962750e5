"""Memory of a rank: weights, optimizer states, activations in flight by schedule, the peak.

In: a ``RunConfig`` or a ``LayoutTable``. Out: bytes by kind, and whether they fit. Imports
``workload`` and ``layers``.
"""
