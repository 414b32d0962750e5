"""Bytes of a model's modules, for each recompute setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from ..layers import (
    Block,
    BlockKind,
    RecomputeOption,
    added_saved_nbytes,
    block,
    block_numel,
    layer_kind,
    layer_kinds,
    norm_module,
)
from ..workload import Engine, Fp8Recipe, ModelShape, OperatorKind, RunConfig, takes_options
from .activations import LayerActivations, LayerParts, layer_parts, sizes
from .states import Number

_ATTENTION_PRODUCTS = frozenset(
    {OperatorKind.LINEAR_QKV, OperatorKind.LINEAR_PROJ, OperatorKind.LINEAR}
)
_MLP_PRODUCTS = frozenset(
    {OperatorKind.LINEAR_FC1, OperatorKind.LINEAR_FC2, OperatorKind.GROUPED_LINEAR}
)
CUBLAS_WORKSPACE_NBYTES = 32 * 1024**2
"""Workspace of each library handle that runs products (Hopper and later; 4 MiB before)."""


LOSS_CHUNKS = 8
"""Chunks of the sequence, one after the other, in torchtitan's ``ChunkedCELoss`` (2026; its default
of ``num_chunks``)."""
PIECE_WIDTH = 3072
"""Columns of the table that Megatron's fused head takes at once (``LCE_BWD_VOCAB_SPLIT_SIZE`` of
``fusions/linear_cross_entropy``, branch dev of 2026).  Liger takes as many tokens at once that the
logits have about as many elements as the hidden states, which is like it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes and parameters of one layer of a kind; ``Number`` each."""

    saved: Number
    working: Number
    recompute_working: Number
    """Working bytes of a layer that is recomputed as a whole."""
    numel: Number
    """Parameters without those of experts."""
    expert_numel: Number
    weights_extra: Number
    """Copies of a layer's weights in 8 bits, less the weights that they replace."""
    scratch: Number
    """Placeholders for weight gradients that only this kind has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleBytes:
    """Bytes of one of each module; independent of stages, replicas and schedule."""

    layers: Mapping[BlockKind, LayerBytes]
    """Each kind of layer that the model has."""
    layer_input: Number
    embedding_saved: Number
    embedding_grad: Number
    """Gradient of the embedding, materialised whole before it is added to the buffer."""
    head_saved: Number
    """Saved by the final norm, as input of the output product, and by multi-token prediction."""
    loss: Number
    """Working bytes beyond saved tensors, from logits to the gradient of the output product."""
    embedding_numel: Number
    vocabulary_numel: Number
    norm_numel: Number
    prediction_numel: Number
    prediction_expert_numel: Number
    scratch: Number
    """Placeholders for weight gradients that are accumulated in place, and workspaces."""
    head_scratch: Number

    def to_columns(self) -> dict[str, Number]:
        """Return all numbers by name; those of layers are ``kind.name``."""
        columns = {name: getattr(self, name) for name in _SHARED}
        for kind, one in self.layers.items():
            columns |= {f"{kind.value}.{name}": getattr(one, name) for name in _OF_LAYER}
        return columns

    @staticmethod
    def from_columns(columns: Mapping[str, Number]) -> ModuleBytes:
        """Return the modules of ``to_columns`` output."""
        kinds = [kind for kind in BlockKind if f"{kind.value}.saved" in columns]
        layers = {
            kind: LayerBytes(**{name: columns[f"{kind.value}.{name}"] for name in _OF_LAYER})
            for kind in kinds
        }
        return ModuleBytes(layers=layers, **{name: columns[name] for name in _SHARED})


_OF_LAYER = tuple(field.name for field in fields(LayerBytes))
_SHARED = tuple(field.name for field in fields(ModuleBytes) if field.name != "layers")


def module_bytes(config: RunConfig) -> ModuleBytes:
    """Return the bytes of each module of a layout, under its own recompute setting."""
    return SplitModules.of(config).recomputed(RecomputeOption.from_config(config).parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitModules:
    """Modules of a model, split by a layout's degrees, for any recomputed modules."""

    config: RunConfig
    plain: ModuleBytes
    """Bytes if no module is recomputed."""
    parts: Mapping[BlockKind, LayerParts]

    @staticmethod
    def of(config: RunConfig) -> SplitModules:
        """Return the modules of a layout; of its recompute only full or not matters."""
        parts = {kind: layer_parts(config, kind) for kind in _kinds(config.model)}
        return SplitModules(config=config, plain=_plain_modules(config, parts), parts=parts)

    def recomputed(self, modules: frozenset[str]) -> ModuleBytes:
        """Return the bytes if these modules are recomputed."""
        if not modules:
            return self.plain
        activations = _activations(self.config, self.parts, modules)
        layers = {
            kind: replace(one, **activations[kind]) for kind, one in self.plain.layers.items()
        }
        head_saved = _head_saved_nbytes(self.config, activations)
        return replace(self.plain, layers=layers, head_saved=head_saved)


def _kinds(model: ModelShape) -> tuple[BlockKind, ...]:
    """Return the kinds of a model's layers, and of those inside its prediction layers."""
    if not model.prediction_kinds:
        return layer_kinds(model)
    inner = model.layer_kinds + model.prediction_kinds
    return layer_kinds(replace(model, layer_kinds=inner, num_layers=len(inner)))


def _plain_modules(config: RunConfig, parts: Mapping[BlockKind, LayerParts]) -> ModuleBytes:
    model, size = config.model, sizes(config)
    # Parameters and widths do not depend on recompute and micro-batch size, nor do the blocks that
    # they are read from.
    plain = RecomputeOption().applied_to(
        replace(config, batch=replace(config.batch, micro_batch_size=1))
    )
    blocks = {kind: block(plain, kind) for kind in parts}
    hidden = size.split_tokens * model.hidden_size
    norm = block_numel(norm_module(config, "final_norm").tensors).dense
    prediction = prediction_expert = 0
    if model.num_prediction_layers:
        # The block of prediction layers begins with the final norm of the model.
        predicted = block(plain, BlockKind.PREDICTION).numel
        prediction, prediction_expert = predicted.dense - norm, predicted.expert
    activations = _activations(config, parts, frozenset())
    return ModuleBytes(
        layers={
            kind: LayerBytes(
                **activations[kind],
                numel=layer.numel.dense,
                expert_numel=layer.numel.expert,
                weights_extra=_fp8_extra(config, layer),
                scratch=_layer_scratch(config, layer),
            )
            for kind, layer in blocks.items()
        },
        layer_input=hidden * size.nbytes,
        embedding_saved=8 * size.tokens + (hidden if config.hidden_dropout else 0),
        embedding_grad=_vocabulary_numel(config) * size.nbytes,
        head_saved=_head_saved_nbytes(config, activations),
        loss=_loss_nbytes(config),
        embedding_numel=block(plain, BlockKind.EMBEDDING).numel.dense,
        vocabulary_numel=_vocabulary_numel(config),
        norm_numel=norm,
        prediction_numel=prediction,
        prediction_expert_numel=prediction_expert,
        scratch=_attention_scratch(config, blocks) + _workspace(config),
        head_scratch=_head_scratch(config),
    )


def _activations(
    config: RunConfig, parts: Mapping[BlockKind, LayerParts], modules: frozenset[str]
) -> dict[BlockKind, dict[str, float]]:
    """Return the fields of ``LayerBytes`` that depend on which modules are recomputed."""
    layers = {kind: part.activations(modules) for kind, part in parts.items()}
    added = 0.0 if config.model.layer_kinds else added_saved_nbytes(config)
    return {
        kind: {
            "saved": layer.saved_nbytes + added,
            "working": max(0.0, layer.working_nbytes - _freed_nbytes(config.model, kind, layers)),
            "recompute_working": layer.recompute_working_nbytes,
        }
        for kind, layer in layers.items()
    }


def _freed_nbytes(
    model: ModelShape, kind: BlockKind, layers: Mapping[BlockKind, LayerActivations]
) -> float:
    """Return the bytes that layers after the last of a kind have freed before its backward pass."""
    if not model.layer_kinds:
        return 0.0
    freed = 0.0
    for layer in reversed(range(model.num_layers)):
        if (after := layer_kind(model, layer)) is kind:
            return freed
        freed += layers[after].saved_nbytes
    return 0.0


def _head_saved_nbytes(
    config: RunConfig, activations: Mapping[BlockKind, Mapping[str, float]]
) -> float:
    """Return the saved bytes of the final norm's input and output, and of the prediction layers.

    Each prediction layer adds two norms, a product, a layer (of the last one's kind) and a head,
    and its logits are retained until the last loss.
    """
    model, size = config.model, sizes(config)
    hidden = size.split_tokens * model.hidden_size * size.nbytes
    norm_nbytes = 2 * hidden
    if not model.num_prediction_layers:
        return norm_nbytes
    inner = replace(
        model,
        layer_kinds=model.prediction_kinds,
        num_layers=len(model.prediction_kinds) or model.num_layers,
    )
    places = range(inner.num_layers) if model.prediction_kinds else (model.num_layers - 1,)
    layer = sum(activations[layer_kind(inner, place)]["saved"] for place in places)
    layer -= 0.0 if model.layer_kinds else added_saved_nbytes(config)
    # Two norm inputs, their concatenated outputs, the layer, input and output of its final norm.
    each = 4 * hidden + layer + 2 * hidden + _saved_logits_nbytes(config)
    return norm_nbytes + model.num_prediction_layers * each


def _saved_logits_nbytes(config: RunConfig) -> float:
    """Return the bytes saved by cross-entropy: fp32 probabilities, the logits that its kernel
    overwrites, or none with a fused head."""
    size = sizes(config)
    if config.fuses_head:
        return 0.0
    logits = size.tokens * config.model.vocab_size / config.parallelism.tp
    return logits * (4 if config.keeps_fp32_logits else size.nbytes)


def _loss_nbytes(config: RunConfig) -> float:
    """Return the larger peak of cross-entropy and the backward pass of the output product.

    Unfused, and under the fused implementation ``native``, an fp32 copy exists along with the
    logits; probabilities and then gradients take its place.  ``te`` overwrites the logits.  The
    product gathers its input and scatters its gradient.  A fused head has the logits of one piece.
    """
    model, size = config.model, sizes(config)
    logits = size.tokens * model.vocab_size / config.parallelism.tp
    # ``F.cross_entropy`` saves the log-softmax, and computes its gradient from that of the
    # log-softmax: three fp32 tensors.  The 16-bit logits are freed by then, but their block is
    # too small for any of these and remains unused.
    whole = logits * (12 + (size.nbytes if size.nbytes < 4 else 0))
    if config.fuses_head:
        return _fused_head_nbytes(config, logits, whole)
    if _is_torch(config) or not takes_options(config):
        return whole
    in_loss = _saved_logits_nbytes(config)
    if config.keeps_fp32_logits and size.nbytes < 4:
        in_loss += logits * size.nbytes
    grads = size.tokens * model.hidden_size
    if size.is_gathered:
        grads += size.split_tokens * model.hidden_size
    placeholder = 0 if _has_placeholders(config) else _vocabulary_numel(config)
    return max(in_loss, (logits + grads + placeholder) * size.nbytes)


def _fused_head_nbytes(config: RunConfig, logits: float, loss_nbytes: float) -> float:
    """Return the peak of a fused head: the logits of one piece, the gradient of the hidden states,
    summed in fp32, and that of the whole table, beside that of a piece of tokens.

    ``logits`` are those of all pieces, ``loss_nbytes`` what PyTorch's loss would need for them.
    """
    size = sizes(config)
    table = _vocabulary_numel(config) * size.nbytes
    summed = size.tokens * config.model.hidden_size * 4 + table
    if _is_torch(config):
        piece = logits * size.nbytes / LOSS_CHUNKS
        return summed + max(loss_nbytes / LOSS_CHUNKS, piece + table)
    piece = min(logits, size.tokens * PIECE_WIDTH) * size.nbytes
    return summed + piece + (0 if takes_options(config) else table)


def _vocabulary_numel(config: RunConfig) -> int:
    """Return the elements of the token embedding, or of the output product, on one rank."""
    return config.model.vocab_size // config.parallelism.tp * config.model.hidden_size


def _fp8_extra(config: RunConfig, layer: Block) -> float:
    """Return the bytes of a layer's quantized weight copies, less the weights that they replace.

    Transformer Engine stores every weight twice in 8 bits, along rows and along columns.  With
    ``keeps_fp8_params`` these replace the 16-bit weights.
    """
    if config.fp8 is Fp8Recipe.NONE or _is_torch(config):
        # torchao casts a weight when it is used, and frees the copy.
        return 0.0
    # The router is no product of Transformer Engine.
    weights = [t for t in layer.tensors if t.is_quantized and not t.name.startswith("router")]
    numel = sum(tensor.numel for tensor in weights)
    # Two copies, along rows and along columns: of 4.5 bits under NVFP4, of 8 otherwise.
    copies = 1.125 if config.fp8 is Fp8Recipe.NVFP4 else 2.0
    if config.fp8 is Fp8Recipe.MXFP8:
        copies *= 1.03125
    replaced = config.precision.nbytes if config.keeps_fp8_params else 0
    return numel * (copies - replaced)


def _has_placeholders(config: RunConfig) -> bool:
    is_possible = config.device != "cpu" and config.parallelism.engine is Engine.MEGATRON
    return config.fuses_gradient_accumulation and is_possible


def _is_torch(config: RunConfig) -> bool:
    return config.parallelism.engine is Engine.TORCH


def _wgrads(config: RunConfig, layer: Block, kinds: frozenset[OperatorKind]) -> float:
    """Return the bytes of placeholders, one per shape, that autograd receives for weight gradients
    accumulated in place.

    ``get_dummy_wgrad`` of Transformer Engine retains them for the whole run.
    """
    if not _has_placeholders(config):
        return 0.0
    shapes = {one.shape[-2:] for one, _ in layer.forward if one.kind in kinds}
    return sum(rows * columns for rows, columns in shapes) * config.precision.nbytes


def _layer_scratch(config: RunConfig, layer: Block) -> float:
    """Return the placeholders of a layer; a GPT's attention has its own, as all layers have it."""
    kinds = _MLP_PRODUCTS | (_ATTENTION_PRODUCTS if config.model.layer_kinds else frozenset())
    return _wgrads(config, layer, kinds)


def _attention_scratch(config: RunConfig, blocks: Mapping[BlockKind, Block]) -> float:
    if config.model.layer_kinds:
        return 0.0
    return _wgrads(config, next(iter(blocks.values())), _ATTENTION_PRODUCTS)


def _workspace(config: RunConfig) -> float:
    """Return the bytes of one workspace, and of four more if experts run as a grouped product."""
    if config.device == "cpu":
        return 0.0
    experts = config.model.experts
    return CUBLAS_WORKSPACE_NBYTES * (5 if experts and experts.is_grouped else 1)


def _head_scratch(config: RunConfig) -> float:
    """Return the bytes of the output product's placeholder, gathered input and workspace; and, for
    each pass with a deferred weight gradient, of its input and output gradient."""
    size, model = sizes(config), config.model
    gathered = size.tokens * model.hidden_size * size.nbytes if size.is_gathered else 0.0
    vocab = model.vocab_size / config.parallelism.tp
    waiting = size.split_tokens * model.hidden_size + size.tokens * vocab
    gathered += config.num_deferred_heads * waiting * size.nbytes
    if config.device == "cpu":
        return gathered
    placeholder = _vocabulary_numel(config) * size.nbytes if _has_placeholders(config) else 0
    return gathered + placeholder + CUBLAS_WORKSPACE_NBYTES
