"""Comparison of two runs, or of two windows of one: which is slower, and in which terms.

In: two sample tables.  Out: a verdict with an interval, and the settings and terms that differ.
"""
