"""The step model, the only source of step times, in any layout.

In: base times (calibration, tables or priors) and known steps. Out: ``FittedSteps``, which
estimates any layout with its interval.
"""
