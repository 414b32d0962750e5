"""Operators, recorded at calls of a model's modules and at marks on autograd nodes.

Full backward hooks are unsuitable: they make Megatron's outputs views, which it then modifies in
place.  A backward pass begins when the engine reaches the node of a module's output and ends when
it reaches the node of an input; both marks disappear with the graph.

FSDP2's work around a module that it shards is not part of any operator.  Its hook gathers the
parameters inside the call of the module: the span restarts once they are gathered, with the
arguments that the module then gets.  In the backward pass it gathers and reduces between the nodes
of the graph, while the preceding operator is still open: that is a pause.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ...calib.marks.step_marks import NO_SPAN
from ...calib.workload.operators import OperatorKind
from ..process.guard import Guard
from ..process.inspection import attribute, class_names, is_tensor
from ..process.stand_ins import StandIns
from .module_calls import CALLS, Methods, entries_of
from .recorder import Recorder, around_mark, backward_mark
from .sites import FORWARD, find_places, find_unhookable, natures, unhookable_reason
from .step_log import Site, StepLog

_backward_pass = getattr(torch._C, "_current_graph_task_id", lambda: 0)
_WithoutModes = torch._C.DisableTorchFunction
_Begun = tuple[StepLog, int]
_HOMES = (
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "torch.distributed._composable.fsdp._fsdp_param_group",
)
"""Module of FSDP2's parameter groups in torch 2.6 and later, and before."""
_CLASS, _BEFORE = "FSDPParamGroup", "pre_forward"
_BETWEEN = ("pre_backward", "post_backward")
SHARDED = "FSDPModule"
"""Base class of every module that FSDP2 shards."""


class ModuleHooks:
    """Marks around the operators of a model, between ``install`` and ``remove``.

    Modules are known by weak references and identity, and are not modified.
    """

    def __init__(self, models: Iterable[torch.nn.Module], recorder: Recorder, guard: Guard) -> None:
        chunks = list(models)
        self.recorder = recorder
        self._guard = guard
        self.gathers = ParameterGatherHooks(recorder, guard)
        self._methods = Methods(guard)
        places = find_places(chunks)
        out_of_reach = find_unhookable(chunks, places)
        spans: list[tuple[Any, Span]] = []
        sites: list[Site] = []
        unseen: list[str] = []
        for owner, name, site in places:
            reason = out_of_reach.why(owner, name) or unhookable_reason(owner, name)
            if reason is not None:
                unseen.append(f"{site.kind.value}:{reason}")
                continue
            kind = ShardedSpan if SHARDED in class_names(owner) else Span
            span = kind(self, len(sites), _reader(site), "" if name == FORWARD else name)
            if name == FORWARD:
                spans.append((owner, span))
            else:
                self._methods.add(owner, name, span)
            sites.append(site)
        self._spans: dict[int, Any] = entries_of(spans, guard)
        self.natures = natures(places)
        self._marked: dict[int, tuple[RemovableHandle, Any, list[int]]] = {}
        self.sites = tuple(sites)
        self.unseen = tuple(sorted(unseen))
        """Unrecorded operators, each with the reason, such as ``linear_fc1:compiled``."""

    def install(self, weights: Sequence[float] = ()) -> None:
        """Watch the operators whose sites have a weight, all if there are no weights."""
        spans = self._spans
        if weights:
            spans = {key: entry for key, entry in spans.items() if weights[entry[1].number]}
        CALLS.watch(self, spans)
        if self._spans:
            self.gathers.install()
        self._methods.install()

    def remove(self) -> None:
        """Stop watching; marks on the graph of the running step stay and do nothing."""
        CALLS.unwatch(self)
        self.gathers.remove()
        self._methods.remove()
        self._marked.clear()

    def drop_marks(self) -> None:
        """Remove the marks from the graph before a compiler reads its hooks."""
        take_off(self._marked.values())
        self._marked.clear()

    def end(
        self,
        begun: _Begun,
        read: ReadShape,
        owner: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        """End an operator's call; ``owner`` is the module, or the name of the method."""
        at = self.recorder.stopwatch.mark()
        log, span = begun
        raw, nbytes = None, 0
        # Reading a shape would call every active torch function mode and tensor subclass.
        with _WithoutModes():
            values = (*args, *kwargs.values())
            inputs = _activations(values)
            result = first_tensor(output)
            if inputs and result is not None:
                raw = read(owner, [local(tensor) for tensor in inputs], local(result))
                if read is _grouped:
                    raw = (*raw, _rows_of_experts(values, raw[-1]))
                nbytes = _element_nbytes(inputs, result)
                node = result.grad_fn if result is output else last_node(output, result)
                if node is not None:
                    last = self._follow_backward(log, span, inputs, node)
                    if last is not None and self.sites[log.span_sites[span]].has_siblings:
                        self._follow_work_around(log, span, last)
        self.recorder.end_span(span, at, raw, nbytes)

    def _follow_backward(
        self, log: StepLog, span: int, inputs: list[torch.Tensor], node: Any
    ) -> Any:
        """Mark both ends of its backward pass.

        Return the input's node that ends it, or None if that node belongs to an operator itself.
        """
        self._mark_node(log, node, backward_mark(span, is_begin=True))
        last, latest = None, -1
        for tensor in inputs:
            if tensor.requires_grad:
                node = tensor.grad_fn or get_gradient_edge(tensor).node
                # The engine runs the most recently created of the ready nodes.
                sequence = node._sequence_nr()
                if sequence > latest:
                    last, latest = node, sequence
        if last is None or (not last.next_functions and _backward_pass() < 0):
            # A stage's received input is reached before the weights' nodes: the operator ends with
            # the pass.
            return None
        is_of_operator = self._marks_on(last) is not None
        self._mark_node(log, last, backward_mark(span, is_begin=False))
        return None if is_of_operator else last

    def _follow_work_around(self, log: StepLog, span: int, node: Any) -> None:
        """Mark where the work around ``span`` resumes between its sibling operators.

        Autograd runs in reverse: after the product of the keys comes the work done on the queries
        before it, and then the product of the queries.
        """
        waiting, seen = [node], {node}
        while waiting and len(seen) < _MOST_NODES:
            node = waiting.pop()
            behind = {one for one, _ in node.next_functions if one is not None}
            unmarked = {one for one in behind if self._marks_on(one) is None}
            if len(unmarked) < len(behind) and self._marks_on(node) is None:
                self._mark_node(log, node, around_mark(span))
            waiting += unmarked - seen
            seen |= unmarked

    def _mark_node(self, log: StepLog, node: Any, what: int) -> None:
        """Mark when the engine reaches ``node``.  One hook per node: most are shared by modules."""
        known = self._marks_on(node)
        if known is not None:
            known.append(what)
            return
        marks = [what]
        number = RemovableHandle.next_id
        hook = functools.partial(self._reached, log, marks)
        self._marked[id(node.metadata)] = node.register_prehook(hook), hook, marks
        # A hook that the user registers later must get the same number as without us: it is part
        # of a module's pickle.
        if RemovableHandle.next_id == number + 1:
            RemovableHandle.next_id = number

    def _marks_on(self, node: Any) -> list[int] | None:
        """Return the running step's marks on a node, such as the end of an operator; None without.

        A node's metadata, which is the user's, exists as long as the node, unlike the Python object
        that represents it; so do the node's hooks, without which the identity is another node's.
        """
        known = self._marked.get(id(node.metadata))
        return known[2] if known is not None and known[0].hooks_dict_ref() is not None else None

    def _reached(self, log: StepLog, marks: list[int], gradients: Any) -> None:
        try:
            self.recorder.mark_backward(log, marks)
        except Exception as err:
            self._guard.fault(err)


class Span:
    """Recorder of one operator's calls, as a module or as a method of that name."""

    __slots__ = ("_hooks", "_method", "_read", "_recorder", "number")

    def __init__(self, hooks: ModuleHooks, number: int, read: ReadShape, method: str) -> None:
        self._hooks, self.number, self._read, self._method = hooks, number, read, method
        self._recorder = hooks.recorder

    def begin(self, module: Any) -> _Begun | None:
        """Begin a call; None if it is not recorded."""
        log = self._recorder.log
        if log is None or not log.is_sampling:
            return None
        span = self._recorder.begin_span(self.number)
        return None if span == NO_SPAN else (log, span)

    def end(self, begun: _Begun, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """End a call."""
        self._hooks.end(begun, self._read, self._method or module, args, kwargs, output)

    def fail(self, begun: _Begun) -> None:
        """Drop a call that raised, such as a recomputed layer stopped early: no record."""
        log, span = begun
        if self._recorder.log is log:
            self._recorder.end_span(span, self._recorder.stopwatch.mark(), None, 0)


class ShardedSpan(Span):
    """Span of a module whose parameters are gathered inside the call."""

    __slots__ = ()

    def begin(self, module: Any) -> _Begun | None:
        """Begin a call."""
        begun = super().begin(module)
        if begun is not None:
            self._hooks.gathers.begin(module, begun[1])
        return begun

    def end(self, begun: _Begun, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """End a call."""
        given = self._hooks.gathers.end(begun[1]) or (args, kwargs)
        super().end(begun, module, *given, output)

    def fail(self, begun: _Begun) -> None:
        """Drop a call that raised, with its arguments."""
        self._hooks.gathers.end(begun[1])
        super().fail(begun)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that is distributed over several (DTensor)."""
    return tensor if type(tensor) is torch.Tensor else attribute(tensor, "_local_tensor", tensor)


def _activations(values: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the tensors among the arguments, except parameters (a shared embedding)."""
    return [
        value
        for value in values
        if type(value) is torch.Tensor
        or (value is not None and is_tensor(value) and type(value) is not torch.nn.Parameter)
    ]


_MOST_NODES = 48
"""Limit on nodes inspected in the work around an operator."""


def last_node(output: Any, result: torch.Tensor) -> Any:
    """Return the node that autograd runs first among those of a result: the latest created."""
    last, latest = result.grad_fn, -1
    if last is None or not issubclass(type(output), (tuple, list)):
        return last
    kind = tuple if issubclass(type(output), tuple) else list
    for value in kind.__iter__(output):
        node = value.grad_fn if is_tensor(value) else None
        sequence = node._sequence_nr() if node is not None else -1
        if sequence > latest:
            last, latest = node, sequence
    return last


def take_off(marked: Iterable[tuple[Any, ...]]) -> None:
    """Remove hooks that are still on the graph, each after the handle of its registration."""
    for handle, hook, *_ in marked:
        hooks = handle.hooks_dict_ref()
        if hooks is not None and hooks.get(handle.id) is hook:
            handle.remove()


def first_tensor(value: Any) -> torch.Tensor | None:
    """Return the tensor that a call returned, or the first of several; None if there is none."""
    if type(value) is torch.Tensor:
        return value
    for kind in (tuple, list, tuple, list):
        if issubclass(type(value), kind) and kind.__len__(value):
            value = kind.__getitem__(value, 0)
    return value if is_tensor(value) else None


ReadShape = Callable[[Any, list[torch.Tensor], torch.Tensor], tuple[Any, ...]]
"""Reader of ``canonical_shape``'s input from the module (or the method's name), inputs and
result."""


def _reader(site: Site) -> ReadShape:
    if site.kind is OperatorKind.GROUPED_LINEAR:
        return _grouped
    shape_of, more = site.shape_of, _MORE.get(site.kind)
    if shape_of is not None:
        return lambda owner, inputs, result: (None, shape_of(tuple(result.shape)))
    if more is not None:
        return lambda owner, inputs, result: (inputs[0].shape, result.shape, *more(owner, inputs))
    return _READERS.get(site.kind, lambda owner, inputs, result: (inputs[0].shape, result.shape))


def _loss(owner: Any, inputs: list[torch.Tensor], result: torch.Tensor) -> tuple[Any, ...]:
    first = next((t for t in inputs if t.is_floating_point()), inputs[0])
    return (first.shape, result.shape)


def _permute(owner: Any, inputs: list[torch.Tensor], result: torch.Tensor) -> tuple[Any, ...]:
    rows = result if str(owner).startswith("dispatch") else inputs[0]
    return (rows.shape, rows.shape)


def _grouped(owner: Any, inputs: list[torch.Tensor], result: torch.Tensor) -> tuple[Any, ...]:
    return (inputs[0].shape, result.shape, int(attribute(owner, "num_gemms")))


def _rows_of_experts(values: tuple[Any, ...], number: int) -> tuple[int, ...]:
    """Return the rows of each expert from a list on the host; a tensor would need
    synchronisation."""
    for value in values:
        if type(value) is list and len(value) == number and all(type(n) is int for n in value):
            return tuple(value)
    return ()


_READERS: Mapping[OperatorKind, ReadShape] = {
    OperatorKind.LOSS: _loss,
    OperatorKind.PERMUTE: _permute,
}


def _rows_of_table(owner: Any, inputs: list[torch.Tensor]) -> tuple[int]:
    rows = attribute(attribute(owner, "word_embeddings"), "weight")
    return (rows.shape[0] if is_tensor(rows) else 0,)


def _gates(owner: Any, inputs: list[torch.Tensor]) -> tuple[int, ...]:
    return (2,) if attribute(attribute(owner, "config"), "gated_linear_unit") else ()


def _rotated_channels(owner: Any, inputs: list[torch.Tensor]) -> tuple[int, ...]:
    """Return the channels with positions, if latent attention limits them to a part of each
    head."""
    config = attribute(owner, "config")
    is_latent = attribute(config, "multi_latent_attention")
    return (int(attribute(config, "qk_pos_emb_head_dim", 0)),) if is_latent else ()


_MORE: Mapping[OperatorKind, Callable[[Any, list[torch.Tensor]], tuple[Any, ...]]] = {
    OperatorKind.EMBEDDING: _rows_of_table,
    OperatorKind.CORE_ATTENTION: lambda owner, inputs: tuple(t.shape for t in inputs[1:3]),
    OperatorKind.ACTIVATION: _gates,
    OperatorKind.POSITION: _rotated_channels,
}
"""Readers of shape details that input and output lack, such as gates."""


def _element_nbytes(inputs: list[torch.Tensor], result: torch.Tensor) -> int:
    for tensor in inputs:
        dtype = tensor.dtype
        if dtype.is_floating_point:
            return dtype.itemsize
    return result.dtype.itemsize


class ParameterGatherHooks:
    """Stand-ins for the work of a group of sharded parameters before and between operators."""

    def __init__(self, recorder: Recorder, guard: Guard) -> None:
        self._recorder = recorder
        self._restart_span = guard.protect(self._on_gathered)
        self._pause = guard.protect(recorder.begin_pause)
        self._go_on = guard.protect(recorder.end_pause)
        self._spans: dict[int, int] = {}
        self._given: dict[int, tuple[Any, Any]] = {}
        self._stand_ins = StandIns()

    def install(self) -> None:
        """Install them if FSDP2 is imported."""
        home = next((m for m in map(sys.modules.get, _HOMES) if m is not None), None)
        owner = vars(home).get(_CLASS) if home is not None else None
        if owner is not None:
            self._stand_ins.put(owner, _BEFORE, self._beginning)
            for name in _BETWEEN:
                self._stand_ins.put(owner, name, self._pausing)

    def remove(self) -> None:
        """Remove them, and forget the running calls."""
        self._stand_ins.remove()
        self._spans.clear()
        self._given.clear()

    def begin(self, module: Any, span: int) -> None:
        """Begin a span of a sharded module, before its parameters are gathered."""
        self._spans[id(module)] = span

    def end(self, span: int) -> tuple[Any, Any] | None:
        """End a call: return the arguments that the module itself got, if they are known."""
        self._spans = {key: running for key, running in self._spans.items() if running != span}
        return self._given.pop(span, None)

    def _beginning(self, original: Any) -> Any:
        def pre_forward(group: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            given = original(group, module, *args, **kwargs)
            self._restart_span(module, given)
            return given

        return pre_forward

    def _pausing(self, original: Any) -> Any:
        def between(group: Any, *args: Any, **kwargs: Any) -> Any:
            is_paused = self._pause()
            try:
                return original(group, *args, **kwargs)
            finally:
                if is_paused:
                    self._go_on()

        return between

    def _on_gathered(self, module: Any, given: Any) -> None:
        span = self._spans.get(id(module))
        if span is None:
            return
        if type(given) is tuple and len(given) == 2:
            self._given[span] = given
        self._recorder.restart_span(span)
