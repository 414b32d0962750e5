"""Windows, traces, the choice of ranks, and the thread that writes marks and records.

In: marks of ``sensors``. Out: lines of ``calib.records``. Imports ``process`` and ``sensors``.
"""
