"""What to do: layouts worth offering, the plan, the decision to stop, what to probe.

In: fitted steps and a forecast. Out: ``Plan``, ``Decision``, lists of probes.
"""
