"""Short names of layouts."""

from __future__ import annotations

from itertools import groupby

from ..workload import Engine, Parallelism, Recompute, RunConfig, Sharding, takes_options

NO_OVERLAP, GRAD_OVERLAP = "noOverlap", "gradOverlap"
"""Data-parallel transfers do not overlap with passes; only gradients do."""
NO_P2P = "noP2P"
"""Messages between virtual stages do not overlap."""
OFFLOAD_OVERLAP = "+overlap"
"""Transfers of optimizer states to the host and back overlap with the optimizer."""


def layout_label(config: RunConfig) -> str:
    """Return degrees above 1, sharding, micro-batch, recompute: ``TP4 PP2 DP2 ZeRO1 mbs2 full``.

    ``x2`` behind the sharding means two copies, each over a part of the replicas.  Overlap is named
    unless everything overlaps that can.
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
    if par.tp > 1 and par.is_sequence_parallel != is_usually_split(config):
        words.append("SP" if par.is_sequence_parallel else "noSP")
    if par.dp * par.cp > 1:
        words += _sharding(par)
        words += _overlaps(config)
    if par.vp > 1 and not par.overlaps_p2p:
        words.append(NO_P2P)
    if par.chunk_layers:
        words.append(layers_text(par.chunk_layers))
    words.append(f"mbs{config.batch.micro_batch_size}")
    if config.recompute is not Recompute.NONE:
        layers = f":{config.recompute_num_layers}" if config.recompute_num_layers else ""
        words.append("+".join((config.recompute.value + layers, *config.recompute_modules)))
    if config.optimizer_offload_frac:
        suffix = OFFLOAD_OVERLAP if config.overlaps_optimizer_offload else ""
        words.append(f"offload:{100 * config.optimizer_offload_frac:.0f}{suffix}")
    return " ".join(words)


def is_usually_split(config: RunConfig) -> bool:
    """Return True if sequence parallelism is the default of a label with tp.

    It is on accelerators, where it saves memory and work, and with experts.
    """
    return config.device != "cpu" or config.model.experts is not None


def label_names_overlaps(config: RunConfig) -> bool:
    """Return True if a label names missing overlap of data-parallel transfers.

    It does on accelerators if the program has options for either.
    """
    is_megatron = config.parallelism.engine is Engine.MEGATRON
    return config.device != "cpu" and takes_options(config) and is_megatron


def _overlaps(config: RunConfig) -> list[str]:
    par = config.parallelism
    usual = True, par.is_optimizer_distributed
    if (
        not label_names_overlaps(config)
        or (par.overlaps_grad_reduce, par.overlaps_param_gather) == usual
    ):
        return []
    return [GRAD_OVERLAP if par.overlaps_grad_reduce else NO_OVERLAP]


def _sharding(par: Parallelism) -> list[str]:
    if par.sharded is Sharding.NONE:
        return []
    copies = f"x{par.num_optimizer_instances}" if par.num_optimizer_instances > 1 else ""
    if par.shards_weights:
        return ["HSDP" if copies else "FSDP"]
    return [f"{'ZeRO2' if par.sharded is Sharding.GRADS else 'ZeRO1'}{copies}"]


def layers_text(chunk_layers: tuple[int, ...]) -> str:
    """Return the layers of the chunks in short.

    >>> layers_text((16, 16, 16, 14))
    '16x3-14'
    """
    runs = [(number, len(list(run))) for number, run in groupby(chunk_layers)]
    return "-".join(f"{number}x{count}" if count > 1 else f"{number}" for number, count in runs)
