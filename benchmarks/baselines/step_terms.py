"""FLOP of a step, and the ten analytical terms of a deliberately crude baseline.

The real models are in ``calib/workload`` and ``calib/timeline``; a baseline shares no code with
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from forerun.calib.fit.priors import device_prior
from forerun.calib.workload.config import Fp8Recipe, Recompute, RunConfig
from forerun.calib.workload.model_shape import ModelShape

NUM_TERMS = 10
_FORWARD_AND_BACKWARD = 3
_LAYER_S = 1.5e-3
"""Launch time of one layer, forward and backward."""
_STEP_S = 10e-3
_LINK_FRAC = 0.1
"""Bandwidth of intra-node links relative to memory bandwidth, on A100 to B200."""
_NETWORK_FRAC = 0.0125
"""Bandwidth of each device's share of the network relative to memory bandwidth."""
_ATTAINED = 0.6
"""Fraction of data-sheet FLOP/s that matrix products reach."""


@lru_cache(maxsize=65536)
def step_flop(config: RunConfig) -> float:
    """Return FLOP of a step over all ranks: products and causal attention x 3, recompute once.

    >>> from forerun.calib.workload.config import Batch, ModelShape, Parallelism, RunConfig
    >>> shape = ModelShape(num_layers=1, hidden_size=64, ffn_hidden_size=256, vocab_size=128,
    ...     num_attention_heads=1, num_query_groups=1, kv_channels=64, seq_length=1)
    >>> one = RunConfig(model=shape, parallelism=Parallelism(),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=1))
    >>> step_flop(one) == 6 * (12 * 64**2 + 128 * 64) + 6 * 64
    True
    """
    model = config.model
    tokens = config.batch.global_batch_size * model.seq_length
    forward = sum(_layer(model, layer).flop for layer in range(model.num_layers))
    passes = _FORWARD_AND_BACKWARD + (config.recompute is Recompute.FULL)
    head = 2 * model.hidden_size * model.vocab_size * (1 + model.num_prediction_layers)
    return float(tokens * (passes * forward + _FORWARD_AND_BACKWARD * head))


@lru_cache(maxsize=65536)
def step_terms(config: RunConfig) -> tuple[float, ...]:
    """Return seconds of each of the ten terms at nominal rates.

    Products, attention, memory traffic, launches and collectives of the layers of the fullest
    stage; head, transfers between stages, gradient reduction, optimizer, and a constant.
    """
    whole = [_layer(config.model, layer) for layer in range(config.model.num_layers)]
    mean = _Layer(
        **{
            name: sum(getattr(one, name) for one in whole) / len(whole)
            for name in _Layer.__dataclass_fields__
        }
    )
    rates = _rates(config)
    stage = max(_stage_layers(config))
    return (*_layer_terms(config, mean, stage, rates), *_other_terms(config, mean, stage, rates))


def _layer_terms(
    config: RunConfig, layer: _Layer, stage: int, rates: _Rates
) -> tuple[float, float, float, float, float]:
    """Return products, attention, memory traffic, launches and collectives of the fullest stage."""
    model, par, nbytes = config.model, config.parallelism, config.precision.nbytes
    slots = config.num_microbatches * (1 + config.bubble_frac)
    passes = _FORWARD_AND_BACKWARD + (config.recompute is Recompute.FULL)
    work = slots * stage * passes * _tokens(config)
    scores = 0.0
    if not config.is_attention_fused:
        scores = 5 * nbytes * model.num_attention_heads * model.seq_length
    elements = (16 + 9 * model.ffn_hidden_size / model.hidden_size) * model.hidden_size
    moved = 4 * (par.tp - 1) / par.tp / rates.group(config, par.tp)
    moved += (par.cp > 1) * 2 / rates.link
    moved += 4 * layer.active_experts / par.tp * (par.ep > 1) / rates.group(config, par.ep)
    return (
        work * layer.product_flop / par.tp / rates.flop_per_s,
        work / par.tp * (layer.attention_flop / rates.wide_flop_per_s + scores / rates.bytes_per_s),
        work * nbytes * elements / par.tp / rates.bytes_per_s,
        slots * stage * _LAYER_S * passes / _FORWARD_AND_BACKWARD,
        work * nbytes * model.hidden_size * moved / 2,
    )


def _other_terms(
    config: RunConfig, layer: _Layer, stage: int, rates: _Rates
) -> tuple[float, float, float, float, float]:
    """Return head, transfers between stages, gradient reduction, optimizer and a constant."""
    model, par = config.model, config.parallelism
    head = model.hidden_size * model.vocab_size / par.tp
    slots = config.num_microbatches * (1 + config.bubble_frac)
    sent = config.precision.nbytes * _tokens(config) * model.hidden_size
    sent /= par.tp if par.is_sequence_parallel else 1
    dense = stage * layer.dense / par.tp + head
    experts = stage * layer.experts / (par.expert_tp * par.ep)
    reduced = dense * (par.dp - 1) / par.dp + experts * (par.expert_dp - 1) / par.expert_dp
    grads = 2 if config.reduces_grads_in_bf16 else 4
    shards = par.dp if par.is_optimizer_distributed else 1
    passes = _FORWARD_AND_BACKWARD * config.num_microbatches
    return (
        passes * 2 * _tokens(config) * head / rates.wide_flop_per_s,
        (par.pp > 1) * 2 * slots * sent / rates.network,
        2 * grads * reduced / rates.group(config, par.tp * par.cp * par.dp),
        24 * (dense + experts) / shards / rates.bytes_per_s,
        _STEP_S,
    )


def _tokens(config: RunConfig) -> float:
    """Return tokens of a micro-batch on one rank, not divided by TP."""
    return config.batch.micro_batch_size * config.model.seq_length / config.parallelism.cp


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    """Nominal rates of a device."""

    flop_per_s: float
    """Rate of matrix products, in 8 bits if the run uses them."""
    wide_flop_per_s: float
    """Rate of work that stays in the precision of the activations."""
    bytes_per_s: float
    link: float
    """Bytes per second to a device of the same node."""
    network: float
    """Bytes per second to a device of another node."""

    def group(self, config: RunConfig, span: int) -> float:
        """Return bytes per second between neighbours of a group over ``span`` consecutive ranks."""
        per_node = config.parallelism.ranks_per_node
        return self.link if not per_node or span <= per_node else self.network


def _rates(config: RunConfig) -> _Rates:
    prior = device_prior(config.device)
    nbytes = config.precision.nbytes
    bytes_per_s = prior.peaks_for(2).bytes_per_s
    narrow = nbytes if config.fp8 is Fp8Recipe.NONE else 1
    return _Rates(
        flop_per_s=_ATTAINED * prior.peaks_for(narrow).flop_per_s,
        wide_flop_per_s=_ATTAINED * prior.peaks_for(nbytes).flop_per_s,
        bytes_per_s=bytes_per_s,
        link=_LINK_FRAC * bytes_per_s,
        network=_NETWORK_FRAC * bytes_per_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer, per token and not divided by TP."""

    product_flop: float
    attention_flop: float
    dense: float
    """Parameters replicated over the expert-parallel ranks."""
    experts: float
    """Parameters of all routed experts together."""
    active_experts: float
    """Experts per token; 0 in a dense layer."""

    @property
    def flop(self) -> float:
        return self.product_flop + self.attention_flop


@lru_cache(maxsize=4096)
def _layer(model: ModelShape, layer: int) -> _Layer:
    hidden, heads = model.hidden_size, model.num_attention_heads
    products = 3 if model.is_gated else 2
    latent = model.latent_attention
    if latent is None:
        query = heads * model.kv_channels
        attention = 2 * hidden * (query + model.num_query_groups * model.kv_channels)
        width = 2 * query
    else:
        key = latent.qk_head_dim + latent.qk_pos_emb_head_dim
        low = latent.q_lora_rank
        queries = low * (hidden + heads * key) if low else hidden * heads * key
        values = latent.kv_lora_rank * heads * (latent.qk_head_dim + latent.v_head_dim)
        joint = hidden * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
        attention = queries + values + joint + heads * latent.v_head_dim * hidden
        width = heads * (key + latent.v_head_dim)
    experts = model.experts if model.has_experts(layer) else None
    if experts is None:
        used = shared = products * hidden * model.ffn_hidden_size
        routed = 0.0
    else:
        shared = products * hidden * experts.shared_ffn_hidden_size
        each = products * hidden * experts.ffn_hidden_size
        used, routed = shared + experts.top_k * each, float(experts.num_experts * each)
    return _Layer(
        product_flop=2.0 * (attention + used),
        # A token attends to half of the sequence on average: two products of its width.
        attention_flop=float(model.seq_length * width),
        dense=float(attention + shared),
        experts=routed,
        active_experts=float(experts.top_k) if experts else 0.0,
    )


def _stage_layers(config: RunConfig) -> list[int]:
    sizes = config.chunk_layers
    return [sum(sizes[c] for c in config.chunks_of(s)) for s in range(config.parallelism.pp)]
