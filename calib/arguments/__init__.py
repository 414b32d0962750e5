"""How others write a run down: Megatron's arguments, Hugging Face's configuration.

In: argument lists and namespaces. Out: a ``RunConfig``, and back again. Imports ``workload`` and
``records``.
"""
