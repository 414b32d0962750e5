"""Collectives, seen at the methods of ``ProcessGroup``, below all import-time aliases.

Only these methods and ``Work.wait`` are replaced, at class level and during hooked steps alone.
Functional collectives (torch.compile, DTensor) do not pass here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

from ...calib.workload.collectives import Collective
from ..process.guard import Guard
from ..process.host import Reference, reference
from ..process.stand_in import stand_in
from .group_roles import GroupRoles
from .payloads import PAYLOADS, Payload
from .recorder import Recorder
from .step_log import NO_TRANSFER, UNKNOWN_TRANSFER, StepLog, TransferKind

_WithoutModes = torch._C.DisableTorchFunction
_called: dict[int, tuple[Reference, set[tuple[Collective, int]]]] = {}
"""Collective and peer of the calls that hooked steps have made, by group; it may be gone by now."""


def was_called(group: Any, collective: Collective, peer: int = -1) -> bool:
    """True where a hooked step has made such a call on the group's own communicator."""
    found, calls = _called.get(id(group), (None, set()))
    return found is not None and found() is group and (collective, peer) in calls


def _note_call(group: Any, collective: Collective, peer: int) -> None:
    known = _called.get(id(group))
    if known is None or known[0]() is not group:
        known = _called[id(group)] = (reference(group), set())
    known[1].add((collective, peer))


@dataclass(slots=True, kw_only=True)
class _Group:
    """A group of the running step, and its kinds of transfer by method and peer."""

    name: str
    ranks: tuple[int, ...]
    kinds: dict[tuple[str, int], int] = field(default_factory=dict)


@dataclass(slots=True)
class _Patch:
    """A method that is replaced, with the wrapper of what was found there last."""

    owner: type
    name: str
    wrap: Callable[[Any], Callable[..., Any]]
    original: Any = None
    wrapper: Any = None


class ProcessGroupHooks:
    """Records every collective between ``install`` and ``remove``; ``roles`` are its groups'."""

    def __init__(self, recorder: Recorder, guard: Guard, roles: GroupRoles | None = None) -> None:
        self._roles = roles or GroupRoles()
        self._recorder = recorder
        self._fault = guard.fault
        self._is_installed = False
        self._groups: dict[int, _Group] = {}
        self._works: dict[int, tuple[Any, tuple[int, ...]]] = {}
        self._coalesced: list[int] | None = None
        self._is_in_call = False
        # One wrapper object per name: dynamo refuses one object under two names of torch.
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
        """Replace the methods; does nothing where they are replaced already."""
        if self._is_installed:
            return
        self._is_installed = True
        for patch in self._patches:
            found = vars(patch.owner).get(patch.name)
            if found is not patch.original:
                patch.original, patch.wrapper = found, patch.wrap(found)
            if found is not None:
                setattr(patch.owner, patch.name, patch.wrapper)

    def remove(self) -> None:
        """Put the original methods back and forget the step's groups and works."""
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
            is_part = self._is_in_call or recorder.is_in_exchange
            if log is None or is_part or not recorder.is_of_step:
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
            known = self._groups[id(group)] = _describe(group)
        peer = -1
        if payload.peer is not None and len(values) > payload.peer:
            peer = known.ranks[int(values[payload.peer])]
        kind = known.kinds.get((name, peer))
        if kind is None:
            # NCCL makes a communicator of their own for two ranks whose messages are not batched.
            if payload.peer is None or self._coalesced is not None:
                _note_call(group, payload.collective, peer)
            kind = known.kinds[name, peer] = log.kind_number(
                TransferKind(
                    collective=payload.collective,
                    role=self._roles.of(group, known.ranks, payload.collective),
                    group=known.name,
                    ranks=known.ranks,
                    peer=peer,
                )
            )
        # Reading a size is a call of every torch function mode in force.
        with _WithoutModes():
            return self._recorder.add_transfer(kind, payload.nbytes(values))

    def _end_call(self, transfer: int, work: Any) -> None:
        is_done = work is None and self._coalesced is None
        self._recorder.end_wait(transfer, is_done=is_done)
        if self._coalesced is not None:
            self._coalesced.append(transfer)
        elif work is not None:
            self._remember(work, (transfer,))

    def _remember(self, work: Any, transfers: tuple[int, ...]) -> None:
        # A strong reference would keep the transfer's buffers alive longer than without us.
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
            is_part = self._is_in_call or recorder.is_in_exchange
            if is_part or recorder.log is None or not recorder.is_of_step:
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
