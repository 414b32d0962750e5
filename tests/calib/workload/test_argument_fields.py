"""A field that is declared as an argument is read and written by its declaration alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace

import pytest

from forerun.calib.errors import ConfigError
from forerun.calib.workload.argument_fields import (
    listed,
    number,
    read_fields,
    real,
    switch,
    words,
    written_fields,
)
from forerun.calib.workload.argument_values import Arguments, Values


class Form(Enum):
    PLAIN = "plain"
    ROUND = "round"


@dataclass(kw_only=True)
class Part:
    is_fused: bool = switch("fusion", default=True)
    is_tied: bool = switch("untie", default=True, is_reversed=True)
    is_wide: bool = switch("wide", "scaled", default=True, unsaid=False)
    num_layers: int = number("num_layers", "encoder_layers")
    size: int = number("size", default=1, is_stated=True)
    degree: int = number("degree", default=1)
    width: int = number("width", unsaid=0)
    dropout: float = real("dropout")
    form: Form = field(
        default=Form.PLAIN, metadata=words("form", Form.PLAIN, spelled={"disc": Form.ROUND})
    )
    share: float = real("fraction", usual=1.0, behind="offload")
    modules: tuple[str, ...] = listed("modules", behind="graphs")


USUAL = {"is_fused": True, "is_tied": True, "is_wide": False, "num_layers": 4, "size": 1}
USUAL |= {"degree": 1, "width": 0, "dropout": 0.0, "form": Form.PLAIN}
BEHIND = {"share", "modules"}
STATED: Values = {"num_layers": 4, "size": 1, "form": "plain"}


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({}, "size", 1),
        ({"fusion": False}, "is_fused", False),
        ({"untie": True}, "is_tied", False),
        ({"wide": True}, "is_wide", True),
        ({"degree": "2"}, "degree", 2),
        ({"width": 8}, "width", 8),
        ({"dropout": 0.5}, "dropout", 0.5),
        ({"form": "round"}, "form", Form.ROUND),
        ({"offload": True, "fraction": 0.5}, "share", 0.5),
        ({"graphs": True, "modules": ["a", "b"]}, "modules", ("a", "b")),
    ],
)
def test_what_is_read_is_written(given: Values, field: str, value: object) -> None:
    values: Values = {"num_layers": 4, **given}
    for args in (values, SimpleNamespace(**values)):
        assert read_fields(Part, Arguments(args)) == USUAL | {field: value}
    written = written_fields(Part(**read_fields(Part, Arguments(values))))
    assert {name: str(one) for name, one in written.items()} == {
        name: str(one) for name, one in (STATED | given).items()
    }


def test_other_names_and_words_are_read_alike() -> None:
    values = {"encoder_layers": 4, "scaled": True, "form": "Forms.disc", "degree": None}
    others = {"is_wide": True, "form": Form.ROUND}
    assert read_fields(Part, Arguments(values)) == USUAL | others


def test_what_is_missing_or_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match="give --num-layers"):
        read_fields(Part, Arguments({}))
    with pytest.raises(ConfigError, match="choose from plain, round"):
        read_fields(Part, Arguments({"num_layers": 1, "form": "square"}))


def test_an_argument_behind_a_switch_has_no_effect_without_it() -> None:
    alone = Arguments({"num_layers": 4, "fraction": 0.5, "modules": "a"})
    assert not BEHIND & read_fields(Part, alone).keys()
    on = Arguments({"num_layers": 4, "offload": True})
    assert read_fields(Part, on)["share"] == 1.0


def test_values_stand_over_those_below() -> None:
    given = Arguments(SimpleNamespace(size=3, degree=2)).put_over({"size": None, "width": 5})
    assert [given.get(name) for name in ("size", "degree", "width")] == [None, 2, 5]
