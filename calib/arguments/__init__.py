"""Conversion between ``RunConfig`` and Megatron's arguments or Hugging Face's configuration.

In: argument lists and namespaces. Out: a ``RunConfig``, and the reverse. Imports ``workload`` and
``records``.
"""
