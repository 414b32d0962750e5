"""Which layouts a run could have on so many ranks, and what to call them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from ..errors import ConfigError
from ..workload.config import Batch, Parallelism, Recompute, RunConfig, Schedule, Sharding
from ..workload.model_shape import at_most
from ..workload.pipeline_layout import uneven_layers

LONG_SEQUENCE = 8192
"""From this length on context parallelism is tried where the run has none."""
# Divisors of 8: 1, 2, 4 and 8, the ranks of a usual node.
_MOST_CONTEXT = 8
# Each virtual stage adds messages, and each choice multiplies the layouts.
_MOST_VIRTUAL = 8


def layout_label(config: RunConfig) -> str:
    """Degrees above one, sharding, micro-batch and recompute, as ``TP4 PP2 DP2 ZeRO1 mbs2 full``.

    ``x2`` behind the sharding: two copies, each over a part of the replicas.
    """
    par = config.parallelism
    degrees = (
        ("TP", par.tp),
        ("CP", par.cp),
        ("EP", par.ep),
        ("ETP", par.etp if par.ep > 1 and par.etp != par.tp else 0),
        ("PP", par.pp),
        ("VP", par.vp),
        ("DP", par.dp),
    )
    words = [f"{name}{degree}" for name, degree in degrees if degree > 1]
    if par.dp * par.cp > 1:
        words += _sharding(par)
    if par.chunk_layers:
        words.append(_layers(par.chunk_layers))
    if par.schedule is not Schedule.ONE_F_ONE_B:
        words.append(par.schedule.value)
    words.append(f"mbs{config.batch.micro_batch_size}")
    if config.recompute is not Recompute.NONE:
        words.append("+".join((config.recompute.value, *config.recompute_modules)))
    return " ".join(words)


def _sharding(par: Parallelism) -> list[str]:
    if par.sharded is Sharding.NONE:
        return []
    copies = f"x{par.num_optimizer_instances}" if par.num_optimizer_instances > 1 else ""
    if par.shards_weights:
        return ["HSDP" if copies else "FSDP"]
    return [f"{'ZeRO2' if par.sharded is Sharding.GRADS else 'ZeRO1'}{copies}"]


def _layers(chunk_layers: tuple[int, ...]) -> str:
    """Layers of the chunks in short.

    >>> _layers((16, 16, 16, 14))
    '16x3-14'
    """
    runs = [(number, len(list(run))) for number, run in groupby(chunk_layers)]
    return "-".join(f"{number}x{count}" if count > 1 else f"{number}" for number, count in runs)


def enumerate_layouts(config: RunConfig, num_ranks: int) -> list[RunConfig]:
    """Every layout over ``num_ranks`` ranks that can run: degrees, micro-batch, recompute.

    The global batch stays; so do overlap, distributed optimizer and sequence parallelism where they
    apply (experts over tp always have the last).  Where layers do not split evenly the last stage
    has fewer or more.  Context parallelism is varied where the run has it or sequences are long,
    and expert parallelism where the model has experts.
    """
    if num_ranks < 1:
        raise ConfigError(f"{num_ranks} ranks are none; give at least 1")
    at_most("gpus", num_ranks)
    return [
        layout for degrees in _degrees(config, num_ranks) for layout in _variants(config, degrees)
    ]


def _degrees(config: RunConfig, num_ranks: int) -> Iterator[dict[str, int]]:
    """tp, cp, ep, pp and dp."""
    model, samples = config.model, config.batch.global_batch_size
    for tp in _divisors(num_ranks):
        if model.num_attention_heads % tp or model.vocab_size % tp:
            continue
        for cp in _contexts(config):
            for pp in _divisors(num_ranks // (tp * cp)) if num_ranks % (tp * cp) == 0 else ():
                dp = num_ranks // (tp * cp * pp)
                if pp > model.num_layers or samples % dp:
                    continue
                for ep in _experts(config, tp * cp * dp, tp):
                    yield {"tp": tp, "cp": cp, "ep": ep, "pp": pp, "dp": dp}


def _contexts(config: RunConfig) -> list[int]:
    own, seq_length = config.parallelism.cp, config.model.seq_length
    most = _MOST_CONTEXT if config.device != "cpu" and seq_length >= LONG_SEQUENCE else 1
    return sorted({own, *(cp for cp in _divisors(most) if seq_length % (2 * cp) == 0)} | {1})


def _experts(config: RunConfig, num_ranks: int, tp: int) -> list[int]:
    """Degrees of expert parallelism that divide the experts and the ranks of a stage."""
    experts = config.model.experts
    if experts is None:
        return [1]
    shared = config.parallelism.etp or tp
    return [ep for ep in _divisors(experts.num_experts) if num_ranks % (ep * shared) == 0]


def _variants(config: RunConfig, degrees: dict[str, int]) -> Iterator[RunConfig]:
    """Virtual stages, micro-batches and recompute of one set of degrees."""
    samples = config.batch.global_batch_size // degrees["dp"]
    for micro in _divisors(samples):
        batch = Batch(micro_batch_size=micro, global_batch_size=config.batch.global_batch_size)
        for vp in _virtual(config, degrees, samples // micro):
            try:
                parallelism = _parallelism(config, degrees, vp)
                yield from _recomputed(config, parallelism, batch)
            except ConfigError:
                continue


def _virtual(config: RunConfig, degrees: dict[str, int], num_microbatches: int) -> list[int]:
    each, rest = divmod(config.model.num_layers, degrees["pp"])
    if degrees["pp"] == 1 or num_microbatches % degrees["pp"] or rest:
        return [1]
    return [vp for vp in _divisors(each) if vp <= _MOST_VIRTUAL]


def _parallelism(config: RunConfig, degrees: dict[str, int], vp: int) -> Parallelism:
    own = config.parallelism
    # Megatron trains experts over tp only with sequence parallelism.
    is_split = own.is_sequence_parallel or config.model.experts is not None
    return replace(
        own,
        **degrees,
        vp=vp,
        chunk_layers=uneven_layers(config.model.num_layers, degrees["pp"]),
        microbatch_group_size=0,
        schedule=own.schedule if vp == 1 else Schedule.ONE_F_ONE_B,
        is_sequence_parallel=is_split and degrees["tp"] > 1,
    )


def _recomputed(config: RunConfig, parallelism: Parallelism, batch: Batch) -> Iterator[RunConfig]:
    each = config.model.num_layers // parallelism.num_chunks
    if parallelism.chunk_layers:
        each = min(parallelism.chunk_layers)
    for recompute in Recompute:
        is_own = recompute is config.recompute
        kept = config.recompute_num_layers if is_own else 0
        yield replace(
            config,
            parallelism=parallelism,
            batch=batch,
            recompute=recompute,
            recompute_num_layers=kept if kept <= each else 0,
            recompute_modules=config.recompute_modules if is_own else (),
        )


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
