"""Advice: layouts worth offering, the plan, the decision to stop, and shapes to probe.

In: fitted steps and a forecast. Out: ``Plan``, ``Decision``, lists of probes.
"""
