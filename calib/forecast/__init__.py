"""Forecast of the run's end: remaining schedule, batch sizes, finish, and its evaluation.

In: fitted steps and measured step times. Out: ``Forecast``, and the evaluation of past ones.
"""
