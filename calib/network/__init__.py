"""Transfer times: curves over bytes, NCCL's own choices, other groups and systems.

In: measured transfers. Out: times of collectives. Imports ``workload`` and ``regressors``.
"""
