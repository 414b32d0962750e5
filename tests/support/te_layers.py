"""Layers with the calls of Transformer Engine's, made of operators that a CPU has.

One autograd node contains a norm and a product.  Its backward runs the product of the input
gradient, that of the weight gradient, and the norm's own backward pass last; the weight gradient
goes into ``main_grad`` or is deferred until ``backward_dw``, and autograd then gets None.
(Transformer Engine d0067d0: ``pytorch/module/layernorm_linear.py``, ``linear.py``,
``grouped_linear.py``, ``_common.py``.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

_EPSILON = 1e-5


class WeightGradStore:
    """Weight-gradient products that are deferred until ``run``."""

    def __init__(self, *, is_delayed: bool) -> None:
        self.is_delayed = is_delayed
        self._pending: deque[Callable[[], None]] = deque()

    def put(self, product: Callable[[], None]) -> None:
        """Compute a product now, or defer it."""
        if self.is_delayed:
            self._pending.append(product)
        else:
            product()

    def run(self) -> None:
        """Compute the oldest deferred product."""
        if self._pending:
            self._pending.popleft()()


class _Te(nn.Module):
    """Weights and the computation of their gradients, into ``main_grad`` if ``is_fused``."""

    def __init__(
        self, inputs: int, outputs: int, *, count: int = 1, is_fused: bool, is_delayed: bool
    ) -> None:
        super().__init__()
        self.is_fused = is_fused
        self.store = WeightGradStore(is_delayed=is_delayed)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5) for _ in range(count)
        )
        for weight in self.weights if is_fused else ():
            weight.main_grad = torch.zeros(outputs, inputs)  # type: ignore[attr-defined]

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Compute a deferred weight gradient."""
        self.store.run()

    def weight_gradient(self, place: int, given: torch.Tensor, gradient: torch.Tensor) -> Any:
        """Compute or defer one weight gradient; return what autograd gets for it."""
        weight = self.weights[place]
        made: list[torch.Tensor] = []

        def product() -> None:
            if self.is_fused:
                grad = weight.main_grad  # type: ignore[attr-defined]
                torch.addmm(grad, gradient.t(), given, out=grad)
            elif self.store.is_delayed:
                weight.grad = gradient.t().mm(given)
            else:
                made.append(gradient.t().mm(given))

        self.store.put(product)
        return made[0] if made else None


class _LayerNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Any, gain: Any, weight: Any, layer: Any) -> Any:
        normed, mean, rstd = torch.native_layer_norm(hidden, gain.shape, gain, None, _EPSILON)
        ctx.save_for_backward(hidden, gain, weight, normed, mean, rstd)
        ctx.layer = layer
        flat = normed.reshape(-1, normed.shape[-1])
        return flat.mm(weight.t()).view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        hidden, gain, weight, normed, mean, rstd = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        into = flat.mm(weight).view(hidden.shape)
        of_weight = ctx.layer.weight_gradient(0, normed.reshape(-1, normed.shape[-1]), flat)
        into, of_gain, _ = torch.ops.aten.native_layer_norm_backward(
            into, hidden, gain.shape, mean, rstd, gain, None, [True, True, False]
        )
        return into, of_gain, of_weight, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, layer: Any) -> Any:
        ctx.save_for_backward(hidden, weight)
        ctx.layer = layer
        return hidden.reshape(-1, hidden.shape[-1]).mm(weight.t()).view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        hidden, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        into = flat.mm(weight).view(hidden.shape)
        of_weight = ctx.layer.weight_gradient(0, hidden.reshape(-1, hidden.shape[-1]), flat)
        return into, of_weight, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Any, layer: Any, splits: Any, *weights: Any) -> Any:
        ctx.save_for_backward(hidden, *weights)
        ctx.layer, ctx.splits = layer, splits
        parts = hidden.split(splits)
        out = hidden.new_empty(hidden.shape[0], weights[0].shape[0])
        layer.run_concurrently(
            lambda part, weight, into: torch.mm(part, weight.t(), out=into),
            parts,
            weights,
            out.split(splits),
        )
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        hidden, *weights = ctx.saved_tensors
        parts, gradients = hidden.split(ctx.splits), gradient.split(ctx.splits)
        into = torch.empty_like(hidden)
        ctx.layer.run_concurrently(
            lambda part, weight, out: torch.mm(part, weight, out=out),
            gradients,
            weights,
            into.split(ctx.splits),
        )
        results = [None] * len(weights)

        def product(place: int, part: Any, of_part: Any) -> None:
            results[place] = ctx.layer.weight_gradient(place, part, of_part)

        ctx.layer.run_concurrently(product, range(len(weights)), parts, gradients)
        return into, None, None, *results


class _Exchanged(torch.autograd.Function):
    """Products that overlap with the exchange of their pieces, as with ``--tp-comm-overlap``.

    Pieces run on alternating streams, each followed by its exchange on another, and the received
    values are summed last; the weight's product is whole and overlaps an exchange.  (Transformer
    Engine d0067d0:
    ``common/comm_gemm_overlap/comm_gemm_overlap.cpp``, ``CommOverlapP2PBase::split_overlap_rs``
    and ``bulk_overlap``.)
    """

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, layer: Any) -> Any:
        ctx.save_for_backward(hidden, weight)
        ctx.layer = layer
        return layer.in_pieces(hidden, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        hidden, weight = ctx.saved_tensors
        into = ctx.layer.in_pieces(gradient, weight)
        of_weight = None
        if ctx.needs_input_grad[1]:
            ctx.layer.exchange(gradient)
            of_weight = gradient.t().mm(hidden)
        torch.cuda.current_stream().wait_stream(ctx.layer.between)
        return into, of_weight, None


class TEExchangedLinear(nn.Module):
    """A product in ``num_pieces`` on two streams, with a third for exchanges."""

    def __init__(self, inputs: int, outputs: int, *, num_pieces: int, is_frozen: bool) -> None:
        super().__init__()
        self.num_pieces = num_pieces
        self.weight = nn.Parameter(
            torch.randn(outputs, inputs) / inputs**0.5, requires_grad=not is_frozen
        )
        self._streams = [torch.cuda.Stream() for _ in range(2)]
        self.between = torch.cuda.Stream()

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the product, and no bias."""
        return _Exchanged.apply(hidden, self.weight, self), None

    def in_pieces(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return ``left`` times ``right``, by pieces of rows, followed by a sum of two halves."""
        out = left.new_empty(left.shape[0], right.shape[1])
        main = torch.cuda.current_stream()
        pieces = zip(left.chunk(self.num_pieces), out.chunk(self.num_pieces), strict=True)
        for place, (part, into) in enumerate(pieces):
            stream = self._streams[place % len(self._streams)]
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                torch.mm(part, right, out=into)
            self.between.wait_stream(stream)
            self.exchange(into)
        for stream in (*self._streams, self.between):
            main.wait_stream(stream)
        out.view(2, -1).sum(0)
        return out

    def exchange(self, values: torch.Tensor) -> None:
        """Exchange values with other ranks, on a stream of its own."""
        with torch.cuda.stream(self.between):
            torch.roll(values, 1)


class TELayerNormColumnParallelLinear(_Te):
    """A norm and a product in one call."""

    def __init__(self, inputs: int, outputs: int, **options: Any) -> None:
        super().__init__(inputs, outputs, **options)
        self.layer_norm_weight = nn.Parameter(torch.ones(inputs))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the product, and no bias."""
        gain = self.layer_norm_weight
        return _LayerNormLinear.apply(hidden, gain, self.weights[0], self), None


class TERowParallelLinear(_Te):
    """A product."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the product, and no bias."""
        return _Linear.apply(hidden, self.weights[0], self), None


class TEGroupedLinear(_Te):
    """A product for each expert, on ``num_streams`` streams in turn."""

    def __init__(self, inputs: int, outputs: int, *, num_streams: int, **options: Any) -> None:
        super().__init__(inputs, outputs, **options)
        self.num_gemms = len(self.weights)
        self._streams = [torch.cuda.Stream() for _ in range(num_streams)]

    def forward(self, hidden: torch.Tensor, splits: Sequence[int]) -> tuple[torch.Tensor, None]:
        """Return the rows of each expert times its weight, and no bias."""
        return _GroupedLinear.apply(hidden, self, list(splits), *self.weights), None

    def run_concurrently(self, product: Callable[..., Any], *values: Sequence[Any]) -> None:
        """Run products after the current stream's work, and wait for all of them."""
        main = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(main)
        for place, given in enumerate(zip(*values, strict=True)):
            with torch.cuda.stream(self._streams[place % len(self._streams)]):
                product(*given)
        for stream in self._streams:
            main.wait_stream(stream)


class TransformerLayer(nn.Module):
    """Projections with a norm in front, a product back, and a residual around both."""

    def __init__(self, number: int, hidden: int, ffn: int, **options: Any) -> None:
        super().__init__()
        self.layer_number = number
        self.linear_fc1 = TELayerNormColumnParallelLinear(hidden, ffn, **options)
        self.linear_fc2 = TERowParallelLinear(ffn, hidden, **options)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the layer."""
        inner, _ = self.linear_fc1(hidden)
        return hidden + self.linear_fc2(torch.relu(inner))[0]
