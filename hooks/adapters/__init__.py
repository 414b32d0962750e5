"""Adapters to training loops: Megatron, Bridge, Hugging Face, Lightning, torchtitan, plain PyTorch.

In: a host's import. Out: calls of a session. ``registry`` lists all adapters.
"""
