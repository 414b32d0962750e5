"""Collectives, recorded at the methods of ``ProcessGroup``, below all import-time aliases.

Only these methods and ``Work.wait`` are replaced, at class level and during hooked steps alone.
Functional collectives (torch.compile, DTensor) and DDP's buckets do not pass through them.  These
are read from PyTorch's flight recorder.

PyTorch's own hooks (``ProcessGroup.register_pre_hook``, torch 2.14.1) see these too, but cannot be
used in some steps only.  They lie in a map without a lock, and PyTorch expects them at set-up.  A
thread that calls a collective on the same group, such as that of a checkpoint, waits for the
interpreter lock inside its hook; one that is removed meanwhile is called after it was freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed import distributed_c10d

from ...calib.errors import ConfigError
from ...calib.marks.step_marks import TransferKind
from ...calib.workload.collectives import Collective, GroupRole
from ...calib.workload.parallelism import Parallelism
from ...calib.workload.ranks import group as ranks_of
from ..process.guard import Guard
from ..process.host import Reference, reference
from ..process.inspection import is_tensor
from ..process.stand_ins import stand_in
from .recorder import Recorder
from .step_log import NO_TRANSFER, UNKNOWN_TRANSFER, StepLog

_ROLES = {
    "TENSOR_MODEL_PARALLEL_GROUP": GroupRole.TP,
    "PIPELINE_MODEL_PARALLEL_GROUP": GroupRole.PP,
    "DATA_PARALLEL_GROUP": GroupRole.DP,
    "DATA_PARALLEL_GROUP_WITH_CP": GroupRole.DP,
    "DATA_PARALLEL_GROUP_WITH_CP_AG": GroupRole.DP,
    "DATA_PARALLEL_GROUP_WITH_GTP_REMAT": GroupRole.DP,
    "DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": GroupRole.DP,
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": GroupRole.DP,
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP": GroupRole.DP,
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": GroupRole.DP,
    "EXPERT_MODEL_PARALLEL_GROUP": GroupRole.EP,
    "EXPERT_TENSOR_PARALLEL_GROUP": GroupRole.EXPERT_TP,
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": GroupRole.EXPERT_TP_EP,
    "EXPERT_DATA_PARALLEL_GROUP": GroupRole.EXPERT_DP,
    "EXPERT_DATA_PARALLEL_GROUP_AG": GroupRole.EXPERT_DP,
    "EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": GroupRole.EXPERT_DP,
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1": GroupRole.DP_INSTANCES,
    "CONTEXT_PARALLEL_GROUP": GroupRole.CP,
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0": GroupRole.EXPERT_DP,
    "EMBEDDING_GROUP": GroupRole.EMBEDDING,
    "POSITION_EMBEDDING_GROUP": GroupRole.EMBEDDING,
    "MODEL_PARALLEL_GROUP": GroupRole.MODEL,
    "default_pg": GroupRole.WORLD,
}
_UNDESCRIBED = frozenset({"", "undefined"})


@dataclass(frozen=True, slots=True)
class Payload:
    """Payload of one method: the positions of the tensors that count, and of the peer, in its
    arguments.

    With ``other`` the larger of two sides counts: receiving more than sending takes a rank as long.
    """

    collective: Collective
    place: int | None
    peer: int | None = None
    other: int | None = None

    def nbytes(self, args: tuple[Any, ...]) -> int | None:
        """Return the payload's bytes of one call; None if a tensor is not to be asked."""
        if self.place is None or len(args) <= self.place:
            return 0
        nbytes = tensor_nbytes(args[self.place])
        if self.other is None or nbytes is None or len(args) <= self.other:
            return nbytes
        other_nbytes = tensor_nbytes(args[self.other])
        return None if other_nbytes is None else max(nbytes, other_nbytes)


def role_of(description: str) -> GroupRole:
    """Return a group's role from its ``group_desc``; Megatron names all of its groups.

    >>> role_of("DATA_PARALLEL_GROUP_WITH_CP").value
    'dp'
    """
    return _ROLES.get(description, GroupRole.OTHER)


def is_described(description: str) -> bool:
    """Return False for torch's description of a group that was created without one."""
    return description not in _UNDESCRIBED


def tensor_nbytes(value: Any) -> int | None:
    """Return the bytes of a tensor, or of all tensors in nested lists; 0 for anything else, None if
    one is of a class of the user's own."""
    kind = type(value)
    if kind is list or kind is tuple:
        sizes = [tensor_nbytes(item) for item in value]
        return None if None in sizes else sum(filter(None, sizes))
    if kind is torch.Tensor or is_tensor(value):
        return value.numel() * value.element_size()
    return None if issubclass(kind, torch.Tensor) else 0


_OUTPUT, _INPUT = 0, 1
_GATHER = Payload(Collective.ALL_GATHER, _OUTPUT)
_SCATTER = Payload(Collective.REDUCE_SCATTER, _INPUT)
_EXCHANGE = Payload(Collective.ALL_TO_ALL, _INPUT, other=_OUTPUT)
_REDUCE = Payload(Collective.ALL_REDUCE, 0)
_COLLECT = Payload(Collective.OTHER, _INPUT)
_BARRIER = Payload(Collective.OTHER, None)

# torch 2.13 renamed the single-tensor methods; the old names are bound to the same work.
PAYLOADS: Mapping[str, Payload] = {
    "allreduce": _REDUCE,
    "allreduce_coalesced": _REDUCE,
    "broadcast": Payload(Collective.BROADCAST, 0),
    "allgather": _GATHER,
    "allgather_coalesced": _GATHER,
    "_allgather_base": _GATHER,
    "all_gather_single": _GATHER,
    "allgather_into_tensor_coalesced": _GATHER,
    "all_gather_single_coalesced": _GATHER,
    "reduce_scatter": _SCATTER,
    "_reduce_scatter_base": _SCATTER,
    "reduce_scatter_single": _SCATTER,
    "reduce_scatter_tensor_coalesced": _SCATTER,
    "reduce_scatter_single_coalesced": _SCATTER,
    "alltoall": _EXCHANGE,
    "alltoall_base": _EXCHANGE,
    "all_to_all_single": _EXCHANGE,
    "send": Payload(Collective.SEND, 0, peer=1),
    "recv": Payload(Collective.RECV, 0, peer=1),
    "recv_anysource": Payload(Collective.RECV, 0),
    "reduce": Payload(Collective.OTHER, 0),
    **dict.fromkeys(("gather", "gather_single", "gather_into_tensor"), _COLLECT),
    "scatter": Payload(Collective.OTHER, _OUTPUT),
    "barrier": _BARRIER,
    "monitored_barrier": _BARRIER,
}


_EXCHANGES = (GroupRole.EP, GroupRole.EXPERT_TP_EP, GroupRole.CP)
_BETWEEN_STAGES = (GroupRole.PP, GroupRole.CP)
_DENSE = (GroupRole.TP, GroupRole.CP, GroupRole.DP, GroupRole.EMBEDDING, GroupRole.PP)
_OTHERS = (
    *(GroupRole.MODEL, GroupRole.DP_INSTANCES, GroupRole.EXPERT_TP, GroupRole.EP),
    *(GroupRole.EXPERT_TP_EP, GroupRole.EXPERT_DP, GroupRole.WORLD),
)
_FIRST: Mapping[Collective, tuple[GroupRole, ...]] = {
    Collective.ALL_TO_ALL: _EXCHANGES,
    Collective.SEND: _BETWEEN_STAGES,
    Collective.RECV: _BETWEEN_STAGES,
}
"""Preferred roles of a collective among groups with the same ranks; then the dense ones come
first."""


class GroupRoles:
    """Roles of process groups, in the process that has them.

    ``roles_by_name`` gives some by name.  A group without a description is identified by its ranks
    if the layout is known and no group has a name.  Megatron describes its groups, although others
    may create them in its place without descriptions; next to described groups, one without is the
    user's.
    """

    def __init__(
        self,
        roles_by_name: Mapping[str, GroupRole] | None = None,
        parallelism: Parallelism | None = None,
    ) -> None:
        self._roles_by_name = roles_by_name or {}
        self._parallelism = parallelism
        self._is_nameless: bool | None = None

    def of(
        self, group: Any, ranks: Sequence[int], collective: Collective | None = None
    ) -> GroupRole:
        """Return the role of a group, or of a collective on it."""
        named_role = self._roles_by_name.get(group.group_name)
        if named_role is not None:
            return named_role
        description = group.group_desc
        if is_described(description):
            return role_of(description)
        is_whole = len(ranks) == dist.get_world_size()
        if self._parallelism is not None and self._has_no_names():
            role = role_by_ranks(self._parallelism, dist.get_rank(), ranks, collective)
            if role is not GroupRole.OTHER:
                return role
        return GroupRole.WORLD if is_whole else GroupRole.OTHER

    def _has_no_names(self) -> bool:
        if self._is_nameless is None:
            names = (getattr(group, "group_desc", "") for group in distributed_c10d._world.pg_map)
            is_named = any(role_of(name) not in _NAMELESS for name in names)
            self._is_nameless = not (self._roles_by_name or is_named)
        return self._is_nameless


def backends() -> Iterator[tuple[Any, str, type]]:
    """Yield this process's groups, each with name and class of each of its backends."""
    for group in [*distributed_c10d._world.pg_map]:
        for device in group._device_types:
            backend = group._get_backend(device)
            try:
                name = backend.name()
            except Exception:  # a class may have none
                name = type(backend).__name__
            yield group, name, type(backend)


_BUILT_IN = ("torch._C._distributed_c10d", "torch.distributed.distributed_c10d")
"""Modules of torch's own groups and backends, all of whose calls and waits can be hooked."""


_NAMELESS = (GroupRole.WORLD, GroupRole.OTHER)


def role_by_ranks(
    parallelism: Parallelism,
    rank: int,
    ranks: Sequence[int],
    collective: Collective | None = None,
) -> GroupRole:
    """Return the role of the group of ``rank`` that has these ranks; ``OTHER`` if there is none.

    >>> role_by_ranks(Parallelism(tp=2, dp=2, pp=2), 5, (5, 7)).value
    'dp'
    >>> role_by_ranks(Parallelism(tp=2, dp=2, pp=2), 5, (1, 5), Collective.SEND).value
    'pp'
    """
    wanted = tuple(sorted(ranks))
    first = _FIRST.get(collective, ()) if collective is not None else ()
    for role in (*first, *_DENSE, *_OTHERS):
        try:
            group_ranks = ranks_of(parallelism, role, rank)
        except ConfigError:
            return GroupRole.OTHER  # the number of ranks differs from the layout's
        if len(wanted) > 1 and tuple(sorted(group_ranks)) == wanted:
            return role
    return GroupRole.OTHER


_WithoutModes = torch._C.DisableTorchFunction
_called: dict[int, tuple[Reference, set[tuple[Collective, int]]]] = {}
"""Collective and peer of the calls in hooked steps, by group, which may no longer exist."""


def was_called(group: Any, collective: Collective, peer: int = -1) -> bool:
    """Return True if a hooked step has made such a call on the group's own communicator."""
    group_ref, calls = _called.get(id(group), (None, set()))
    return group_ref is not None and group_ref() is group and (collective, peer) in calls


def _note_call(group: Any, collective: Collective, peer: int) -> None:
    known = _called.get(id(group))
    if known is None or known[0]() is not group:
        known = _called[id(group)] = (reference(group), set())
    known[1].add((collective, peer))


@dataclass(slots=True, kw_only=True)
class _Group:
    """A group of the running step, and its kinds of transfer by method, peer and unknown size."""

    name: str
    ranks: tuple[int, ...]
    kinds: dict[tuple[str, int, bool], int] = field(default_factory=dict)


@dataclass(slots=True)
class _Patch:
    """A replaced method, with the wrapper of the last original."""

    owner: type
    name: str
    wrap: Callable[[Any], Callable[..., Any]]
    original: Any = None
    wrapper: Any = None


class ProcessGroupHooks:
    """Recorder of every collective between ``install`` and ``remove``; ``roles`` are its
    groups'."""

    def __init__(self, recorder: Recorder, guard: Guard, roles: GroupRoles | None = None) -> None:
        self._roles = roles or GroupRoles()
        self._recorder = recorder
        self._fault = guard.fault
        self._is_installed = False
        self._num_known = 0
        self._groups: dict[int, _Group] = {}
        self._works: dict[int, tuple[Any, tuple[int, ...]]] = {}
        self._coalesced: list[int] | None = None
        self._is_in_call = False
        self.remarks: set[str] = set()
        """Remarks for the coverage: collectives that passed by these hooks."""
        # One wrapper object per name: dynamo rejects one object under two names of torch.
        self._patches = [
            *(
                _Patch(ProcessGroup, name, lambda f, n=name, p=payload: self._wrap_call(f, n, p))
                for name, payload in PAYLOADS.items()
            ),
            _Patch(ProcessGroup, "_start_coalescing", self._wrap_start_coalescing),
            _Patch(ProcessGroup, "_end_coalescing", self._wrap_end_coalescing),
            _Patch(Work, "wait", self._wrap_wait),
        ]

    def install(self) -> None:
        """Replace the methods, unless they are replaced already; note groups with others."""
        if self._is_installed:
            return
        self._is_installed = True
        known = len(distributed_c10d._world.pg_map)
        if known != self._num_known:
            self._num_known = known
            self._note_foreign()
        for patch in self._patches:
            current_method = vars(patch.owner).get(patch.name)
            if current_method is not patch.original:
                patch.original, patch.wrapper = current_method, patch.wrap(current_method)
            if current_method is not None:
                setattr(patch.owner, patch.name, patch.wrapper)

    def _note_foreign(self) -> None:
        groups = map(type, distributed_c10d._world.pg_map)
        for kind in (*groups, *(kind for *_, kind in backends())):
            if kind.__module__ not in _BUILT_IN:
                name = f"{kind.__module__}.{kind.__name__}"
                self.remarks.add(f"collectives of {name}: own calls, waits unseen")

    def remove(self) -> None:
        """Restore the original methods and forget the step's groups and works."""
        if not self._is_installed:
            return
        self._is_installed = False
        for patch in self._patches:
            if patch.original is not None and vars(patch.owner).get(patch.name) is patch.wrapper:
                setattr(patch.owner, patch.name, patch.original)
        self._groups.clear()
        self._works.clear()
        self._coalesced = None
        self._is_in_call = False

    def _wrap_call(self, original: Any, name: str, payload: Payload) -> Callable[..., Any]:
        recorder, fault = self._recorder, self._fault

        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            log = recorder.log
            if log is None or (log.is_full and log.current_pass < 0):
                return original(group, *args, **kwargs)
            is_part = self._is_in_call or recorder.is_in_exchange
            if is_part or not recorder.is_of_step:
                return original(group, *args, **kwargs)
            transfer = NO_TRANSFER
            try:
                values = args or tuple(kwargs.values())
                transfer = self._add(log, group, name, payload, values)
                recorder.begin_wait(transfer)
            except Exception as err:
                fault(err)
            work = None
            self._is_in_call = True
            try:
                work = original(group, *args, **kwargs)
                return work
            finally:
                self._is_in_call = False
                try:
                    self._end_call(transfer, work)
                except Exception as err:
                    fault(err)

        return stand_in(original, call)

    def _add(
        self, log: StepLog, group: Any, name: str, payload: Payload, values: tuple[Any, ...]
    ) -> int:
        known = self._groups.get(id(group))
        if known is None:
            if group not in distributed_c10d._world.pg_group_ranks:
                self.remarks.add(
                    "collectives of a group that torch.distributed does not list: unseen"
                )
                return NO_TRANSFER
            known = self._groups[id(group)] = _describe(group)
        peer = -1
        if payload.peer is not None and len(values) > payload.peer:
            peer = known.ranks[int(values[payload.peer])]
        # Reading a size would call every active torch function mode.
        with _WithoutModes():
            nbytes = payload.nbytes(values)
        kind = known.kinds.get((name, peer, nbytes is None))
        if kind is None:
            # NCCL creates a separate communicator for two ranks whose messages are not batched.
            if payload.peer is None or self._coalesced is not None:
                _note_call(group, payload.collective, peer)
            kind = known.kinds[name, peer, nbytes is None] = log.kind_number(
                TransferKind(
                    collective=payload.collective if nbytes is not None else Collective.OTHER,
                    role=self._roles.of(group, known.ranks, payload.collective),
                    group=known.name,
                    ranks=known.ranks,
                    peer=peer,
                )
            )
        return self._recorder.add_transfer(kind, nbytes or 0)

    def _end_call(self, transfer: int, work: Any) -> None:
        is_done = work is None and self._coalesced is None
        self._recorder.end_wait(transfer, is_done=is_done)
        if self._coalesced is not None:
            self._coalesced.append(transfer)
        elif work is not None:
            self._remember(work, (transfer,))

    def _remember(self, work: Any, transfers: tuple[int, ...]) -> None:
        # A strong reference would extend the life of the transfer's buffers.
        self._works[id(work)] = (weakref.ref(work), transfers)

    def _wrap_start_coalescing(self, original: Any) -> Callable[..., Any]:
        recorder = self._recorder

        def start_coalescing(group: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.is_of_step:
                self._coalesced = []
            return original(group, *args, **kwargs)

        return stand_in(original, start_coalescing)

    def _wrap_end_coalescing(self, original: Any) -> Callable[..., Any]:
        recorder = self._recorder

        def end_coalescing(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.is_of_step:
                return original(group, *args, **kwargs)
            transfers, self._coalesced = self._coalesced, None
            work = original(group, *args, **kwargs)
            if work is not None and transfers:
                try:
                    self._remember(work, tuple(transfers))
                except Exception as err:
                    self._fault(err)
            return work

        return stand_in(original, end_coalescing)

    def _wrap_wait(self, original: Any) -> Callable[..., Any]:
        recorder, fault = self._recorder, self._fault

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            log = recorder.log
            if log is None or (log.is_full and log.current_pass < 0):
                return original(work, *args, **kwargs)
            is_part = self._is_in_call or recorder.is_in_exchange
            if is_part or not recorder.is_of_step:
                return original(work, *args, **kwargs)
            transfers: tuple[int, ...] = ()
            try:
                transfers = self._begin_wait(work)
            except Exception as err:
                fault(err)
            self._is_in_call = True
            try:
                return original(work, *args, **kwargs)
            finally:
                self._is_in_call = False
                try:
                    for transfer in reversed(transfers):
                        recorder.end_wait(transfer)
                except Exception as err:
                    fault(err)

        return stand_in(original, wait)

    def _begin_wait(self, work: Any) -> tuple[int, ...]:
        reference, transfers = self._works.pop(id(work), (None, ()))
        if reference is None or reference() is not work:
            transfers = (UNKNOWN_TRANSFER,)
        for transfer in transfers:
            self._recorder.begin_wait(transfer)
        return transfers


def _describe(group: Any) -> _Group:
    return _Group(
        name=f"{group.group_desc}#{group.group_name}",
        ranks=tuple(dist.get_process_group_ranks(group)),
    )
