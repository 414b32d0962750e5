"""Drift of the step time during a run, and its causes.

In: step times and sample tables. Out: drift events, each with its cause if one is identified.
"""
