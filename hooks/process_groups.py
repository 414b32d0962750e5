"""Collectives, seen at the methods of ``ProcessGroup``, below all import-time aliases.

Only these methods and ``Work.wait`` are replaced, at class level and during hooked steps alone.
Functional collectives (torch.compile, DTensor) do not pass here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

from ..calib.workload.collectives import GroupRole
from .guard import Guard
from .payloads import PAYLOADS, Payload, role_of
from .recorder import UNKNOWN_TRANSFER, Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    name: str
    role: GroupRole
    ranks: tuple[int, ...]


class ProcessGroupHooks:
    """Records every collective between ``install`` and ``remove``."""

    def __init__(self, recorder: Recorder, guard: Guard) -> None:
        self._recorder = recorder
        self._before = guard.protect(self._begin_call)
        self._after = guard.protect(self._end_call)
        self._before_wait = guard.protect(self._begin_work_wait)
        self._after_wait = guard.protect(recorder.end_wait)
        self._saved: list[tuple[type, str, Any]] = []
        self._groups: dict[int, _Group] = {}
        self._works: dict[int, tuple[Any, list[int]]] = {}
        self._coalesced: list[int] | None = None
        self._is_in_call = False

    def install(self) -> None:
        """Replace the methods; does nothing where they are replaced already."""
        if self._saved:
            return
        # One wrapper object per name: dynamo refuses one object under two names of torch.
        for name, payload in PAYLOADS.items():
            self._replace(ProcessGroup, name, lambda f, p=payload: self._wrap_call(f, p))
        self._replace(ProcessGroup, "_start_coalescing", self._wrap_start_coalescing)
        self._replace(ProcessGroup, "_end_coalescing", self._wrap_end_coalescing)
        self._replace(Work, "wait", self._wrap_wait)

    def remove(self) -> None:
        """Put the original methods back and forget the step's groups and works."""
        while self._saved:
            owner, name, original = self._saved.pop()
            setattr(owner, name, original)
        self._groups.clear()
        self._works.clear()
        self._coalesced = None
        self._is_in_call = False

    def _replace(self, owner: type, name: str, wrap: Callable[[Any], Callable[..., Any]]) -> None:
        original = vars(owner).get(name)
        if original is not None:
            setattr(owner, name, wrap(original))
            self._saved.append((owner, name, original))

    def _wrap_call(self, original: Any, payload: Payload) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_in_call or self._recorder.log is None:
                return original(group, *args, **kwargs)
            transfer = self._before(group, payload, args, kwargs) or UNKNOWN_TRANSFER
            work = None
            self._is_in_call = True
            try:
                work = original(group, *args, **kwargs)
                return work
            finally:
                self._is_in_call = False
                self._after(transfer, work)

        return call

    def _begin_call(
        self, group: Any, payload: Payload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> int:
        values = args if args else tuple(kwargs.values())
        known = self._group(group)
        peer = -1
        if payload.peer is not None and len(values) > payload.peer:
            peer = known.ranks[int(values[payload.peer])]
        transfer = self._recorder.add_transfer(
            collective=payload.collective,
            role=known.role,
            group=known.name,
            ranks=known.ranks,
            nbytes=payload.nbytes(values),
            peer=peer,
        )
        self._recorder.begin_wait(transfer)
        return transfer

    def _end_call(self, transfer: int, work: Any) -> None:
        self._recorder.end_wait(transfer)
        if self._coalesced is not None:
            self._coalesced.append(transfer)
        elif work is not None:
            self._remember(work, [transfer])
        elif self._recorder.log is not None:
            self._recorder.log.finished.add(transfer)

    def _remember(self, work: Any, transfers: list[int]) -> None:
        # A strong reference would keep the transfer's buffers alive longer than without us.
        self._works[id(work)] = (weakref.ref(work), transfers)

    def _wrap_start_coalescing(self, original: Any) -> Callable[..., Any]:
        def start_coalescing(group: Any, *args: Any, **kwargs: Any) -> Any:
            self._coalesced = []
            return original(group, *args, **kwargs)

        return start_coalescing

    def _wrap_end_coalescing(self, original: Any) -> Callable[..., Any]:
        def end_coalescing(group: Any, *args: Any, **kwargs: Any) -> Any:
            transfers, self._coalesced = self._coalesced, None
            work = original(group, *args, **kwargs)
            if work is not None and transfers:
                self._remember(work, transfers)
            return work

        return end_coalescing

    def _wrap_wait(self, original: Any) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_in_call or self._recorder.log is None:
                return original(work, *args, **kwargs)
            transfers = self._before_wait(work) or [UNKNOWN_TRANSFER]
            self._is_in_call = True
            try:
                return original(work, *args, **kwargs)
            finally:
                self._is_in_call = False
                for transfer in reversed(transfers):
                    self._after_wait(transfer)

        return wait

    def _begin_work_wait(self, work: Any) -> list[int]:
        reference, transfers = self._works.pop(id(work), (None, []))
        if reference is None or reference() is not work:
            transfers = [UNKNOWN_TRANSFER]
        for transfer in transfers:
            self._recorder.begin_wait(transfer)
        return transfers

    def _group(self, group: Any) -> _Group:
        known = self._groups.get(id(group))
        if known is None:
            description = group.group_desc
            known = _Group(
                name=f"{description}#{group.group_name}",
                role=role_of(description),
                ranks=tuple(dist.get_process_group_ranks(group)),
            )
            self._groups[id(group)] = known
        return known
