"""Probes: operators and transfers timed on purpose, in pauses of training or on an idle machine.

In: a list of probes. Out: records.
"""
