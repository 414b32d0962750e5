"""Stragglers: slow ranks, links and stages, what they cost, and what ranks wait for.

In: a ``SampleTable``. Out: a ``WaitingReport``.
"""
