"""What two runs were told differently: layout, batch, shape, device, versions, environment."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from ..forecast import at_batch_size, batch_size_at
from ..plain_json import Json, parse_json
from ..samples import SampleTable
from ..steps import same_layout
from ..workload import Encoded, ModelShape, RunConfig

_NAMES = {
    **dict.fromkeys(("micro_batch_size", "mbs"), "micro-batch"),
    "global_batch_size": "global batch",
    "seq_length": "sequence length",
    "sharding": "sharding of the data-parallel ranks",
    "device": "device",
    "framework": "framework",
    "created_by": "version of forerun",
    **dict.fromkeys(("num_ranks", "gpus"), "number of ranks"),
    "sp": "sequence parallel",
    **{name: name.upper() for name in ("tp", "pp", "vp", "dp", "cp", "ep", "etp")},
}
_PREFIXES = ("is_", "has_", "keeps_")
_BATCH = frozenset({"global_batch_size", "seq_length"})
_MACHINE = frozenset({"device", "framework", "created_by", "cluster"})
_AFTER_SIZE = frozenset({"max_position_embeddings"})
"""Follow from other sizes: of no interest by themselves."""


class Part(Enum):
    """What a setting belongs to, in the order in which differences are told."""

    LAYOUT = "layout"
    """Degrees, micro-batch, recompute, what overlaps."""
    BATCH = "batch"
    MODEL = "model"
    MACHINE = "machine"
    """Device, versions and environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange(Encoded):
    """One setting that differs; values are text, empty where a run has none."""

    part: Part
    name: str
    first: str
    second: str

    @property
    def text(self) -> str:
        """As part of a sentence about the second run.

        >>> SettingChange(part=Part.LAYOUT, name="micro-batch", first="4", second="8").text
        'micro-batch 8 instead of 4'
        """
        return f"{self.name} {self.second or 'none'} instead of {self.first or 'none'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is known of a run beside its times."""

    config: RunConfig | None
    """None where the run did not describe itself."""
    num_ranks: int
    device: str
    created_by: str
    environment: Mapping[str, str]
    """What was seen of its nodes, by name."""

    @staticmethod
    def of(table: SampleTable) -> Settings:
        """Of the newest run of a table, with the batch of its last recorded step."""
        runs = table.newest("runs")
        texts = [str(text) for text in runs["cluster"] if text]
        config = table.config() if table.is_described else None
        if config is not None and not table.steps.empty:
            last = int(table.newest("steps")["step"].max()) + 1
            config = at_batch_size(config, batch_size_at(config, last))
        return Settings(
            config=same_layout(config) if config is not None else None,
            num_ranks=int(runs["world_size"].max()),
            device=str(runs["device"].iloc[0]),
            created_by=str(runs["created_by"].iloc[0]),
            environment=dict(_environment(texts[0])) if texts else {},
        )

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks; 0 where it is not known."""
        known = self.config
        return known.batch.global_batch_size * known.model.seq_length if known else 0

    @property
    def model(self) -> ModelShape | None:
        """Equal for the same model, whatever the length of its samples."""
        known = self.config
        return replace(known.model, seq_length=1, max_position_embeddings=0) if known else None

    @property
    def layout(self) -> Mapping[tuple[str, ...], str]:
        """Equal where each rank does the same work."""
        return {key: text for key, text in _leaves(self) if part_of(key) is not Part.MACHINE}


def setting_changes(first: Settings, second: Settings) -> tuple[SettingChange, ...]:
    """Every setting that differs, by part; what belongs to no step (cadence) is left out."""
    ours, theirs = dict(_leaves(first)), dict(_leaves(second))
    changes = [
        SettingChange(
            part=part_of(key),
            name=setting_name(key[-1]),
            first=ours.get(key, ""),
            second=theirs.get(key, ""),
        )
        for key in dict.fromkeys((*ours, *theirs))
        if ours.get(key, "") != theirs.get(key, "") and key[-1] not in _AFTER_SIZE
    ]
    order = list(Part)
    return tuple(sorted(changes, key=lambda one: order.index(one.part)))


def _leaves(settings: Settings) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every setting by its way through the description."""
    if settings.config is not None:
        yield from _inside((), settings.config.to_json())
    else:
        yield ("device",), settings.device
    yield ("num_ranks",), str(settings.num_ranks)
    yield ("created_by",), settings.created_by
    for name, text in settings.environment.items():
        yield ("cluster", name), text


def leaf_texts(value: Json) -> dict[str, str]:
    """The values of a description by the names of its fields."""
    return {way[-1]: text for way, text in _inside((), value)}


def _inside(way: tuple[str, ...], value: Json) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in ("cadence", "program", "absent", "given", "unmodelled"):
                yield from _inside((*way, name), inner)
    elif value not in (None, [], ""):
        yield way, _shown(value)


def _shown(value: Json) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ",".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def part_of(key: tuple[str, ...]) -> Part:
    """The part of a setting, by its way through the description."""
    name = key[-1]
    if name in _BATCH:
        return Part.BATCH
    if key[0] in _MACHINE:
        return Part.MACHINE
    if key[0] == "model":
        return Part.MODEL
    return Part.LAYOUT


def setting_name(field: str) -> str:
    """A field in words.

    >>> [setting_name(one) for one in ("is_sequence_parallel", "tp", "micro_batch_size")]
    ['sequence parallel', 'TP', 'micro-batch']
    """
    if field in _NAMES:
        return _NAMES[field]
    for prefix in _PREFIXES:
        field = field.removeprefix(prefix)
    return field.replace("_", " ")


def _environment(text: str) -> Iterator[tuple[str, str]]:
    """Of the first node that was seen; nothing of a damaged text."""
    try:
        value = parse_json(text)
    except ValueError:
        return
    seen = value.get("seen") if isinstance(value, dict) else None
    first = seen[0] if isinstance(seen, list) and seen else None
    for name, inner in first.items() if isinstance(first, dict) else ():
        if inner not in (None, [], "", 0, 0.0) and name not in ("num_ranks", "num_local_ranks"):
            yield name, inner if isinstance(inner, str) else json.dumps(inner, sort_keys=True)
