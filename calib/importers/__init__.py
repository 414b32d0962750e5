"""Files that users have: our own CSV format, Kineto traces, logs of nccl-tests, of NCCL's Inspector
plugin and of training.

In: frames and text. Out: frames in our own format, steps; a bad row or column is named.
"""
