"""The complete answer for a run, computed once per window.

In: a ``SampleTable`` and a ``Request``. Out: an ``Answer`` with its transcript.
"""
