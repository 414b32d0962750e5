"""One operator of a given shape as training runs it, on private tensors.

Values are a fixed ramp: no random number is drawn from the user's generators.  Gradients come
from ``torch.autograd.grad`` on private leaves, so that no ``.grad`` of the user is touched.
Weights rotate over several copies, as cold as in a model; activations are one set, as warm as
those that the preceding operator has just written.

The model's own modules are not called, although their kernels may differ: a call with other shapes
runs the user's hooks, draws from Megatron's tracker of random states for dropout, writes scales
into the 8-bit history of TransformerEngine's modules and workspaces and masks into caches, and
communicates under tensor parallelism.  None of that can be undone.  The run's own shapes show how
far these kernels are from the model's, and that difference widens the intervals of probes
(``calib/samples/_operator_rows.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...calib.advice.probe_sizes import COLD_NBYTES, MOST_COPIES, OPTIMIZER_TENSORS
from ...calib.workload.config import RunConfig
from ...calib.workload.model_shape import Normalization, PositionEmbedding
from ...calib.workload.operators import OperatorKind
from . import _probe_kernels as kernels

Shape = tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Bench:
    """One operator, ready to be run repeatedly; all its memory is allocated here."""

    run: Callable[..., Tensor | tuple[Tensor, ...]]
    """Differentiable function of the activations, one copy of the weights, and ``fixed``."""
    activations: tuple[Tensor, ...]
    weights: tuple[tuple[Tensor, ...], ...] = ((),)
    """Copies in rotation."""
    fixed: tuple[Any, ...] = ()
    """Further arguments that need no gradient."""
    _turn: int = 0
    _outputs: tuple[Tensor, ...] = ()
    _sums: tuple[Tensor, ...] = field(init=False)
    _gradients: tuple[Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._sums = tuple(torch.zeros_like(w, dtype=torch.float32) for w in self.weights[0])
        with torch.no_grad():
            self._gradients = tuple(
                ramp(output.shape, output.dtype, output.device) for output in self._computed()
            )

    def _computed(self) -> tuple[Tensor, ...]:
        outputs = self.run(*self.activations, *self.weights[self._turn], *self.fixed)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def forward(self) -> None:
        """Run one forward pass, with the graph for the backward pass."""
        self._turn = (self._turn + 1) % len(self.weights)
        with torch.enable_grad():
            self._outputs = self._computed()

    def backward(self) -> None:
        """Compute gradients of inputs and weights; the latter are accumulated in fp32 buffers."""
        outputs, self._outputs = self._outputs, ()
        leaves = (*self.activations, *self.weights[self._turn])
        gradients = torch.autograd.grad(outputs, leaves, self._gradients)
        for total, part in zip(
            self._sums, gradients[len(gradients) - len(self._sums) :], strict=True
        ):
            total.add_(part)


class OptimizerBench:
    """Norm and clipping of the gradients, then Adam, on fp32 copies.

    The update is written out: ``torch.optim`` may import a compiler on its first use.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        size = -(-shape[0] // OPTIMIZER_TENSORS)
        each = [ramp((size,), torch.float32, device) for _ in range(OPTIMIZER_TENSORS)]
        self._gradients = each
        self._weights, self._means, self._squares = (
            [torch.zeros_like(gradient) for gradient in each] for _ in range(3)
        )
        self._steps = [torch.ones((), device=device) for _ in each]

    @torch.no_grad()
    def forward(self) -> None:
        """Run one optimizer step."""
        norms = torch.stack([torch.linalg.vector_norm(g) for g in self._gradients])
        scale = 1.0 / (torch.linalg.vector_norm(norms) + 1.0)
        for gradient in self._gradients:
            gradient.mul_(scale)
        if self._gradients[0].is_cuda:
            self._update_at_once()
            return
        lists = (self._weights, self._gradients, self._means, self._squares)
        for weight, gradient, mean, square in zip(*lists, strict=True):
            weight.mul_(1.0 - 1e-8)
            mean.lerp_(gradient, 0.1)
            square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            weight.addcdiv_(mean, (square.sqrt() / 0.03).add_(1e-8), value=-1e-6)

    def backward(self) -> None:
        """Do nothing: an optimizer step has no backward pass."""

    def _update_at_once(self) -> None:
        update = torch._fused_adamw_  # pyright: ignore[reportPrivateImportUsage]
        update(
            self._weights,
            self._gradients,
            self._means,
            self._squares,
            [],
            self._steps,
            amsgrad=False,
            lr=1e-6,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.01,
            eps=1e-8,
            maximize=False,
        )


def make_bench(
    kind: OperatorKind, shape: Shape, config: RunConfig, *, dtype: torch.dtype, device: torch.device
) -> Bench | OptimizerBench:
    """Return the bench of one operator, which must be of a probed kind."""
    if kind is OperatorKind.OPTIMIZER:
        return OptimizerBench(shape, device)
    maker = _Maker(config, dtype, device)
    return maker.linear(shape) if kind.is_linear else getattr(maker, kind.value)(shape)


def ramp(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return values that repeat from -1 to 1: not random, and as demanding in products as
    training's."""
    values = torch.arange(prod(shape), device=device, dtype=torch.float32)
    return values.remainder_(251.0).div_(125.0).sub_(1.0).to(dtype).reshape(tuple(shape))


class _Maker:
    """Factory of benches, one method for each kind of operator; all matrix products are
    ``linear``."""

    def __init__(self, config: RunConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._sequence = config.local_seq_length

    def _ramp(self, *shape: int) -> Tensor:
        return ramp(shape, self._dtype, self._device).requires_grad_()

    def _weights(self, *shapes: Shape) -> tuple[tuple[Tensor, ...], ...]:
        nbytes = sum(prod(shape) for shape in shapes) * self._dtype.itemsize
        copies = max(1, min(MOST_COPIES, COLD_NBYTES // max(1, nbytes)))
        return tuple(tuple(self._ramp(*shape) for shape in shapes) for _ in range(copies))

    def _three(self, rows: int, width: int) -> Tensor:
        """Return activations in Megatron's dimensions: sequence, batch, channels."""
        sequence = self._sequence if rows % self._sequence == 0 else rows
        return self._ramp(sequence, rows // sequence, width)

    def linear(self, shape: Shape) -> Bench:
        tokens, size_in, size_out = shape
        return Bench(
            run=lambda x, w: torch.matmul(x, w.t()),
            activations=(self._three(tokens, size_in),),
            weights=self._weights((size_out, size_in)),
        )

    def norm(self, shape: Shape) -> Bench:
        rows, width = shape
        is_rms = self._config.model.normalization is not Normalization.LAYER_NORM
        run = kernels.rms_norm if is_rms else kernels.layer_norm
        weights = ((width,),) if is_rms else ((width,), (width,))
        return Bench(
            run=run, activations=(self._three(rows, width),), weights=self._weights(*weights)
        )

    def embedding(self, shape: Shape) -> Bench:
        tokens, hidden, rows = shape
        ids = (torch.arange(tokens, device=self._device) * 7919) % rows
        weights = [(rows, hidden)]
        if self._config.model.position_embedding is PositionEmbedding.LEARNED:
            weights.append((tokens, hidden))
        return Bench(
            run=kernels.embed, activations=(), weights=self._weights(*weights), fixed=(ids,)
        )

    def position(self, shape: Shape) -> Bench:
        tokens, width = shape
        model = self._config.model
        channels = model.kv_channels
        each = channels * (model.num_attention_heads // model.num_query_groups + 2)
        groups = max(1, width // each)
        x = self._three(tokens, width)
        if self._config.model.position_embedding is not PositionEmbedding.ROPE:
            return Bench(run=kernels.split_heads, activations=(x,), fixed=(groups, channels, None))
        angles = ramp((x.shape[0], 1, 1, channels), self._dtype, self._device)
        return Bench(run=kernels.split_heads, activations=(x,), fixed=(groups, channels, angles))

    def core_attention(self, shape: Shape) -> Bench:
        micro_batch, heads, groups, sequence, channels = shape
        query = self._ramp(sequence, micro_batch, heads, channels)
        keys = [self._ramp(sequence, micro_batch, groups, channels) for _ in range(2)]
        if self._config.is_attention_fused:
            return Bench(run=kernels.fused_attention, activations=(query, *keys))
        mask = torch.ones(sequence, sequence, dtype=torch.bool, device=self._device).triu_(1)
        dropout = kernels.Dropout(self._config.attention_dropout, self._device)
        return Bench(
            run=kernels.unfused_attention, activations=(query, *keys), fixed=(mask, dropout)
        )

    def residual(self, shape: Shape) -> Bench:
        rows, width = shape
        states = tuple(self._three(rows, width) for _ in range(2))
        weights = self._weights((width,), (width,)) if self._config.model.has_bias else ((),)
        dropout = kernels.Dropout(self._config.hidden_dropout, self._device)
        return Bench(
            run=lambda x, residual, *biases: kernels.add_residuals(x, residual, biases, dropout),
            activations=states,
            weights=weights,
        )

    def activation(self, shape: Shape) -> Bench:
        rows, size_in, size_out = shape
        run = kernels.gated if size_in == 2 * size_out else kernels.gelu
        weights = self._weights((size_in,)) if self._config.model.has_bias else ((),)
        return Bench(run=run, activations=(self._three(rows, size_in),), weights=weights)

    def loss(self, shape: Shape) -> Bench:
        rows, vocabulary = shape
        targets = (torch.arange(rows, device=self._device) * 7919) % vocabulary
        x = self._three(rows, vocabulary)
        fixed = (targets.reshape(x.shape[:-1]),)
        return Bench(run=kernels.VocabularyLoss.apply, activations=(x,), fixed=fixed)

    def router(self, shape: Shape) -> Bench:
        tokens, hidden, experts = shape
        model = self._config.model.experts
        top = 1 if model is None else model.top_k
        return Bench(
            run=kernels.route,
            activations=(self._three(tokens, hidden),),
            weights=self._weights((experts, hidden)),
            fixed=(top,),
        )

    def grouped_linear(self, shape: Shape) -> Bench:
        experts, tokens, size_in, size_out = shape
        return Bench(
            run=kernels.grouped,
            activations=(self._ramp(tokens, size_in),),
            weights=self._weights((experts, size_out, size_in)),
        )

    def permute(self, shape: Shape) -> Bench:
        rows, hidden, _ = shape
        order = (torch.arange(rows, device=self._device) * 7919) % rows
        return Bench(
            run=lambda x, order: x.index_select(0, order),
            activations=(self._ramp(rows, hidden),),
            fixed=(order,),
        )
