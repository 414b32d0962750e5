"""The sample table: one row per operator or transfer, with the ranks' clocks aligned.

In: runs of ``records``. Out: a ``SampleTable`` of pandas frames, stored as Parquet.
"""
