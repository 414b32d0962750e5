"""The whole answer on a run, worked out once for each window.

In: a ``SampleTable`` and a ``Request``. Out: an ``Answer`` with transcript and history.
"""
