"""Exchanges of tokens with experts that call no ``ProcessGroup``: DeepEP's, HybridEP's, NCCL EP's.

Megatron's flexible dispatcher delegates them to a manager, whose two methods return when the tokens
have arrived: each call is one transfer, and its backward pass is one in the opposite direction.
If such a dispatcher has no manager, its own two methods count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from ...calib.marks.step_marks import TransferKind
from ...calib.workload.collectives import Collective, GroupRole
from ...calib.workload.routing import expected_distinct
from ..process.guard import Guard
from ..process.inspection import attribute, class_names, is_tensor, tree
from .module_calls import Methods
from .modules import first_tensor, last_node, take_off
from .process_groups import tensor_nbytes
from .recorder import Recorder
from .sites import UnhookableParts, find_unhookable, unhookable_reason
from .step_log import StepLog

_AT_DISPATCHER = ("token_dispatch", "token_combine")
_AT_MANAGER = ("dispatch", "combine")
_BY_PROCESS_GROUP = frozenset({"MoEAlltoAllTokenDispatcher", "MoEAllGatherTokenDispatcher"})
"""Dispatchers whose transfers are torch collectives, recorded as such."""
_SENDS_EACH_ONCE = "_DeepepManager"
"""Manager whose rows are tokens; those of the others are copies, one for each expert."""
_number_of_nodes = getattr(torch.autograd, "_get_sequence_nr", lambda: 2**63)
_ACCUMULATES = 2**63
"""Least sequence number of nodes that accumulate gradients."""
_MOST_NODES = 64
_WithoutModes = torch._C.DisableTorchFunction
_Begun = tuple[StepLog, int, int]


class DispatchHooks:
    """Hooks that record these exchanges between ``install`` and ``remove``."""

    def __init__(self, models: Iterable[torch.nn.Module], recorder: Recorder, guard: Guard) -> None:
        chunks = list(models)
        self.recorder = recorder
        self.guard = guard
        self._methods = Methods(guard)
        self._marked: list[tuple[Any, Any]] = []
        unseen: list[str] = []
        dispatchers = list(_dispatchers(chunks))
        reach = find_unhookable(chunks, ()) if dispatchers else None
        for dispatcher in dispatchers:
            for end in _ends(dispatcher):
                reason = _why_not(reach, dispatcher, end)
                if reason is not None:
                    unseen.append(f"{_AT_DISPATCHER[not end.is_dispatch]}:{reason}")
                else:
                    self._methods.add(end.owner, end.name, Exchange(self, end))
        self.unseen = tuple(sorted(unseen))
        """Unrecorded methods, each with the reason, such as ``token_dispatch:captured``."""

    def install(self) -> None:
        """Install the hooks."""
        self._methods.install()

    def remove(self) -> None:
        """Remove the hooks; those on the graph of the running step stay and do nothing."""
        self._methods.remove()
        self._marked.clear()

    def drop_marks(self) -> None:
        """Remove the hooks from the graph before a compiler reads them."""
        take_off(self._marked)
        self._marked.clear()

    def put(self, node: Any, hook: Any) -> None:
        """Call ``hook`` when the engine reaches ``node``.

        A hook that the user registers later must get the same number as without us: it is part of a
        module's pickle.  Hooks of operators leave the counter unchanged as well, so ours are
        negative.
        """
        number = RemovableHandle.next_id
        RemovableHandle.next_id = -1 - len(self._marked)
        try:
            self._marked.append((node.register_prehook(hook), hook))
        finally:
            RemovableHandle.next_id = number


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """One of the two methods of an exchange, with the share of bytes it moves."""

    owner: Any
    name: str
    is_dispatch: bool
    kind: TransferKind
    at_experts: float
    """Moved bytes per byte of the rows at the experts; 0 if these do not determine them."""
    at_home: float
    """Moved bytes per byte of this rank's tokens."""

    def nbytes(self, values: tuple[Any, ...], output: Any) -> int:
        """Return the bytes moved by a call, to this rank as its experts see it."""
        given = next((value for value in values if is_tensor(value)), None)
        result = first_tensor(output)
        experts, home = (result, given) if self.is_dispatch else (given, result)
        if self.at_experts:
            return round((tensor_nbytes(experts) or 0) * self.at_experts)
        return round((tensor_nbytes(home) or 0) * self.at_home)


class Exchange:
    """Recorder of the calls of one such method."""

    __slots__ = ("_end", "_hooks", "_known", "_recorder")

    def __init__(self, hooks: DispatchHooks, end: _End) -> None:
        self._hooks, self._end = hooks, end
        self._recorder = hooks.recorder
        self._known: tuple[StepLog | None, int] = (None, 0)

    def begin(self, module: Any) -> _Begun | None:
        """Begin a call."""
        log = self._recorder.log
        if log is None or not self._recorder.is_of_step:
            return None
        first_node = _number_of_nodes()
        return log, self._begin(log, 0), first_node

    def end(self, begun: _Begun, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """End a call, whose bytes are known only now."""
        log, number, first_node = begun
        self._finish(number)
        with _WithoutModes():
            values = (*args, *kwargs.values())
            nbytes = self._end.nbytes(values, output)
            log.set_nbytes(number, self._kind(log), nbytes)
            self._follow_backward(log, nbytes, output, first_node)

    def fail(self, begun: _Begun) -> None:
        """End a call that raised."""
        self._finish(begun[1])

    def _kind(self, log: StepLog) -> int:
        if self._known[0] is not log:
            self._known = log, log.kind_number(self._end.kind)
        return self._known[1]

    def _begin(self, log: StepLog, nbytes: int) -> int:
        number = self._recorder.add_transfer(self._kind(log), nbytes)
        self._recorder.begin_wait(number)
        self._recorder.is_in_exchange = True
        return number

    def _finish(self, number: int) -> None:
        self._recorder.is_in_exchange = False
        self._recorder.end_wait(number, is_done=True)

    def _follow_backward(self, log: StepLog, nbytes: int, output: Any, first_node: int) -> None:
        """Mark the backward pass, from its first node to the first node behind its last."""
        result = first_tensor(output)
        begin = last_node(output, result) if result is not None else None
        if begin is None or not first_node <= begin._sequence_nr() < _ACCUMULATES:
            return
        ends = _behind(begin, first_node)
        if not ends:
            return  # the end of the exchange cannot be marked
        back = _BackwardExchange(self, log, nbytes)
        protect = self._hooks.guard.protect
        self._hooks.put(begin, partial(_reached, protect(back.begin)))
        for node in ends:
            self._hooks.put(node, partial(_reached, protect(back.end)))


def _reached(then: Any, gradients: Any) -> None:
    then()


class _BackwardExchange:
    """The backward pass of one call."""

    __slots__ = ("_exchange", "_log", "_nbytes", "_number")

    def __init__(self, exchange: Exchange, log: StepLog, nbytes: int) -> None:
        self._exchange, self._log, self._nbytes = exchange, log, nbytes
        self._number: int | None = None

    def begin(self) -> None:
        """Begin when the engine reaches its first node."""
        if self._log.is_open and self._number is None:
            self._number = self._exchange._begin(self._log, self._nbytes)

    def end(self) -> None:
        """End when the engine reaches a node behind it."""
        number, self._number = self._number, None
        if self._log.is_open and number is not None:
            self._exchange._finish(number)


def _behind(node: Any, first_node: int) -> list[Any]:
    """Return the nodes of a call's inputs: those created in it have numbers from ``first_node``
    on."""
    waiting, seen, input_nodes = [node], {node}, []
    while waiting and len(seen) < _MOST_NODES:
        for behind, _ in waiting.pop().next_functions:
            if behind is None or behind in seen:
                continue
            seen.add(behind)
            is_in_call = first_node <= behind._sequence_nr() < _ACCUMULATES
            (waiting if is_in_call else input_nodes).append(behind)
    return input_nodes


def _dispatchers(models: Iterable[torch.nn.Module]) -> Iterator[Any]:
    for module in tree(*models):
        dispatcher = attribute(module, "token_dispatcher")
        if dispatcher is not None and not class_names(dispatcher) & _BY_PROCESS_GROUP:
            yield dispatcher


def _ends(dispatcher: Any) -> Iterator[_End]:
    """Yield both methods if they exist and have a process group."""
    manager = attribute(dispatcher, "_comm_manager")
    owner, names = (dispatcher, _AT_DISPATCHER) if manager is None else (manager, _AT_MANAGER)
    group = attribute(manager, "group") or attribute(dispatcher, "tp_ep_group")
    if group is None:
        return
    kind = TransferKind(
        collective=Collective.ALL_TO_ALL,
        role=GroupRole.EXPERT_TP_EP,
        group=f"{group.group_desc}#{group.group_name}",
        ranks=tuple(dist.get_process_group_ranks(group)),
    )
    at_experts, at_home = _shares(dispatcher, manager)
    for name in names:
        if attribute(owner, name) is not None:
            yield _End(
                owner=owner,
                name=name,
                is_dispatch=name == names[0],
                kind=kind,
                at_experts=at_experts,
                at_home=at_home,
            )


def _shares(dispatcher: Any, manager: Any) -> tuple[float, float]:
    """Return the moved bytes per byte of rows at the experts, and per byte of this rank's tokens.

    A token is sent once to each rank that has one of its experts.  The size of a fixed buffer does
    not show how much of it is used: then the sent tokens count.
    """
    config = attribute(dispatcher, "config")
    chosen = int(attribute(config, "moe_router_topk") or 0)
    if manager is None or _SENDS_EACH_ONCE in class_names(manager) or not chosen:
        return 1.0, 1.0
    distinct = expected_distinct(
        num_groups=int(attribute(dispatcher, "ep_size") or 1),
        num_chosen=chosen,
        group_size=int(attribute(dispatcher, "num_local_experts") or 1),
    )
    reached = distinct * int(attribute(dispatcher, "tp_size") or 1)
    is_fixed = attribute(manager, "moe_expert_rank_capacity_factor") is not None
    return (0.0 if is_fixed else distinct / chosen), reached


def _why_not(reach: UnhookableParts | None, dispatcher: Any, end: _End) -> str | None:
    name = _AT_DISPATCHER[not end.is_dispatch]
    reason = reach.why(dispatcher, name) if reach is not None else None
    return reason or unhookable_reason(end.owner, end.name)
