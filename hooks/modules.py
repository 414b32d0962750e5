"""Operators, seen at the modules of a Megatron model: forward hooks and marks on autograd nodes.

Full backward hooks are out of the question: they make Megatron's outputs views, which it then
modifies in place.  A backward pass begins where the engine reaches the node of a module's output
and ends where it reaches the node of an input; both marks go with the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ..calib.workload.operators import OperatorKind
from .guard import Guard
from .recorder import Recorder, Site, StepLog, backward_mark

_BY_ATTRIBUTE = {
    "input_layernorm": OperatorKind.NORM,
    "pre_mlp_layernorm": OperatorKind.NORM,
    "q_layernorm": OperatorKind.NORM,
    "k_layernorm": OperatorKind.NORM,
    "kv_layernorm": OperatorKind.NORM,
    "enorm": OperatorKind.NORM,
    "hnorm": OperatorKind.NORM,
    "final_layernorm": OperatorKind.NORM,
    "linear_q_proj": OperatorKind.LINEAR,
    "linear_q_down_proj": OperatorKind.LINEAR,
    "linear_q_up_proj": OperatorKind.LINEAR,
    "linear_kv_down_proj": OperatorKind.LINEAR,
    "linear_kv_up_proj": OperatorKind.LINEAR,
    "eh_proj": OperatorKind.LINEAR,
    "linear_qkv": OperatorKind.LINEAR_QKV,
    "core_attention": OperatorKind.CORE_ATTENTION,
    "linear_proj": OperatorKind.LINEAR_PROJ,
    "linear_fc1": OperatorKind.LINEAR_FC1,
    "linear_fc2": OperatorKind.LINEAR_FC2,
    "output_layer": OperatorKind.LOGITS,
}
_BY_CLASS = {
    "LanguageModelEmbedding": OperatorKind.EMBEDDING,
    "SelfAttention": OperatorKind.POSITION,
    "MLASelfAttention": OperatorKind.POSITION,
    "MLP": OperatorKind.ACTIVATION,
    "TEGroupedMLP": OperatorKind.ACTIVATION,
    "SequentialMLP": OperatorKind.PERMUTE,
    "TopKRouter": OperatorKind.ROUTER,
    "TransformerLayer": OperatorKind.RESIDUAL,
}
_GROUPED = "TEGroupedLinear"
_NOTHING_INSIDE = frozenset({"IdentityOp", "IdentityFuncOp"})
_MARKS = "forerun"
_LOSS = "compute_language_model_loss"
_JOIN = "_concat_embeddings"
"""Method of a prediction layer that joins its two inputs, which may run again."""
_AT_EXPERTS = ("dispatch_postprocess", "combine_preprocess")
_AT_HOME = ("dispatch_preprocess", "combine_postprocess")
"""Methods of a token dispatcher that copy rows, after their transfer and before it."""


def find_sites(models: Iterable[torch.nn.Module]) -> list[tuple[torch.nn.Module, Site]]:
    """The modules of Megatron's own layers that are operators, with their layer from 0 on."""
    found = []
    for model in models:
        prefix, layer = "\0", 0
        for name, module in model.named_modules():
            classes = {c.__name__ for c in type(module).__mro__}
            if "TransformerLayer" in classes:
                prefix, layer = name + ".", int(getattr(module, "layer_number", 1)) - 1
            kind = _kind(name, classes, module)
            if kind is not None:
                is_inside = name.startswith(prefix) or name + "." == prefix
                found.append((module, Site(kind=kind, layer=layer if is_inside else 0)))
    return found


def _kind(name: str, classes: set[str], module: torch.nn.Module) -> OperatorKind | None:
    if classes & _NOTHING_INSIDE:
        return None
    kind = _BY_ATTRIBUTE.get(name.rpartition(".")[2])
    if kind is not None:
        return OperatorKind.GROUPED_LINEAR if _GROUPED in classes else kind
    kind = next((kind for cls, kind in _BY_CLASS.items() if cls in classes), None)
    if kind is OperatorKind.PERMUTE and getattr(module, "num_local_experts", 1) == 1:
        return None  # a single expert's result is joined with no other
    return kind


def find_losses(models: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules that compute the loss of a language model (those on the last stage)."""
    return [
        module
        for model in models
        for module in model.modules()
        if hasattr(module, _LOSS) and getattr(module, "post_process", True)
    ]


def find_joins(models: Iterable[torch.nn.Module]) -> list[tuple[Any, str, Site]]:
    """Prediction layers, each with the name of the method that joins its two inputs."""
    return [
        (module, _JOIN, Site(kind=OperatorKind.ELEMENTWISE))
        for model in models
        for module in model.modules()
        if hasattr(module, _JOIN)
    ]


def find_dispatches(models: Iterable[torch.nn.Module]) -> list[tuple[Any, str, Site]]:
    """Token dispatchers of expert layers, each with the name of a method that copies rows."""
    found = []
    for model in models:
        for module in model.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            if dispatcher is None:
                continue
            layer = int(getattr(module, "layer_number", None) or 1) - 1
            site = Site(kind=OperatorKind.PERMUTE, layer=layer)
            is_exchange = "AlltoAll" in type(dispatcher).__name__
            names = _AT_HOME if is_exchange else ()
            if not is_exchange or getattr(dispatcher, "num_local_experts", 1) > 1:
                names = (*names, *_AT_EXPERTS)
            found += [(dispatcher, name, site) for name in names]
    return found


class ModuleHooks:
    """Hooks on the operators of a model, between ``install`` and ``remove``."""

    def __init__(self, models: Iterable[torch.nn.Module], recorder: Recorder, guard: Guard) -> None:
        chunks = list(models)
        self._recorder = recorder
        self._places = find_sites(chunks)
        losses = find_losses(chunks) if self._places else []
        self._methods: list[tuple[Any, str, Site]] = [
            *((module, _LOSS, Site(kind=OperatorKind.LOSS)) for module in losses),
            *find_dispatches(chunks),
            *find_joins(chunks),
        ]
        self._begin = guard.protect(recorder.begin_span)
        self._finish = guard.protect(self._end_span)
        self._mark_backward = guard.protect(recorder.mark_backward)
        self._handles: list[Any] = []
        methods = [site for _, _, site in self._methods]
        self.sites = (*(site for _, site in self._places), *methods)

    def install(self) -> None:
        """Register all hooks; does nothing where they are registered."""
        if self._handles:
            return
        for number, (module, _) in enumerate(self._places):
            before = partial(self._before_forward, number)
            after = partial(self._after_forward, number)
            self._handles.append(module.register_forward_pre_hook(before))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))
        for number, (owner, name, _) in enumerate(self._methods, start=len(self._places)):
            if name not in vars(owner):
                wrapped = self._wrap_method(number, name, getattr(owner, name))
                setattr(owner, name, wrapped)
                self._handles.append(_InstanceAttribute(owner, name, wrapped))

    def remove(self) -> None:
        """Take all hooks away; marks on the graph of the running step stay and do nothing."""
        while self._handles:
            self._handles.pop().remove()

    def _before_forward(self, number: int, module: torch.nn.Module, args: Any) -> None:
        self._begin(number)

    def _after_forward(
        self, number: int, module: torch.nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        self._finish(number, module, (*args, *kwargs.values()), output)

    def _wrap_method(
        self, number: int, name: str, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            self._begin(number)
            output = original(*args, **kwargs)
            self._finish(number, name, (*args, *kwargs.values()), output)
            return output

        return method

    def _end_span(
        self, number: int, owner: torch.nn.Module | str, values: tuple[Any, ...], output: Any
    ) -> None:
        span = self._recorder.end_span(number)
        if span < 0:
            return
        # Reading a shape is a call of every torch function mode and tensor subclass in force.
        with torch._C.DisableTorchFunction():
            inputs = _activations(values)
            result = _first_tensor(output)
            if inputs and result is not None:
                raw = _raw_shape(self.sites[number].kind, owner, inputs, result)
                self._recorder.describe_span(span, raw, _element_nbytes(inputs, result))
                self._follow_backward(span, inputs, result)
        self._recorder.end_hook()

    def _follow_backward(self, span: int, inputs: list[torch.Tensor], result: torch.Tensor) -> None:
        node = result.grad_fn
        log = self._recorder.log
        if node is None or log is None:
            return
        number = self._recorder.add_backward(span)
        self._mark_node(log, node, backward_mark(number, is_begin=True))
        end = backward_mark(number, is_begin=False)
        nodes = [
            tensor.grad_fn or get_gradient_edge(tensor).node
            for tensor in inputs
            if tensor.requires_grad
        ]
        if nodes:
            # Of nodes that are ready, the engine runs the one that was created last.
            self._mark_node(log, max(nodes, key=_sequence), end)

    def _mark_node(self, log: StepLog, node: Any, what: int) -> None:
        """Mark when the engine reaches ``node``.  One hook per node: most are shared by modules."""
        known = node.metadata.get(_MARKS)
        if known is not None and known[0] is log:
            known[1].append(what)
            return
        marks = [what]
        node.metadata[_MARKS] = (log, marks)
        mark = self._mark_backward

        def reached(gradients: Any) -> None:
            mark(log, marks)

        node.register_prehook(reached)


def _sequence(node: Any) -> int:
    return node._sequence_nr()


class _InstanceAttribute:
    """A method replaced on one instance; to remove is to uncover the class's own."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self._owner = owner
        self._name = name
        self._value = value

    def remove(self) -> None:
        if vars(self._owner).get(self._name) is self._value:
            del vars(self._owner)[self._name]


def _activations(values: tuple[Any, ...]) -> list[torch.Tensor]:
    """Tensors among the arguments; a parameter (a shared embedding) is no activation."""
    return [
        value
        for value in values
        if isinstance(value, torch.Tensor) and type(value) is not torch.nn.Parameter
    ]


def _first_tensor(value: Any) -> torch.Tensor | None:
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value if isinstance(value, torch.Tensor) else None


def _raw_shape(
    kind: OperatorKind,
    owner: torch.nn.Module | str,
    inputs: list[torch.Tensor],
    result: torch.Tensor,
) -> tuple[Any, ...]:
    """What ``canonical_shape`` takes; ``owner`` is the module, or the name of the method."""
    first = inputs[0]
    if kind is OperatorKind.LOSS:
        first = next((t for t in inputs if t.is_floating_point()), first)
    if kind is OperatorKind.EMBEDDING:
        rows = getattr(getattr(owner, "word_embeddings", None), "weight", None)
        return (first.shape, result.shape, 0 if rows is None else rows.shape[0])
    if kind is OperatorKind.CORE_ATTENTION:
        return (first.shape, result.shape, *(tensor.shape for tensor in inputs[1:3]))
    if kind is OperatorKind.PERMUTE:
        rows = result if str(owner).startswith("dispatch") else first
        return (rows.shape, rows.shape)
    more = _setting(kind, owner)
    return (first.shape, result.shape) if more is None else (first.shape, result.shape, more)


def _setting(kind: OperatorKind, owner: Any) -> int | None:
    """What no tensor shows: experts, gates, and the channels of a head that carry positions."""
    config = getattr(owner, "config", None)
    if kind is OperatorKind.GROUPED_LINEAR:
        return int(owner.num_gemms)
    if kind is OperatorKind.ACTIVATION and getattr(config, "gated_linear_unit", False):
        return 2
    if kind is OperatorKind.POSITION and getattr(config, "multi_latent_attention", False):
        return int(getattr(config, "qk_pos_emb_head_dim", 0))
    return None


def _element_nbytes(inputs: list[torch.Tensor], result: torch.Tensor) -> int:
    return next((t for t in inputs if t.is_floating_point()), result).element_size()
