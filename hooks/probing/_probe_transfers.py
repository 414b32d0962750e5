"""One collective of a given payload on an existing group, as training calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...calib.workload.collectives import Collective, GroupRole
from ..sensors.process_groups import GroupRoles, is_described, was_called

# torch 2.13 has renamed both; the old names warn.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_PREFERRED = "WITH_CP"
"""Suffix of the group on which Megatron reduces gradients; it may never use the other."""
_UNSPECIFIC = (GroupRole.WORLD, GroupRole.OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrier:
    """A process group and this rank's position in it."""

    group: Any
    name: str
    ranks: tuple[int, ...]
    place: int


def find_carrier(role: GroupRole, ranks: tuple[int, ...], roles: GroupRoles) -> Carrier | None:
    """Return this rank's group with that role and these ranks; None if there is none.

    ``roles`` maps groups to roles.  If it knows a group by its ranks alone, these ranks suffice:
    two roles of the same ranks perform alike.
    """
    matching_groups = [
        group
        for group in distributed_c10d._world.pg_map
        if tuple(dist.get_process_group_ranks(group)) == ranks
        and (group_role := roles.of(group, ranks)) not in _UNSPECIFIC
        and (group_role is role or not is_described(group.group_desc))
    ]
    if not matching_groups:
        return None
    group = min(matching_groups, key=lambda g: _PREFERRED not in g.group_desc)
    return carrier_of(group)


def carrier_of(group: Any) -> Carrier:
    """Return a group as probes use it."""
    return Carrier(
        group=group,
        name=f"{group.group_desc}#{group.group_name}",
        ranks=tuple(dist.get_process_group_ranks(group)),
        place=dist.get_rank(group),
    )


class TransferBench:
    """One collective, ready to be issued repeatedly; its buffers are allocated here."""

    def __init__(
        self,
        collective: Collective,
        nbytes: int,
        carrier: Carrier,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.carrier = carrier
        self.collective = collective
        self.device = device
        size = len(carrier.ranks)
        count = max(size, nbytes // dtype.itemsize // size * size)
        self._whole = torch.zeros(count, dtype=dtype, device=device)
        self._part = torch.zeros(count // size, dtype=dtype, device=device)
        self._other = self._whole
        if collective is Collective.ALL_TO_ALL:
            self._other = torch.zeros_like(self._whole)
        self._issue = self._calls()[collective]
        self._turn = 0

    @property
    def peer(self) -> int:
        """Global rank of the other end of a message; -1 for collectives or without a neighbour."""
        if self.collective is not Collective.SEND:
            return -1
        other = self.carrier.place ^ 1
        return self.carrier.ranks[other] if other < len(self.carrier.ranks) else -1

    @property
    def is_connected(self) -> bool:
        """True if the run itself makes such calls here, so that NCCL has allocated its buffers.

        For another payload, NCCL may choose an algorithm that it has not connected yet.
        """
        if self.collective is not Collective.SEND:
            return was_called(self.carrier.group, self.collective)
        ends = (Collective.SEND, Collective.RECV)
        return self.peer < 0 or all(was_called(self.carrier.group, end, self.peer) for end in ends)

    @property
    def is_sender(self) -> bool:
        """True if this rank sends the next message."""
        return self.carrier.place % 2 == self._turn % 2

    def run(self) -> None:
        """Issue it and wait for its end (on a device: order it into the current stream)."""
        self._issue()
        self._turn += 1

    def _calls(self) -> dict[Collective, Callable[[], Any]]:
        group = self.carrier.group
        return {
            Collective.ALL_REDUCE: lambda: dist.all_reduce(self._whole, group=group),
            Collective.ALL_GATHER: lambda: _gather(self._whole, self._part, group=group),
            Collective.REDUCE_SCATTER: lambda: _scatter(self._part, self._whole, group=group),
            Collective.ALL_TO_ALL: lambda: dist.all_to_all_single(
                self._other, self._whole, group=group
            ),
            Collective.BROADCAST: lambda: dist.broadcast(
                self._whole, src=self.carrier.ranks[0], group=group
            ),
            Collective.SEND: self._send,
        }

    def _send(self) -> None:
        """Exchange messages between pairs of neighbours, in alternating directions."""
        peer, group = self.peer, self.carrier.group
        if peer < 0:
            return
        operation = dist.isend if self.is_sender else dist.irecv
        # If batched, NCCL uses the group's own communicator instead of creating one for the pair.
        for request in dist.batch_isend_irecv([dist.P2POp(operation, self._whole, peer, group)]):
            request.wait()
