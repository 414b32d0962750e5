"""Which collective a library's own name means, and how wide its elements are."""

from __future__ import annotations

from ..workload.collectives import Collective

_BEGINNINGS = (
    ("allreduce", Collective.ALL_REDUCE),
    ("allgather", Collective.ALL_GATHER),
    ("reducescatter", Collective.REDUCE_SCATTER),
    ("alltoall", Collective.ALL_TO_ALL),
    ("broadcast", Collective.BROADCAST),
    ("send", Collective.SEND),
    ("recv", Collective.RECV),
)


def collective_named(text: str) -> Collective:
    """The collective that PyTorch's traces and its flight recorder call ``text``.

    >>> [collective_named(name).value for name in ("nccl:_all_gather_base", "nccl:send 0->1")]
    ['all_gather', 'send']
    >>> collective_named("_reduce_scatter_base"), collective_named("nccl:coalesced")
    (<Collective.REDUCE_SCATTER: 'reduce_scatter'>, <Collective.OTHER: 'other'>)
    """
    name = text.rpartition(":")[2].replace("_", "").lower()
    return next((kind for start, kind in _BEGINNINGS if name.startswith(start)), Collective.OTHER)
