"""What a rank keeps: weights, optimizer states, activations in flight by schedule, the peak.

In: a ``RunConfig``. Out: bytes by kind, and whether they fit. Imports ``workload`` and ``layers``.
"""
