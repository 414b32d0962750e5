"""From samples to estimates of operators: laws, rates, priors, outliers, the calibration.

In: a ``SampleTable``, or tables of a device. Out: ``Estimates`` with intervals and provenance.
"""
