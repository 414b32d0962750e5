"""The directory of a run: what lies in it, for whom, and how it is read with care.

In: paths. Out: forecasts, logs, launches. What is damaged or another's is passed over.
"""
