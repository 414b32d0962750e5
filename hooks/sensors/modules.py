"""Operators, seen at the modules of a Megatron model: covered methods, marks on autograd nodes.

Full backward hooks are out of the question: they make Megatron's outputs views, which it then
modifies in place.  A backward pass begins where the engine reaches the node of a module's output
and ends where it reaches the node of an input; both marks go with the graph.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ...calib.workload.operators import OperatorKind
from ..process.guard import Guard
from .recorder import Recorder, backward_mark
from .regions import is_being_compiled
from .sites import FORWARD, find_places, untraceable, why_not
from .step_log import NO_SPAN, Site, StepLog

_MARKS = "forerun"
_WithoutModes = torch._C.DisableTorchFunction


class ModuleHooks:
    """Marks around the operators of a model, between ``install`` and ``remove``.

    A ``forward`` on the instance covers that of its class: it costs no more than a call, runs
    inside all hooks of torch (so that what they wait for is no operator's), and is taken away
    without a trace.  Modules are found again by weak references.
    """

    def __init__(self, models: Iterable[torch.nn.Module], recorder: Recorder, guard: Guard) -> None:
        chunks = list(models)
        self._recorder = recorder
        self._guard = guard
        out_of_reach = untraceable(chunks)
        covers: list[tuple[weakref.ref[Any], str, Callable[..., Any]]] = []
        sites: list[Site] = []
        unseen: list[str] = []
        for owner, name, site in find_places(chunks):
            reason = out_of_reach.get(id(owner)) or why_not(owner, name)
            if reason is not None:
                unseen.append(f"{site.kind.value}:{reason}")
                continue
            covers.append((weakref.ref(owner), name, self._cover(len(sites), site, owner, name)))
            sites.append(site)
        self._covers = tuple(covers)
        self.sites = tuple(sites)
        self.unseen = tuple(sorted(unseen))
        """What is not recorded, each with the reason, such as ``linear_fc1:compiled``."""

    def install(self) -> None:
        """Cover all operators; what another has put in the place meanwhile is left alone."""
        for reference, name, cover in self._covers:
            owner = reference()
            if owner is not None:
                # A method of the instance: copied and pickled, it is the copy's method.
                vars(owner).setdefault(name, MethodType(cover, owner))

    def remove(self) -> None:
        """Uncover them; marks on the graph of the running step stay and do nothing."""
        for reference, name, cover in self._covers:
            owner = reference()
            if owner is not None and getattr(vars(owner).get(name), "__func__", None) is cover:
                del vars(owner)[name]

    def _cover(self, number: int, site: Site, owner: Any, name: str) -> Callable[..., Any]:
        recorder, begin, finish = self._recorder, self._recorder.begin_span, self._end_span
        fault, original = self._guard.fault, getattr(type(owner), name)
        is_forward, read, reference = name == FORWARD, _reader(site), weakref.ref(owner)

        def cover(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_being_compiled():
                return original(self, *args, **kwargs)
            log = recorder.log
            if log is None or not log.is_sampling or self is not reference():
                return original(self, *args, **kwargs)
            span = NO_SPAN
            try:
                span = begin(number)
            except Exception as err:
                fault(err)
            output = original(self, *args, **kwargs)
            if span >= 0:
                try:
                    told_by = self if is_forward else name
                    finish(log, span, read, told_by, (*args, *kwargs.values()), output)
                except Exception as err:
                    fault(err)
            return output

        functools.update_wrapper(cover, original)
        return cover

    def _end_span(
        self,
        log: StepLog,
        span: int,
        read: ReadShape,
        owner: Any,
        values: tuple[Any, ...],
        output: Any,
    ) -> None:
        at = self._recorder.stopwatch.mark()
        raw, nbytes = None, 0
        # Reading a shape is a call of every torch function mode and tensor subclass in force.
        with _WithoutModes():
            inputs = _activations(values)
            result = _first_tensor(output)
            if inputs and result is not None:
                raw = read(owner, inputs, result)
                if read is _grouped:
                    raw = (*raw, _rows_of_experts(values, raw[-1]))
                nbytes = _element_nbytes(inputs, result)
                node = result.grad_fn
                if node is not None:
                    self._follow_backward(log, span, inputs, node)
        self._recorder.end_span(span, at, raw, nbytes)

    def _follow_backward(
        self, log: StepLog, span: int, inputs: list[torch.Tensor], node: Any
    ) -> None:
        self._mark_node(log, node, backward_mark(span, is_begin=True))
        last, latest = None, -1
        for tensor in inputs:
            if tensor.requires_grad:
                node = tensor.grad_fn or get_gradient_edge(tensor).node
                # Of nodes that are ready, the engine runs the one that was created last.
                sequence = node._sequence_nr()
                if sequence > latest:
                    last, latest = node, sequence
        if last is not None:
            self._mark_node(log, last, backward_mark(span, is_begin=False))

    def _mark_node(self, log: StepLog, node: Any, what: int) -> None:
        """Mark when the engine reaches ``node``.  One hook per node: most are shared by modules."""
        metadata = node.metadata
        known = metadata.get(_MARKS)
        if known is not None and known[0] is log:
            known[1].append(what)
            return
        marks = [what]
        metadata[_MARKS] = (log, marks)
        node.register_prehook(functools.partial(self._reached, log, marks))

    def _reached(self, log: StepLog, marks: list[int], gradients: Any) -> None:
        try:
            self._recorder.mark_backward(log, marks)
        except Exception as err:
            self._guard.fault(err)


def _activations(values: tuple[Any, ...]) -> list[torch.Tensor]:
    """Tensors among the arguments; a parameter (a shared embedding) is no activation."""
    return [
        value
        for value in values
        if type(value) is torch.Tensor
        or (
            value is not None
            and isinstance(value, torch.Tensor)
            and type(value) is not torch.nn.Parameter
        )
    ]


def _first_tensor(value: Any) -> torch.Tensor | None:
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value if isinstance(value, torch.Tensor) else None


ReadShape = Callable[[Any, list[torch.Tensor], torch.Tensor], tuple[Any, ...]]
"""What ``canonical_shape`` takes, from the module (or the method's name), inputs and result."""


def _reader(site: Site) -> ReadShape:
    if site.kind is OperatorKind.GROUPED_LINEAR:
        return _grouped
    told, more = site.shape_of, _MORE.get(site.kind)
    if told is not None:
        return lambda owner, inputs, result: (None, told(tuple(result.shape)))
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
    return (inputs[0].shape, result.shape, int(owner.num_gemms))


def _rows_of_experts(values: tuple[Any, ...], number: int) -> tuple[int, ...]:
    """As the host has them in a list; a tensor of them is not waited for."""
    for value in values:
        if type(value) is list and len(value) == number and all(type(n) is int for n in value):
            return tuple(value)
    return ()


_READERS: Mapping[OperatorKind, ReadShape] = {
    OperatorKind.LOSS: _loss,
    OperatorKind.PERMUTE: _permute,
}


def _rows_of_table(owner: Any, inputs: list[torch.Tensor]) -> tuple[int]:
    rows = getattr(getattr(owner, "word_embeddings", None), "weight", None)
    return (0 if rows is None else rows.shape[0],)


def _gates(owner: Any, inputs: list[torch.Tensor]) -> tuple[int, ...]:
    return (2,) if getattr(getattr(owner, "config", None), "gated_linear_unit", False) else ()


def _rotated_channels(owner: Any, inputs: list[torch.Tensor]) -> tuple[int, ...]:
    """With latent attention only some channels of a head carry positions."""
    config = getattr(owner, "config", None)
    is_latent = getattr(config, "multi_latent_attention", False)
    return (int(getattr(config, "qk_pos_emb_head_dim", 0)),) if is_latent else ()


_MORE: Mapping[OperatorKind, Callable[[Any, list[torch.Tensor]], tuple[Any, ...]]] = {
    OperatorKind.EMBEDDING: _rows_of_table,
    OperatorKind.CORE_ATTENTION: lambda owner, inputs: tuple(t.shape for t in inputs[1:3]),
    OperatorKind.ACTIVATION: _gates,
    OperatorKind.POSITION: _rotated_channels,
}
"""What the two ends do not show, as a gate beside the values."""


def _element_nbytes(inputs: list[torch.Tensor], result: torch.Tensor) -> int:
    for tensor in inputs:
        dtype = tensor.dtype
        if dtype.is_floating_point:
            return dtype.itemsize
    return result.dtype.itemsize
