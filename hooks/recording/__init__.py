"""From marks to records: attribution, windows, traces, the choice of ranks, the writer's thread.

In: marks of ``sensors``. Out: lines of ``calib.records``. Imports ``process`` and ``sensors``.
"""
