"""The sample table: one row per operator or transfer, with the ranks' clocks set right.

In: runs of ``records``. Out: a ``SampleTable`` of pandas frames, stored as Parquet.
"""
