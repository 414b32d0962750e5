"""Where hosts are met: Megatron, Bridge, Hugging Face, Lightning, torchtitan, own loops.

In: a host's import. Out: calls of a session. Each is listed in ``registry``.
"""
