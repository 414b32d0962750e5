"""Two runs, or two windows of one, held against each other: what is slower, and where it is lost.

In: two sample tables.  Out: a verdict with an interval, the settings and the terms that differ.
"""
