"""When the run ends: the remaining schedule, other batch sizes, the finish, how right it was.

In: fitted steps and measured step times. Out: ``Forecast``, and the evaluation of past ones.
"""
