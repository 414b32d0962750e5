"""Configs as JSON: what was written comes back, anything else is a ``ConfigError``."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import forerun.calib
from forerun.calib.errors import ConfigError
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.calib.workload.config import RunConfig
from forerun.calib.workload.config_json import KEY, Encoded, decode, encode_fields

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"


@cache
def recorded() -> str:
    """A config that was recorded before there were experts and context parallelism."""
    return json.dumps(build_table(read_run(GOLDEN, None)).config().to_json())


@pytest.fixture
def written() -> dict[str, Any]:
    return json.loads(recorded())


def test_an_old_recording_takes_todays_defaults(written: dict[str, Any]) -> None:
    config = RunConfig.from_json(written)
    assert (config.parallelism.cp, config.parallelism.ep, config.model.experts) == (1, 1, None)
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert RunConfig.from_json(written | {"surprise": 1}) == config


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("precision",), "fp7"),
        (("recompute",), None),
        (("batch",), 3),
        (("parallelism",), None),
        (("parallelism", "engine"), "zz"),
        (("parallelism", "tp"), "2"),
        (("parallelism", "chunk_layers"), 3),
        (("model", "experts"), {"num_experts": 4}),
        (("model", "experts"), 4),
    ],
)
def test_other_forms_are_refused(
    written: dict[str, Any], path: tuple[str, ...], value: Any
) -> None:
    inner = written
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with pytest.raises(ConfigError):
        RunConfig.from_json(written)


@dataclass(frozen=True, kw_only=True)
class Parts:
    pair: tuple[int, str] = (0, "")
    ends: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    number: int = field(default=0, metadata={KEY: "count"})


def test_pairs_mappings_and_other_keys_are_read_as_they_were_written() -> None:
    parts = Parts(pair=(3, "a"), ends={"0.9": (0.5, 2.0)}, number=7)
    written = encode_fields(parts)
    assert written["count"] == 7
    assert decode(Parts, json.loads(json.dumps(written))) == parts


@pytest.mark.parametrize(
    "damage",
    [{"pair": [3]}, {"pair": ["a", 3]}, {"ends": [1, 2]}, {"ends": {"0.9": [1]}}, {"count": "7"}],
)
def test_damaged_pairs_mappings_and_other_keys_are_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        decode(Parts, damage)


def test_what_writes_its_object_by_hand_is_known_to_do_so_inside_others() -> None:
    """Otherwise it would be taken apart by its fields there."""
    for module in pkgutil.walk_packages(forerun.calib.__path__, "forerun.calib."):
        importlib.import_module(module.name)
    kinds = subclasses(Encoded)
    assert len(kinds) > 40
    for kind in kinds:
        for hint in hints_of(kind).values():
            for part in (hint, *get_args(hint)):
                assert not hasattr(part, "to_json") or issubclass(part, Encoded), (kind, part)


def hints_of(kind: type) -> dict[str, Any]:
    try:
        return get_type_hints(kind)
    except NameError:  # a name that only a type checker imports
        return {}


def subclasses(kind: type) -> set[type]:
    return {one for subclass in kind.__subclasses__() for one in (subclass, *subclasses(subclass))}
