"""Bytes of the modules of a model, by what is computed again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..layers import Again, Block, BlockKind, added_kept_nbytes, block, block_numel, norm_module
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
"""Scratch of each of the libraries that run products (Hopper and later; 4 MiB before)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleBytes:
    """What does not depend on stages, replicas and schedule: bytes of one of each module."""

    layer_input: Number
    dense_kept: Number
    dense_working: Number
    dense_again: Number
    """Working bytes of a layer that is recomputed as a whole."""
    expert_kept: Number
    expert_working: Number
    expert_again: Number
    embedding_kept: Number
    embedding_grad: Number
    """Gradient of the embedding, made whole before it is added to the buffer."""
    head_kept: Number
    """Final norm, input of the output product, and all of multi-token prediction."""
    loss: Number
    """Beyond what is kept, from logits to the gradient of the output product."""
    layer_numel: Number
    expert_layer_numel: Number
    expert_numel: Number
    embedding_numel: Number
    vocabulary_numel: Number
    norm_numel: Number
    prediction_numel: Number
    prediction_expert_numel: Number
    dense_weights_extra: Number
    """Copies of a layer's weights in 8 bits, less what they replace."""
    expert_weights_extra: Number
    scratch: Number
    """Placeholders for weight gradients that were added in place, and workspaces."""
    dense_scratch: Number
    expert_scratch: Number
    head_scratch: Number


def module_bytes(config: RunConfig) -> ModuleBytes:
    """Bytes of each module of a model under the degrees that split a layer."""
    return SplitModules.of(config).recomputed(Again.own(config).parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitModules:
    """The modules of a model under the degrees that split a layer."""

    plain: ModuleBytes
    """With no module recomputed."""
    dense: LayerParts
    expert: LayerParts
    """As ``dense`` where there are no experts."""

    @staticmethod
    def of(config: RunConfig) -> SplitModules:
        """Those of a layout; what it recomputes matters only in that it may be whole layers."""
        has_experts = config.model.experts is not None
        dense = layer_parts(config, has_experts=False)
        expert = layer_parts(config, has_experts=True) if has_experts else dense
        return SplitModules(plain=_plain_modules(config, dense, expert), dense=dense, expert=expert)

    def recomputed(self, modules: frozenset[str]) -> ModuleBytes:
        """The same where some modules run again."""
        if not modules:
            return self.plain
        config = self.dense.config
        fields = _kept_fields(config, self.dense, self.expert, modules)
        return replace(self.plain, **fields)


def _plain_modules(config: RunConfig, dense: LayerParts, expert: LayerParts) -> ModuleBytes:
    model, size = config.model, sizes(config)
    # Parameters and widths are the same whatever is computed again and however long a micro-batch
    # is, and so are the blocks that hold them.
    plain = Again().of(replace(config, batch=replace(config.batch, micro_batch_size=1)))
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
        **_kept_fields(config, dense, expert, frozenset()),
        dense_weights_extra=_fp8_extra(config, layer),
        expert_weights_extra=_fp8_extra(config, expert_layer),
        dense_scratch=_wgrads(config, layer, _MLP_PRODUCTS),
        expert_scratch=_wgrads(config, expert_layer, _MLP_PRODUCTS),
        layer_input=hidden * size.nbytes,
        embedding_kept=8 * size.tokens + (hidden if config.hidden_dropout else 0),
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


def _kept_fields(
    config: RunConfig, dense: LayerParts, expert: LayerParts, again: frozenset[str]
) -> dict[str, float]:
    """The fields of ``ModuleBytes`` that depend on which modules run again."""
    found: dict[str, float] = {}
    added = added_kept_nbytes(config)
    of_dense = dense.activations(again)
    of_expert = of_dense if expert is dense else expert.activations(again)
    for kind, of_layer in {"dense": of_dense, "expert": of_expert}.items():
        found[f"{kind}_kept"] = of_layer.kept_nbytes + added
        found[f"{kind}_working"] = of_layer.working_nbytes
        found[f"{kind}_again"] = of_layer.recompute_working_nbytes
    last = "expert" if config.model.has_experts(config.model.num_layers - 1) else "dense"
    return {**found, "head_kept": _head_kept(config, found[f"{last}_kept"] - added)}


def _head_kept(config: RunConfig, layer: float) -> float:
    """Input and output of the final norm; each step of prediction has two norms, a product, a layer
    and a head more, and its logits wait for the loss of the last.  ``layer``: what one keeps."""
    model, size = config.model, sizes(config)
    hidden = size.split_tokens * model.hidden_size * size.nbytes
    own = 2 * hidden
    if not model.num_prediction_layers:
        return own
    # Two inputs of norms, their outputs joined, the layer, input and output of its final norm.
    each = 4 * hidden + layer + 2 * hidden + _kept_logits_nbytes(config)
    return own + model.num_prediction_layers * each


def _kept_logits_nbytes(config: RunConfig) -> float:
    """What cross-entropy keeps: fp32 probabilities, or the logits that its kernel overwrites."""
    size = sizes(config)
    logits = size.tokens * config.model.vocab_size / config.parallelism.tp
    return logits * (4 if config.keeps_fp32_logits else size.nbytes)


def _loss_nbytes(config: RunConfig) -> float:
    """The fuller of cross-entropy and the backward pass of the output product.

    Unfused, and under the fused implementation ``native``, an fp32 copy lives beside the logits, in
    place of which come first probabilities and then gradients; ``te`` overwrites the logits.  The
    product gathers its input, and scatters the gradient of it.
    """
    model, size = config.model, sizes(config)
    logits = size.tokens * model.vocab_size / config.parallelism.tp
    if _is_torch(config) or not takes_options(config):
        # ``F.cross_entropy`` keeps the logarithms of the softmax, and makes its gradient out of
        # that of them: three in fp32.  Logits in 16 bits are gone by then, but the place that they
        # had is between others and holds none of these.
        return logits * (12 + (size.nbytes if size.nbytes < 4 else 0))
    in_loss = _kept_logits_nbytes(config)
    if config.keeps_fp32_logits and size.nbytes < 4:
        in_loss += logits * size.nbytes
    grads = size.tokens * model.hidden_size
    if size.is_gathered:
        grads += size.split_tokens * model.hidden_size
    placeholder = 0 if _has_placeholders(config) else _vocabulary_numel(config)
    return max(in_loss, (logits + grads + placeholder) * size.nbytes)


def _vocabulary_numel(config: RunConfig) -> int:
    """Elements of the embedding of tokens, or of the output product, on one rank."""
    return config.model.vocab_size // config.parallelism.tp * config.model.hidden_size


def _fp8_extra(config: RunConfig, layer: Block) -> float:
    """Transformer Engine keeps every weight in 8 bits twice, along rows and along columns.

    With ``keeps_fp8_params`` these take the place of the 16-bit weights.
    """
    if config.fp8 is Fp8Recipe.NONE or _is_torch(config):
        # torchao casts a weight as it is used, and lets it go.
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
    """One placeholder per shape, which autograd gets for a weight gradient that was added in place.

    ``get_dummy_wgrad`` of Transformer Engine keeps them for the whole run.
    """
    if not _has_placeholders(config):
        return 0.0
    shapes = {one.shape[-2:] for one, _ in layer.forward if one.kind in kinds}
    return sum(rows * columns for rows, columns in shapes) * config.precision.nbytes


def _workspace(config: RunConfig) -> float:
    """One workspace, and four where experts run as one grouped product."""
    if config.device == "cpu":
        return 0.0
    experts = config.model.experts
    return CUBLAS_WORKSPACE_NBYTES * (5 if experts and experts.is_grouped else 1)


def _head_scratch(config: RunConfig) -> float:
    """Placeholder of the output product, its gathered input, and the workspace it runs in; of each
    pass whose weight gradient waits the input and the gradient of the output."""
    size, model = sizes(config), config.model
    gathered = size.tokens * model.hidden_size * size.nbytes if size.is_gathered else 0.0
    vocab = model.vocab_size / config.parallelism.tp
    waiting = size.split_tokens * model.hidden_size + size.tokens * vocab
    gathered += config.num_deferred_heads * waiting * size.nbytes
    if config.device == "cpu":
        return gathered
    placeholder = _vocabulary_numel(config) * size.nbytes if _has_placeholders(config) else 0
    return gathered + placeholder + CUBLAS_WORKSPACE_NBYTES
