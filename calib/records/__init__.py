"""Records that hooks write, line by line, and traces that PyTorch and NCCL write.

In: lines of JSON. Out: record classes, and runs with damaged lines named. Imports ``workload``.
"""
