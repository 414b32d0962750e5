"""Parser for layout names, as plans print them and users type them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..errors import ConfigError
from ..search import (
    GRAD_OVERLAP,
    NO_OVERLAP,
    NO_P2P,
    OFFLOAD_OVERLAP,
    WHOLE,
    is_usually_split,
    label_names_overlaps,
)
from ..workload import (
    Batch,
    Parallelism,
    Recompute,
    RunConfig,
    Sharding,
    at_least_one,
    choice,
    uneven_layers,
    whole,
)

RUNNING = "running"
_DEGREES = {n: n for n in ("tp", "cp", "ep", "etp", "pp", "vp", "dp", "mbs")} | {"vpp": "vp"}
_NUMBERED = re.compile(r"([a-z]+?)(\d+)$")
_SHARDED = re.compile(r"(?:ddp|fsdp|zero0|(?:zero[1-3]|hsdp)(?:x\d+)?)$")
_LAYERS = re.compile(r"(?:\d+x\d+|\d+(?:x\d+)?(?:-\d+(?:x\d+)?)+)$")
_MOST_DIGITS = 4
"""Digits of a number of stages; more are a typing error, and would only fill memory."""
_USAGE = (
    "write it as a plan does (TP4 PP2 DP2 mbs2), in short names over the running layout (tp4 pp2), "
    "or as running"
)


def named_layout(text: str, running: RunConfig, num_ranks: int = 0) -> RunConfig:
    """Return the layout named by ``text``, on ``num_ranks`` ranks (0: as running) unless it has dp.

    With degrees in capitals, as a plan prints it, choices that are not named are 1 or off.  In
    lower case it is a change of the running layout, which keeps all other choices; dp follows.
    Raises ``ConfigError`` if a word is unknown or the layout cannot run.

    >>> from ..workload import ModelShape
    >>> gpt = ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> running = RunConfig(model=gpt, parallelism=Parallelism(tp=2, dp=4),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=16))
    >>> found = [named_layout(text, running).parallelism for text in ("PP2 DP4 mbs1", "pp2")]
    >>> [(par.tp, par.pp, par.dp) for par in found]
    [(1, 2, 4), (2, 2, 2)]
    """
    words = text.replace(",", " ").split()
    if not words:
        raise ConfigError(f"no layout is named; {_USAGE}")
    if [word.lower() for word in words] == [RUNNING]:
        return running
    named = dict(pair for word in words for pair in _read(word))
    is_whole = any(word.isupper() or word[:4] == "ZeRO" for word in words)
    ranks = num_ranks or running.parallelism.num_ranks
    return _built(named, running, ranks, is_whole=is_whole)


def _read(word: str) -> Iterator[tuple[str, Any]]:
    """Yield names with values: degrees as integers, all else in the types of a layout."""
    small = word.lower().replace("=", "")
    numbered = _NUMBERED.match(small)
    head, _, modules = small.partition("+")
    if _SHARDED.match(small):
        name, _, copies = small.partition("x")
        is_hybrid = name == "hsdp"
        yield "sharding", Sharding(choice("sharding").parse("fsdp" if is_hybrid else name))
        yield "copies", int(copies) if copies else (0 if is_hybrid else 1)
    elif numbered and numbered.group(1) in _DEGREES:
        name = _DEGREES[numbered.group(1)]
        number = whole(name, numbered.group(2))
        at_least_one(name, number)
        yield name, number
    elif _LAYERS.match(small):
        yield "chunk_layers", _layers(small)
    elif head.partition(":")[0] in {one.value for one in Recompute}:
        kind, _, layers = head.partition(":")
        yield "recompute", Recompute(kind)
        yield "recompute_modules", tuple(modules.split("+")) if modules else ()
        yield "recompute_num_layers", whole("layers", layers) if layers else 0
    elif small in ("sp", "nosp"):
        yield "is_sequence_parallel", small == "sp"
    elif small in (NO_OVERLAP.lower(), GRAD_OVERLAP.lower()):
        yield "overlaps", (small == GRAD_OVERLAP.lower(), False)
    elif small == NO_P2P.lower():
        yield "overlaps_p2p", False
    elif small.startswith("offload:"):
        share = small.partition(":")[2]
        yield "optimizer_offload_frac", whole("offload", share.removesuffix(OFFLOAD_OVERLAP)) / 100
        yield "overlaps_optimizer_offload", share.endswith(OFFLOAD_OVERLAP)
    else:
        raise ConfigError(f"{word} is not part of a layout; {_USAGE}")


def _layers(text: str) -> tuple[int, ...]:
    """Return the layers of the chunks from text such as ``16x3-14``."""
    out: list[int] = []
    for part in text.split("-"):
        number, _, count = part.partition("x")
        if len(count) > _MOST_DIGITS:
            raise ConfigError(f"{text} has more stages than any pipeline; {_USAGE}")
        out += [int(number)] * int(count or 1)
    return tuple(out)


def _built(
    named: dict[str, Any], running: RunConfig, num_ranks: int, *, is_whole: bool
) -> RunConfig:
    running_par = running.parallelism
    degrees = {
        n: named.get(n, 1 if is_whole else getattr(running_par, n))
        for n in ("tp", "cp", "ep", "pp")
    }
    if degrees["pp"] == 1 or is_whole:
        named.setdefault("vp", 1)
    degrees["vp"] = named.get("vp", running_par.vp)
    split = degrees["tp"] * degrees["cp"] * degrees["pp"]
    if "dp" not in named and num_ranks % split:
        raise ConfigError(
            f"{num_ranks} ranks do not split over tp {degrees['tp']} x cp {degrees['cp']} x pp "
            f"{degrees['pp']}; name dp too for another number of ranks"
        )
    degrees["dp"] = named.get("dp", num_ranks // split)
    micro = named.get("mbs", running.batch.micro_batch_size)
    return replace(
        running,
        parallelism=_parallelism(named, running, degrees, is_whole=is_whole),
        batch=Batch(micro_batch_size=micro, global_batch_size=running.batch.global_batch_size),
        **_recompute(named, running, is_whole=is_whole),
    )


def _parallelism(
    named: dict[str, Any], running: RunConfig, degrees: dict[str, int], *, is_whole: bool
) -> Parallelism:
    running_par = running.parallelism
    is_same_split = (running_par.pp, running_par.vp) == (degrees["pp"], degrees["vp"])
    layers = () if degrees["vp"] > 1 else uneven_layers(running.model.num_layers, degrees["pp"])
    if is_same_split and not is_whole:
        layers = running_par.chunk_layers
    # Megatron trains experts over tp only with sequence parallelism.
    is_split = running_par.is_sequence_parallel or running.model.experts is not None
    if is_whole:
        is_split = is_usually_split(running)
    is_split = named.get("is_sequence_parallel", is_split)
    overlaps_p2p = running_par.overlaps_p2p or (is_whole and degrees["vp"] > 1)
    shared = _sharding(named, running_par, degrees, is_whole=is_whole)
    return replace(
        running_par,
        **degrees,
        etp=named.get("etp", running_par.etp),
        chunk_layers=named.get("chunk_layers", layers),
        microbatch_group_size=running_par.microbatch_group_size if is_same_split else 0,
        is_sequence_parallel=is_split and degrees["tp"] > 1,
        overlaps_p2p=named.get("overlaps_p2p", overlaps_p2p),
        **shared | _overlaps(named, running, degrees, shared, is_whole=is_whole),
    )


def _overlaps(
    named: dict[str, Any],
    running: RunConfig,
    degrees: dict[str, int],
    shared: dict[str, Any],
    *,
    is_whole: bool,
) -> dict[str, bool]:
    """Return the named overlaps; a label that names none has all that are possible."""
    is_alone = degrees["dp"] * degrees["cp"] == 1
    if "overlaps" not in named and (is_alone or not is_whole or not label_names_overlaps(running)):
        return {}
    is_distributed = running.parallelism.is_optimizer_distributed
    usual = True, shared.get("is_optimizer_distributed", is_distributed)
    names = ("overlaps_grad_reduce", "overlaps_param_gather")
    return dict(zip(names, named.get("overlaps", usual), strict=True))


def _sharding(
    named: dict[str, Any], running_par: Parallelism, degrees: dict[str, int], *, is_whole: bool
) -> dict[str, Any]:
    replicas = degrees["dp"] * degrees["cp"]
    if "sharding" not in named:
        # A label with one replica does not name its sharding.
        if not is_whole or replicas == 1:
            return {} if replicas > 1 else {"num_optimizer_instances": 1}
        named = {**named, "sharding": Sharding.NONE, "copies": 1}
    sharding, copies = named["sharding"], named["copies"]
    if sharding is Sharding.NONE:
        return WHOLE
    default_copies = (
        running_par.num_optimizer_instances if running_par.num_optimizer_instances > 1 else 2
    )
    is_new = running_par.overlaps_grad_reduce and not running_par.is_optimizer_distributed
    return {
        "is_optimizer_distributed": True,
        "overlaps_param_gather": running_par.overlaps_param_gather or is_new,
        "sharding": sharding,
        "num_optimizer_instances": copies or default_copies,
    }


def _recompute(named: dict[str, Any], running: RunConfig, *, is_whole: bool) -> dict[str, Any]:
    recompute = named.get("recompute", Recompute.NONE if is_whole else running.recompute)
    is_same_recompute = recompute is running.recompute
    default_modules = (
        running.recompute_modules if is_same_recompute and "recompute" not in named else ()
    )
    return {
        "recompute": recompute,
        "recompute_num_layers": named.get(
            "recompute_num_layers", running.recompute_num_layers if is_same_recompute else 0
        ),
        "overlaps_optimizer_offload": named.get(
            "overlaps_optimizer_offload", running.overlaps_optimizer_offload
        ),
        "optimizer_offload_frac": named.get(
            "optimizer_offload_frac", 0.0 if is_whole else running.optimizer_offload_frac
        ),
        "recompute_modules": named.get("recompute_modules", default_modules),
    }
