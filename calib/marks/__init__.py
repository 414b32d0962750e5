"""From the marks of hooked steps to records: who had each moment, and what a transfer took.

In: the arrays that training has written. Out: ``calib.records``. Everything here is pure.
"""
