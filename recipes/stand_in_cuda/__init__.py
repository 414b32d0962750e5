"""A CPU that answers to CUDA's names, so that code for GPUs trains without one."""
