"""Bytes of a model's modules in many layouts, gathered from what each of them depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import TypeVar

import numpy as np

from ..layers.blocks import EXPERT_KINDS, Block, BlockKind, block, layer_kind, layer_kinds
from ..layers.layer_modules import added_saved_nbytes, norm_module
from ..layers.recompute import RecomputeOption
from ..layers.tensors import block_numel
from ..workload.config import Batch, Fp8Recipe, Recompute, RunConfig, takes_options
from ..workload.layout_table import Ints, LayoutTable
from ..workload.model_shape import ModelShape
from ..workload.operators import OperatorKind
from ..workload.parallelism import Engine
from ._layer_memory import LayerBytes, PartBytes, columns
from ._states import Number
from .activations import layer_part, routed_part, sizes

_Record = TypeVar("_Record", "ModuleBytes", "ModuleWeights")

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
SPLIT_FIELDS = (
    *("tp", "cp", "ep", "etp", "pp", "vp", "dp", "chunk_layers", "microbatch_group_size"),
    *("is_sequence_parallel", "micro_batch_size", "global_batch_size"),
    *("recompute", "recompute_modules", "recompute_num_layers", "recompute_span"),
    *("is_optimizer_distributed", "num_optimizer_instances", "optimizer_offload_frac"),
    *("sharding", "regathers_weights", "keeps_grads_whole", "prefetches_backward"),
    *("overlaps_grad_reduce", "overlaps_param_gather", "gathers_beside_update"),
    *("overlaps_p2p", "overlaps_p2p_ends", "overlaps_tp", "distributes_saved_activations"),
    *("bucket_numel", "pads_buckets", "is_pipeline_before_data", "ranks_per_node"),
    *("overlaps_optimizer_offload", "cadence", "program", "absent", "given", "unmodelled"),
)
"""Fields in which layouts of one run may differ: bytes of modules depend on those that are named
where they are read, and on none of the others."""
_MICROBATCH = ("tp", "cp", "is_sequence_parallel", "micro_batch_size")
"""Those of them that a layer's activations follow from, besides recompute and routed tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleBytes:
    """Activation bytes of one of each module but layers, and what they follow from."""

    split_tokens: Number
    layer_input: Number
    embedding_saved: Number
    embedding_grad: Number
    """Gradient of the embedding, materialised whole before it is added to the buffer."""
    head_saved: Number
    """Saved by the final norm, as input of the output product, and by multi-token prediction."""
    loss: Number
    """Working bytes beyond saved tensors, from logits to the gradient of the output product."""
    head_scratch: Number
    waiting: Number
    """Input and output gradient of the output product."""
    added: Number
    """Bytes that added modules save in each layer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleWeights:
    """Parameters of one module, and bytes beside them that stay for the whole run."""

    numel: Number
    """Parameters without those of experts."""
    expert_numel: Number = 0.0
    copies: Number = 0.0
    """Copies of weights in 8 bits, less the weights that they replace."""
    scratch: Number = 0.0
    """Placeholders for weight gradients that only this kind of module has."""


class Modules:
    """Modules of layouts of one run: each part of them is computed once for each distinct
    combination of the settings that it depends on, and summed for each layout.

    ``weights`` and ``stage_scratch`` have an entry for each combination of degrees, ``places`` the
    one of each layout.
    """

    def __init__(self, table: LayoutTable) -> None:
        """Read layouts that differ in ``SPLIT_FIELDS`` only."""
        config = table.config(0)
        self.model, self.kinds = config.model, _kinds(config.model)
        settings, self._setting = table.each(_itself, ("recompute", "recompute_modules"))
        layouts, self._micro = table.each(_itself, _MICROBATCH)
        self._modules = _stacked([_module_bytes(one) for one in layouts])
        self._parts = {
            kind: PartBytes.of([layer_part(one, kind) for one in layouts], settings)
            for kind in self.kinds
        }
        if EXPERT_KINDS.intersection(self.kinds):
            self._read_routed(table, settings)
        weights, self.places = table.each(_weights, ("tp", "ep", "etp"))
        self.weights = {kind: _stacked([of[kind] for of, _ in weights]) for kind in weights[0][0]}
        self.stage_scratch = np.array([scratch for _, scratch in weights])
        self._num_deferred: Ints | None = None
        if config.defers_head_gradients:
            deferred, places = table.each(
                attrgetter("num_deferred_heads"),
                (),
                table.num_microbatches,
                table.numbers("pp") > 1,
            )
            self._num_deferred = np.array(deferred)[places]

    def _read_routed(self, table: LayoutTable, settings: Sequence[RunConfig]) -> None:
        tokens = np.unique(self._modules.split_tokens, return_inverse=True)[1]
        etp = table.numbers("etp")
        is_full = np.array([one.recompute is Recompute.FULL for one in settings])
        routed, self._routed = table.each(
            routed_part,
            ("ep",),
            np.where(etp > 0, etp, table.numbers("tp")),
            tokens[self._micro],
            is_full[self._setting],
        )
        self._routed_part = PartBytes.of(routed, settings)

    def take(self, rows: Ints) -> tuple[ModuleBytes, dict[BlockKind, LayerBytes]]:
        """Return the bytes in some layouts, by index, of each kind of layer apart."""
        modules = ModuleBytes(**columns(self._modules, self._micro[rows]))
        layers = {kind: self._part(kind, rows).layer(modules.layer_input) for kind in self.kinds}
        head_saved, head_scratch = modules.head_saved, modules.head_scratch
        for kind in _predicted_kinds(self.model):
            head_saved = head_saved + self.model.num_prediction_layers * layers[kind].saved
        if self._num_deferred is not None:
            head_scratch = head_scratch + self._num_deferred[rows] * modules.waiting
        return replace(modules, head_saved=head_saved, head_scratch=head_scratch), {
            kind: replace(
                one,
                saved=one.saved + modules.added,
                working=np.maximum(one.working - _freed_nbytes(self.model, kind, layers), 0.0),
            )
            for kind, one in layers.items()
        }

    def _part(self, kind: BlockKind, rows: Ints) -> PartBytes:
        setting = self._setting[rows]
        part = self._parts[kind].take(setting, self._micro[rows])
        if kind not in EXPERT_KINDS:
            return part
        return part + self._routed_part.take(setting, self._routed[rows])


def _stacked(records: Sequence[_Record]) -> _Record:
    """Return one record whose numbers are the columns of those of many."""
    names = (one.name for one in fields(records[0]))
    return replace(
        records[0],
        **{name: np.array([getattr(one, name) for one in records], float) for name in names},
    )


def _itself(config: RunConfig) -> RunConfig:
    return config


def _kinds(model: ModelShape) -> tuple[BlockKind, ...]:
    """Return the kinds of a model's layers, and of those inside its prediction layers."""
    kinds = {*layer_kinds(model), *_predicted_kinds(model)}
    return tuple(kind for kind in BlockKind if kind in kinds)


def _predicted_kinds(model: ModelShape) -> list[BlockKind]:
    """Return the kinds of the layers inside one prediction layer, if there is any."""
    if not model.num_prediction_layers:
        return []
    if not model.prediction_kinds:
        return [layer_kind(model, model.num_layers - 1)]
    number = len(model.prediction_kinds)
    inner = replace(model, layer_kinds=model.prediction_kinds, num_layers=number)
    return [layer_kind(inner, place) for place in range(number)]


def _module_bytes(config: RunConfig) -> ModuleBytes:
    """Return the bytes that follow from a micro-batch and its split, without any layer.

    Each prediction layer adds two norms, a product, a layer (of the last one's kind) and a head,
    and its logits are retained until the last loss.
    """
    model, size = config.model, sizes(config)
    hidden = size.split_tokens * model.hidden_size
    # Two norm inputs, their concatenated outputs, input and output of the final norm.
    each = 6 * hidden * size.nbytes + _saved_logits_nbytes(config)
    logits = size.tokens * model.vocab_size / config.parallelism.tp
    return ModuleBytes(
        split_tokens=size.split_tokens,
        layer_input=hidden * size.nbytes,
        embedding_saved=8 * size.tokens + (hidden if config.hidden_dropout else 0),
        embedding_grad=_vocabulary_numel(config) * size.nbytes,
        head_saved=2 * hidden * size.nbytes + model.num_prediction_layers * each,
        loss=loss_nbytes(config),
        head_scratch=_head_scratch(config),
        waiting=(hidden + logits) * size.nbytes,
        added=0.0 if model.layer_kinds else added_saved_nbytes(config),
    )


def _weights(config: RunConfig) -> tuple[dict[BlockKind, ModuleWeights], float]:
    """Return the weights of each module of a layout, and the scratch bytes of every stage."""
    # They do not depend on recompute and micro-batch size, nor do the blocks that they are read
    # from; as many micro-batches as before can run.
    samples = config.batch.global_batch_size // config.batch.micro_batch_size
    one_sample = Batch(micro_batch_size=1, global_batch_size=samples)
    plain = RecomputeOption().applied_to(replace(config, batch=one_sample))
    blocks = {kind: block(plain, kind) for kind in _kinds(config.model)}
    # The head has its table alone: the block of prediction layers begins with the final norm.
    last = block_numel(norm_module(plain, "final_norm").tensors)
    if config.model.num_prediction_layers:
        last = block(plain, BlockKind.PREDICTION).numel
    embedding = block(plain, BlockKind.EMBEDDING).numel
    weights = {
        BlockKind.EMBEDDING: ModuleWeights(numel=embedding.dense),
        BlockKind.PREDICTION: ModuleWeights(numel=last.dense, expert_numel=last.expert),
        BlockKind.HEAD: ModuleWeights(numel=_vocabulary_numel(config)),
        **{
            kind: ModuleWeights(
                numel=layer.numel.dense,
                expert_numel=layer.numel.expert,
                copies=_fp8_extra(config, layer),
                scratch=_layer_scratch(config, layer),
            )
            for kind, layer in blocks.items()
        },
    }
    return weights, _stage_scratch(config, blocks)


def _freed_nbytes(
    model: ModelShape, kind: BlockKind, layers: Mapping[BlockKind, LayerBytes]
) -> Number:
    """Return the bytes that layers after the last of a kind have freed before its backward pass."""
    if not model.layer_kinds:
        return 0.0
    freed: Number = 0.0
    for layer in reversed(range(model.num_layers)):
        if (after := layer_kind(model, layer)) is kind:
            return freed
        freed = freed + layers[after].saved
    return 0.0


def _saved_logits_nbytes(config: RunConfig) -> float:
    """Return the bytes saved by cross-entropy: fp32 probabilities, the logits that its kernel
    overwrites, or none with a fused head."""
    size = sizes(config)
    if config.fuses_head:
        return 0.0
    logits = size.tokens * config.model.vocab_size / config.parallelism.tp
    return logits * (4 if config.keeps_fp32_logits else size.nbytes)


def loss_nbytes(config: RunConfig) -> float:
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


def _fused_head_nbytes(config: RunConfig, logits: float, plain_nbytes: float) -> float:
    """Return the peak of a fused head: the logits of one piece, the gradient of the hidden states,
    summed in fp32, and that of the whole table, beside that of a piece of tokens.

    ``logits`` are those of all pieces, ``plain_nbytes`` what PyTorch's loss would need for them.
    """
    size = sizes(config)
    table = _vocabulary_numel(config) * size.nbytes
    summed = size.tokens * config.model.hidden_size * 4 + table
    if _is_torch(config):
        piece = logits * size.nbytes / LOSS_CHUNKS
        return summed + max(plain_nbytes / LOSS_CHUNKS, piece + table)
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


def _stage_scratch(config: RunConfig, blocks: Mapping[BlockKind, Block]) -> float:
    """Return the placeholders of a GPT's attention, and a workspace; four more if experts run as a
    grouped product."""
    model, scratch = config.model, 0.0
    if not model.layer_kinds:
        scratch = _wgrads(config, next(iter(blocks.values())), _ATTENTION_PRODUCTS)
    if config.device == "cpu":
        return scratch
    is_grouped = model.experts is not None and model.experts.is_grouped
    return scratch + CUBLAS_WORKSPACE_NBYTES * (5 if is_grouped else 1)


def _head_scratch(config: RunConfig) -> float:
    """Return the bytes of the output product's placeholder, gathered input and workspace."""
    size, model = sizes(config), config.model
    gathered = size.tokens * model.hidden_size * size.nbytes if size.is_gathered else 0.0
    if config.device == "cpu":
        return gathered
    placeholder = _vocabulary_numel(config) * size.nbytes if _has_placeholders(config) else 0
    return gathered + placeholder + CUBLAS_WORKSPACE_NBYTES
