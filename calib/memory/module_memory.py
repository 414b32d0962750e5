"""Bytes of a model's modules, for each recompute setting."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..layers import (
    Block,
    BlockKind,
    RecomputeOption,
    added_saved_nbytes,
    block,
    block_numel,
    norm_module,
)
from ..workload import Engine, Fp8Recipe, OperatorKind, RunConfig, takes_options
from .activations import LayerParts, layer_parts, sizes
from .states import Number

_ATTENTION_PRODUCTS = frozenset(
    {OperatorKind.LINEAR_QKV, OperatorKind.LINEAR_PROJ, OperatorKind.LINEAR}
)
_MLP_PRODUCTS = frozenset(
    {OperatorKind.LINEAR_FC1, OperatorKind.LINEAR_FC2, OperatorKind.GROUPED_LINEAR}
)
CUBLAS_WORKSPACE_NBYTES = 32 * 1024**2
"""Workspace of each library handle that runs products (Hopper and later; 4 MiB before)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleBytes:
    """Bytes of one of each module; independent of stages, replicas and schedule."""

    layer_input: Number
    dense_saved: Number
    dense_working: Number
    dense_recompute_working: Number
    """Working bytes of a layer that is recomputed as a whole."""
    expert_saved: Number
    expert_working: Number
    expert_recompute_working: Number
    embedding_saved: Number
    embedding_grad: Number
    """Gradient of the embedding, materialised whole before it is added to the buffer."""
    head_saved: Number
    """Saved by the final norm, as input of the output product, and by multi-token prediction."""
    loss: Number
    """Working bytes beyond saved tensors, from logits to the gradient of the output product."""
    layer_numel: Number
    expert_layer_numel: Number
    expert_numel: Number
    embedding_numel: Number
    vocabulary_numel: Number
    norm_numel: Number
    prediction_numel: Number
    prediction_expert_numel: Number
    dense_weights_extra: Number
    """Copies of a layer's weights in 8 bits, less the weights that they replace."""
    expert_weights_extra: Number
    scratch: Number
    """Placeholders for weight gradients that are accumulated in place, and workspaces."""
    dense_scratch: Number
    expert_scratch: Number
    head_scratch: Number


def module_bytes(config: RunConfig) -> ModuleBytes:
    """Return the bytes of each module of a layout, under its own recompute setting."""
    return SplitModules.of(config).recomputed(RecomputeOption.from_config(config).parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitModules:
    """Modules of a model, split by a layout's degrees, for any recomputed modules."""

    plain: ModuleBytes
    """Bytes if no module is recomputed."""
    dense: LayerParts
    expert: LayerParts
    """Same as ``dense`` if the model has no experts."""

    @staticmethod
    def of(config: RunConfig) -> SplitModules:
        """Return the modules of a layout; of its recompute only full or not matters."""
        has_experts = config.model.experts is not None
        dense = layer_parts(config, has_experts=False)
        expert = layer_parts(config, has_experts=True) if has_experts else dense
        return SplitModules(plain=_plain_modules(config, dense, expert), dense=dense, expert=expert)

    def recomputed(self, modules: frozenset[str]) -> ModuleBytes:
        """Return the bytes if these modules are recomputed."""
        if not modules:
            return self.plain
        config = self.dense.config
        fields = _recompute_dependent_fields(config, self.dense, self.expert, modules)
        return replace(self.plain, **fields)


def _plain_modules(config: RunConfig, dense: LayerParts, expert: LayerParts) -> ModuleBytes:
    model, size = config.model, sizes(config)
    # Parameters and widths do not depend on recompute and micro-batch size, nor do the blocks that
    # they are read from.
    plain = RecomputeOption().applied_to(
        replace(config, batch=replace(config.batch, micro_batch_size=1))
    )
    layer = block(plain, BlockKind.LAYER)
    expert_layer = block(plain, BlockKind.EXPERT_LAYER) if model.experts is not None else layer
    hidden = size.split_tokens * model.hidden_size
    norm = block_numel(norm_module(config, "final_norm").tensors).dense
    prediction = prediction_expert = 0
    if model.num_prediction_layers:
        # The block of prediction layers begins with the final norm of the model.
        predicted = block(plain, BlockKind.PREDICTION).numel
        prediction, prediction_expert = predicted.dense - norm, predicted.expert
    return ModuleBytes(
        **_recompute_dependent_fields(config, dense, expert, frozenset()),
        dense_weights_extra=_fp8_extra(config, layer),
        expert_weights_extra=_fp8_extra(config, expert_layer),
        dense_scratch=_wgrads(config, layer, _MLP_PRODUCTS),
        expert_scratch=_wgrads(config, expert_layer, _MLP_PRODUCTS),
        layer_input=hidden * size.nbytes,
        embedding_saved=8 * size.tokens + (hidden if config.hidden_dropout else 0),
        embedding_grad=_vocabulary_numel(config) * size.nbytes,
        loss=_loss_nbytes(config),
        layer_numel=layer.numel.dense,
        expert_layer_numel=expert_layer.numel.dense,
        expert_numel=expert_layer.numel.expert,
        embedding_numel=block(plain, BlockKind.EMBEDDING).numel.dense,
        vocabulary_numel=_vocabulary_numel(config),
        norm_numel=norm,
        prediction_numel=prediction,
        prediction_expert_numel=prediction_expert,
        scratch=_wgrads(config, layer, _ATTENTION_PRODUCTS) + _workspace(config),
        head_scratch=_head_scratch(config),
    )


def _recompute_dependent_fields(
    config: RunConfig, dense: LayerParts, expert: LayerParts, recomputed_modules: frozenset[str]
) -> dict[str, float]:
    """Return the fields of ``ModuleBytes`` that depend on which modules are recomputed."""
    field_values: dict[str, float] = {}
    added = added_saved_nbytes(config)
    of_dense = dense.activations(recomputed_modules)
    of_expert = of_dense if expert is dense else expert.activations(recomputed_modules)
    for kind, of_layer in {"dense": of_dense, "expert": of_expert}.items():
        field_values[f"{kind}_saved"] = of_layer.saved_nbytes + added
        field_values[f"{kind}_working"] = of_layer.working_nbytes
        field_values[f"{kind}_recompute_working"] = of_layer.recompute_working_nbytes
    last = "expert" if config.model.has_experts(config.model.num_layers - 1) else "dense"
    head_saved = _head_saved_nbytes(config, field_values[f"{last}_saved"] - added)
    return {**field_values, "head_saved": head_saved}


def _head_saved_nbytes(config: RunConfig, layer: float) -> float:
    """Return the saved bytes of the final norm's input and output, and of the prediction layers.

    Each prediction layer adds two norms, a product, a layer and a head, and its logits are retained
    until the last loss.  ``layer``: bytes that one transformer layer saves.
    """
    model, size = config.model, sizes(config)
    hidden = size.split_tokens * model.hidden_size * size.nbytes
    norm_nbytes = 2 * hidden
    if not model.num_prediction_layers:
        return norm_nbytes
    # Two norm inputs, their concatenated outputs, the layer, input and output of its final norm.
    each = 4 * hidden + layer + 2 * hidden + _saved_logits_nbytes(config)
    return norm_nbytes + model.num_prediction_layers * each


def _saved_logits_nbytes(config: RunConfig) -> float:
    """Return the bytes saved by cross-entropy: fp32 probabilities, or the logits that its kernel
    overwrites."""
    size = sizes(config)
    logits = size.tokens * config.model.vocab_size / config.parallelism.tp
    return logits * (4 if config.keeps_fp32_logits else size.nbytes)


def _loss_nbytes(config: RunConfig) -> float:
    """Return the larger peak of cross-entropy and the backward pass of the output product.

    Unfused, and under the fused implementation ``native``, an fp32 copy exists along with the
    logits; probabilities and then gradients take its place.  ``te`` overwrites the logits.  The
    product gathers its input and scatters its gradient.
    """
    model, size = config.model, sizes(config)
    logits = size.tokens * model.vocab_size / config.parallelism.tp
    if _is_torch(config) or not takes_options(config):
        # ``F.cross_entropy`` saves the log-softmax, and computes its gradient from that of the
        # log-softmax: three fp32 tensors.  The 16-bit logits are freed by then, but their block is
        # too small for any of these and remains unused.
        return logits * (12 + (size.nbytes if size.nbytes < 4 else 0))
    in_loss = _saved_logits_nbytes(config)
    if config.keeps_fp32_logits and size.nbytes < 4:
        in_loss += logits * size.nbytes
    grads = size.tokens * model.hidden_size
    if size.is_gathered:
        grads += size.split_tokens * model.hidden_size
    placeholder = 0 if _has_placeholders(config) else _vocabulary_numel(config)
    return max(in_loss, (logits + grads + placeholder) * size.nbytes)


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
