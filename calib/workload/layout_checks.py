"""Rules that a layout must keep to run; each error says value, rule and remedy."""

from __future__ import annotations

from ..errors import ConfigError
from .batch import Batch
from .model_shape import ModelShape, at_most
from .parallelism import SCHEDULES, Parallelism


def check_layout(model: ModelShape, par: Parallelism, batch: Batch) -> None:
    """Raise ``ConfigError`` (value, rule, remedy) where the layout cannot run."""
    _check_chunks(model, par)
    _check_degrees(model, par)
    _check_replicas(par)
    _check_sequence(model, par)
    _check_experts(model, par)
    share = batch.micro_batch_size * par.dp
    if batch.global_batch_size % share:
        raise ConfigError(
            f"global_batch_size {batch.global_batch_size} is not a multiple of micro_batch_size "
            f"{batch.micro_batch_size} x dp {par.dp}; nearest that is: "
            f"{max(1, round(batch.global_batch_size / share)) * share}"
        )
    num_microbatches = batch.global_batch_size // share
    at_most("num_microbatches", num_microbatches)
    if par.vp > 1:
        _check_groups(par, num_microbatches)
    if par.vp > 1 and not SCHEDULES[par.schedule].interleaves:
        raise ConfigError(
            f"schedule {par.schedule.value} has no virtual stages, but vp is {par.vp}; set vp 1"
        )


def _check_groups(par: Parallelism, num: int) -> None:
    """The rule of Megatron's interleaved schedule (core 0.16.1)."""
    group = par.microbatch_group_size or par.pp
    if par.pp == 2 and not par.overlaps_p2p:
        raise ConfigError(
            f"vp {par.vp} on 2 stages needs messages that overlap, but they do not; leave "
            f"--no-overlap-p2p-communication out or set vp 1"
        )
    if not par.pp <= group <= num:
        raise ConfigError(
            f"microbatch_group_size {group} is not between pp {par.pp} and num_microbatches {num}, "
            f"as interleaving needs; change micro_batch_size or set vp 1"
        )
    if 0 < num % group < par.pp:
        raise ConfigError(
            f"num_microbatches {num} is not a multiple of the group of {group} that interleaving "
            f"needs, nor leaves pp {par.pp} or more; change micro_batch_size or set vp 1"
        )


def _check_chunks(model: ModelShape, par: Parallelism) -> None:
    if par.chunk_layers:
        if sum(par.chunk_layers) != model.num_layers or min(par.chunk_layers) < 0:
            raise ConfigError(
                f"chunk_layers {par.chunk_layers} hold {sum(par.chunk_layers)} layers, not "
                f"num_layers {model.num_layers}; let them add up"
            )
    elif model.num_layers % par.num_chunks:
        raise ConfigError(
            f"num_layers {model.num_layers} does not split over pp {par.pp} x vp {par.vp}; "
            f"nearest that do: {_nearest_splits(model.num_layers, par.pp, par.vp)}"
        )
    if par.vp > 1 and par.pp < 2:
        raise ConfigError(f"vp {par.vp} needs a pipeline, but pp is {par.pp}; set pp >= 2 or vp 1")


def _check_degrees(model: ModelShape, par: Parallelism) -> None:
    for name in ("num_attention_heads", "ffn_hidden_size", "vocab_size"):
        if getattr(model, name) % par.tp:
            raise ConfigError(
                f"{name} {getattr(model, name)} is not a multiple of tp {par.tp}; "
                f"choose tp from {_divisors(getattr(model, name))}"
            )
    groups = model.num_query_groups
    if groups % par.tp and par.tp % groups:
        raise ConfigError(
            f"num_query_groups {groups} is neither a multiple nor a divisor of tp {par.tp}; "
            f"choose tp from {_divisors(groups)}"
        )


def _check_replicas(par: Parallelism) -> None:
    """The rule of ``initialize_model_parallel`` (core 0.16.1), for either kind of replicas."""
    for name, number in (("dp x cp", par.dp * par.cp), ("expert dp", par.expert_dp)):
        if number % par.num_optimizer_instances:
            raise ConfigError(
                f"num_optimizer_instances {par.num_optimizer_instances} does not divide {name} "
                f"{number}; choose from {_divisors(number)}"
            )


def _check_sequence(model: ModelShape, par: Parallelism) -> None:
    if model.seq_length % (2 * par.cp) and par.cp > 1:
        raise ConfigError(
            f"seq_length {model.seq_length} is not a multiple of 2 x cp {par.cp}, as balanced "
            f"causal attention needs; choose cp from {_divisors(model.seq_length // 2)}"
        )
    local = model.seq_length // par.cp
    if par.is_sequence_parallel and local % par.tp:
        raise ConfigError(
            f"seq_length {model.seq_length} over cp {par.cp} is not a multiple of tp {par.tp}; "
            f"choose tp from {_divisors(local)} or leave sequence parallelism off"
        )
    groups = model.num_query_groups
    heads = min(model.num_attention_heads, groups)
    if par.exchanged_cp > 1 and heads % (par.tp * par.exchanged_cp):
        raise ConfigError(
            f"{heads} heads or groups are not a multiple of tp {par.tp} x cp {par.exchanged_cp}, "
            f"as the exchange a2a needs; choose cp from {_divisors(max(1, heads // par.tp))} or p2p"
        )
    if par.cp % par.exchanged_cp:
        raise ConfigError(
            f"cp {par.cp} is not a multiple of the {par.exchanged_cp} ranks that exchange heads; "
            "give hierarchical sizes whose product is cp"
        )


def _check_experts(model: ModelShape, par: Parallelism) -> None:
    experts = model.experts
    if experts is None:
        if par.ep > 1:
            raise ConfigError(f"ep {par.ep} needs experts, but the model has none; set ep 1")
        return
    if experts.num_experts % par.ep:
        raise ConfigError(
            f"num_experts {experts.num_experts} is not a multiple of ep {par.ep}; "
            f"choose ep from {_divisors(experts.num_experts)}"
        )
    for name, width, tp in (
        ("expert ffn_hidden_size", experts.ffn_hidden_size, par.expert_tp),
        ("shared_ffn_hidden_size", experts.shared_ffn_hidden_size, par.tp),
    ):
        if width % tp:
            raise ConfigError(
                f"{name} {width} is not a multiple of its tp {tp}; choose tp or expert tp from "
                f"{_divisors(width)}"
            )
    if par.tp > 1 and not par.is_sequence_parallel:
        # ``MoELayer.forward`` of core 0.16.1 refuses to train so.
        raise ConfigError(
            f"experts with tp {par.tp} need sequence parallelism, but it is off; give "
            f"--sequence-parallel or set tp 1"
        )


def _divisors(number: int) -> str:
    found = [d for d in (1, 2, 4, 8, 16, 32, 64) if number % d == 0]
    return ", ".join(str(d) for d in found)


def _nearest_splits(num_layers: int, pp: int, vp: int) -> str:
    pairs = [
        (abs(p * v - pp * vp), abs(p - pp), p, v)
        for p in range(1, num_layers + 1)
        for v in range(1, max(vp, 1) + 1)
        if num_layers % (p * v) == 0 and (v == 1 or p > 1)
    ]
    return ", ".join(f"pp {p} x vp {v}" for _, _, p, v in sorted(pairs)[:2])
