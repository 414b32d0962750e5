"""Whole launch lines: of the running layout and of any other, for each kind of host.

In: what a run keeps of its launch, its ``RunConfig`` and a wanted one. Out: a ``LaunchLine``, as
words, as a script and as a difference.
"""
