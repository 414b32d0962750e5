"""The step model: the one answer to how long a step takes, in any layout.

In: base times (calibration, tables or priors) and known steps. Out: ``FittedSteps``, which
estimates any layout with its interval.
"""
