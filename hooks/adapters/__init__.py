"""Adapters to training loops: Megatron, Bridge, Hugging Face, Lightning, torchtitan, plain PyTorch.

In: a host's import. Out: calls of a session. ``registry`` lists all adapters.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .bridge import bridge_callback
    from .hugging_face import hugging_face_callback
    from .lightning import lightning_callback
    from .megatron_training import request_stop
    from .registry import ADAPTERS

__getattr__ = lazy_getattr(__name__)
