"""Tables and traces that users have: our own CSV format, Kineto traces, nccl-tests logs.

In: frames and text. Out: frames in our own format; a bad row or column is named.
"""
