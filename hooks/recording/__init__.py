"""From marks to records: attribution, windows, traces, which rank records, the writer's thread.

In: marks of ``sensors``. Out: lines of ``calib.records``. Imports ``process`` and ``sensors``.
"""
