"""Megatron's split of layers into chunks: by an explicit layout, by end stages, or evenly.

Chunk c of the pp x vp chunks, in model order, runs on stage c % pp.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

_GROUP = re.compile(r"\(([^)]+)\)\*(\d+)")
_REPEAT = re.compile(r"(.)\*(\d+)")
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
# ``x*n`` may nest: a short text must not expand to gigabytes; models have at most 10,000 layers.
_MAX_CHARS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLayout:
    """Parsed ``--pipeline-model-parallel-layout``."""

    chunk_layers: tuple[int, ...]
    num_prediction_layers: int
    is_plain: bool
    """True if the embedding is in the first chunk, head and prediction layers in the last."""


def parse_layout(layout: object) -> PipelineLayout:
    """Parse Megatron's string (``Et*3|(tt|)*29,m|L``), or its list of lists of layer names.

    ``|`` ends a chunk, ``E`` is the embedding, ``t`` a layer, ``m`` a prediction layer, ``L`` the
    loss; ``x*n`` and ``(..)*n`` repeat, commas are ignored.  Raises ``ConfigError`` if a letter is
    unknown, or embedding, loss or prediction layers are misplaced.

    >>> parse_layout("Et*3|(tt|)*2,tmL").chunk_layers
    (3, 2, 2, 1)
    """
    chunks = _chunks_of_text(layout) if isinstance(layout, str) else _chunks_of_list(layout)
    whole = "".join(chunks)
    if not whole or set(whole) - set(_LETTERS.values()):
        raise ConfigError(
            f"pipeline layout {layout!r} is not made of E, t, m, L; write one such as Ett|ttL"
        )
    if (whole[0], whole[-1]) != ("E", "L") or whole.count("E") + whole.count("L") != 2:
        raise ConfigError(f"pipeline layout {layout!r} needs one E first and one L last; add them")
    if "t" in whole[whole.find("m") :] and "m" in whole:
        raise ConfigError(f"pipeline layout {layout!r} has a t behind an m; put all t first")
    return PipelineLayout(
        chunk_layers=tuple(chunk.count("t") for chunk in chunks),
        num_prediction_layers=whole.count("m"),
        is_plain="E" in chunks[0] and "L" in chunks[-1] and "m" not in "".join(chunks[:-1]),
    )


def write_layout(chunk_layers: Sequence[int], num_prediction_layers: int = 0) -> str:
    """Return the string that ``parse_layout`` reads back, with prediction layers before the head.

    >>> write_layout((3, 2, 2, 1), 1)
    'Et*3|t*2|t*2|tmL'
    """
    chunks = [f"t*{layers}" if layers > 1 else "t" * layers for layers in chunk_layers]
    chunks[0] = "E" + chunks[0]
    chunks[-1] += "m" * num_prediction_layers + "L"
    return "|".join(chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSplit:
    """Settings that decide a split without an explicit layout."""

    num_layers: int
    pp: int
    vp: int = 1
    first: int | None = None
    """Layers of the first stage (``--decoder-first-pipeline-num-layers``)."""
    last: int | None = None
    counts_embedding: bool = False
    """The embedding takes the place of a layer (``--account-for-embedding-in-pipeline-split``)."""
    counts_loss: bool = False

    @property
    def num_slots(self) -> int:
        """Number of layers, plus embedding and loss if they count as layers."""
        return self.num_layers + self.counts_embedding + self.counts_loss


def split_layers(split: PipelineSplit) -> tuple[int, ...]:
    """Return the layers of each chunk, by Megatron's ``get_num_layers_to_build`` (core 0.16.1).

    Raises ``ConfigError`` if layers do not divide.

    >>> sizes = PipelineSplit(num_layers=10, pp=2, vp=3, counts_embedding=True, counts_loss=True)
    >>> split_layers(sizes)
    (1, 2, 2, 2, 2, 1)
    """
    stages = _stages(split)
    for stage, layers in enumerate(stages):
        if layers % split.vp:
            raise ConfigError(
                f"stage {stage} has {layers} layers, which do not split over vp {split.vp}; "
                f"choose vp from the divisors of {layers}"
            )
    chunks = [layers // split.vp for layers in stages] * split.vp
    chunks[0] -= split.counts_embedding
    chunks[-1] -= split.counts_loss
    return tuple(chunks)


def uneven_layers(num_layers: int, pp: int) -> tuple[int, ...]:
    """Return the layers of each stage, equal except for the last, which also has the head; () if
    layers divide evenly.

    >>> uneven_layers(61, 8), uneven_layers(64, 8)
    ((8, 8, 8, 8, 8, 8, 8, 5), ())
    """
    if num_layers % pp == 0:
        return ()
    each = -(-num_layers // pp)
    if each * (pp - 1) >= num_layers:
        each -= 1
    return (*[each] * (pp - 1), num_layers - each * (pp - 1))


def virtual_stages(split: PipelineSplit, layers_per_chunk: int) -> int:
    """Return vp from ``--num-layers-per-virtual-pipeline-stage``; raise ``ConfigError`` if that
    does not divide the layers of a stage."""
    stage, rest = divmod(split.num_slots, split.pp)
    if rest or layers_per_chunk < 1 or stage % layers_per_chunk:
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {layers_per_chunk} does not divide the "
            f"{split.num_slots} layers over pp {split.pp}; choose a divisor of {stage}"
        )
    return stage // layers_per_chunk


def _stages(split: PipelineSplit) -> list[int]:
    ends = [n for n in (split.first, split.last) if n is not None]
    if ends and (split.counts_embedding or split.counts_loss):
        raise ConfigError(
            "--decoder-first/last-pipeline-num-layers exclude --account-for-embedding/loss-in-"
            "pipeline-split; leave one kind out"
        )
    num_middle, num_remaining = split.pp - len(ends), split.num_slots - sum(ends)
    if not num_middle:
        each, rest = 0, num_remaining
    else:
        each, rest = divmod(num_remaining, num_middle)
    if rest or num_middle < 0 or num_remaining < 0:
        raise ConfigError(
            f"num_layers {split.num_slots} does not split over pp {split.pp} x vp {split.vp}"
            + (f" with {ends} layers on end stages" if ends else "")
            + "; let the layers divide, or give --pipeline-model-parallel-layout"
        )
    stages = [each] * num_middle
    if split.first is not None:
        stages.insert(0, split.first)
    return stages if split.last is None else [*stages, split.last]


def _chunks_of_text(text: str) -> list[str]:
    text = text.replace(",", "")
    for pattern in (_GROUP, _REPEAT):
        text = pattern.sub(lambda match: match.group(1) * min(int(match.group(2)), 10_000), text)
        if len(text) > _MAX_CHARS:
            raise ConfigError(f"a pipeline layout of {len(text)} letters is too long; shorten it")
    return text.split("|")


def _chunks_of_list(layout: Any) -> list[str]:
    try:
        return ["".join(_letter(layer) for layer in chunk) for chunk in layout]
    except (TypeError, KeyError) as err:
        raise ConfigError(
            f"pipeline layout {layout!r} is not a list of lists of {', '.join(_LETTERS)}; "
            f"write it as one"
        ) from err


def _letter(layer: object) -> str:
    return _LETTERS[str(getattr(layer, "name", layer)).strip().lower()]
