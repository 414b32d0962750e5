"""Settings that differ between two runs: layout, batch, shape, device, versions, environment."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from ..answers.run_measurements import Measurements
from ..plain_json import Json, parse_json
from ..steps.known_steps import same_layout
from ..workload.choices import CHOICES
from ..workload.config_json import Encoded

_NAMES = {
    "device": "device",
    "framework": "framework",
    "created_by": "version of forerun",
    **{name: one.title for one in CHOICES if one.title for name in (one.fields[0], one.name)},
}
_PREFIXES = ("is_", "has_", "keeps_")
_BATCH = frozenset({"global_batch_size", "seq_length"})
_MACHINE = frozenset({"device", "framework", "created_by", "cluster"})
_AFTER_SIZE = frozenset({"max_position_embeddings"})
"""Fields that follow from other sizes and are not reported."""


class Part(Enum):
    """Category of a setting, in the order of the report."""

    LAYOUT = "layout"
    """Degrees, micro-batch, recompute, overlap."""
    BATCH = "batch"
    MODEL = "model"
    MACHINE = "machine"
    """Device, versions and environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange(Encoded):
    """One setting that differs; values are text, empty if a run has none."""

    part: Part
    name: str
    first: str
    second: str

    @property
    def text(self) -> str:
        """The change as part of a sentence about the second run.

        >>> SettingChange(part=Part.LAYOUT, name="micro-batch", first="4", second="8").text
        'micro-batch 8 instead of 4'
        """
        return f"{self.name} {self.second or 'none'} instead of {self.first or 'none'}"


Settings = Mapping[tuple[str, ...], str]
"""Settings of a run as text, each by its path in the config."""


def settings_of(measured: Measurements) -> Settings:
    """Return the settings of a run, without those that affect no step (cadence)."""
    runs = measured.table.newest("runs")
    config: Json = {"device": measured.device}
    if measured.table.is_described:
        config = same_layout(measured.config).to_json()
    texts = [str(text) for text in runs["cluster"] if text]
    return {
        **dict(_inside((), config)),
        ("num_ranks",): str(measured.run.num_ranks),
        ("created_by",): str(runs["created_by"].iloc[0]),
        **{("cluster", name): text for name, text in _environment(*texts[:1])},
    }


def work_of(settings: Settings) -> Settings:
    """Return the settings that determine each rank's work."""
    return {key: text for key, text in settings.items() if part_of(key) is not Part.MACHINE}


def setting_changes(first: Settings, second: Settings) -> tuple[SettingChange, ...]:
    """Return each setting that differs, by part."""
    changes = [
        SettingChange(
            part=part_of(key),
            name=setting_name(key[-1]),
            first=first.get(key, ""),
            second=second.get(key, ""),
        )
        for key in dict.fromkeys((*first, *second))
        if first.get(key, "") != second.get(key, "") and key[-1] not in _AFTER_SIZE
    ]
    order = list(Part)
    return tuple(sorted(changes, key=lambda one: order.index(one.part)))


def leaf_texts(value: Json) -> dict[str, str]:
    """Return the values of a JSON object as text, by the names of its innermost fields."""
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
    """Return the part of a setting, given its path in the config."""
    name = key[-1]
    if name in _BATCH:
        return Part.BATCH
    if key[0] in _MACHINE:
        return Part.MACHINE
    if key[0] == "model":
        return Part.MODEL
    return Part.LAYOUT


def setting_name(field: str) -> str:
    """Return a field's name in words.

    >>> [setting_name(one) for one in ("is_sequence_parallel", "tp", "micro_batch_size")]
    ['sequence parallel', 'TP', 'micro-batch']
    """
    if field in _NAMES:
        return _NAMES[field]
    for prefix in _PREFIXES:
        field = field.removeprefix(prefix)
    return field.replace("_", " ")


def _environment(text: str = "") -> Iterator[tuple[str, str]]:
    """Yield properties of the first recorded node; nothing if the text is empty or damaged."""
    try:
        value = parse_json(text)
    except ValueError:
        return
    seen = value.get("seen") if isinstance(value, dict) else None
    first = seen[0] if isinstance(seen, list) and seen else None
    for name, inner in first.items() if isinstance(first, dict) else ():
        if inner not in (None, [], "", 0, 0.0) and name not in ("num_ranks", "num_local_ranks"):
            yield name, inner if isinstance(inner, str) else json.dumps(inner, sort_keys=True)
