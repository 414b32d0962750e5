"""Which layouts are meant: those whose axes have one of some values, as ``tp=8,pp=1|2``."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..workload.argument_values import shown
from ..workload.config import RunConfig
from .short_names import AxisValue, layout_name

_ANY = "|"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One axis, by its name in ``LAYOUT_NAMES``, and the values that it may have."""

    name: str
    values: tuple[AxisValue, ...]

    def __str__(self) -> str:
        return f"{self.name}={_ANY.join(map(str, self.values))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Layouts that have, on every axis that is named, one of the values given for it.

    >>> Keep.parse("tp=8,pp=1|2")
    Keep(axes=(Kept(name='tp', values=(8,)), Kept(name='pp', values=(1, 2))))
    """

    axes: tuple[Kept, ...] = ()

    @staticmethod
    def parse(text: str) -> Keep:
        """The meaning of ``NAME=VALUE[|VALUE...],...``; ``ConfigError`` where there is none."""
        axes: list[Kept] = []
        for part in text.split(","):
            word, equals, values = part.partition("=")
            if not (word.strip() and equals and values.strip()):
                raise ConfigError(
                    f"{shown(part)} is not NAME=VALUE; write an axis and its values, such as "
                    "tp=8 or pp=1|2"
                )
            axis = layout_name(word)
            if axis.name in [one.name for one in axes]:
                raise ConfigError(f"{axis.name} is named twice; write {axis.name}=A|B for either")
            found = (axis.parse(value.strip()) for value in values.split(_ANY))
            axes.append(Kept(name=axis.name, values=tuple(dict.fromkeys(found))))
        return Keep(axes=tuple(axes))

    def __str__(self) -> str:
        return ",".join(map(str, self.axes))

    def values_of(self, name: str) -> tuple[AxisValue, ...] | None:
        """What an axis may be, by its name; None where it is free."""
        return next((one.values for one in self.axes if one.name == name), None)

    def without(self, *names: str) -> Keep:
        """The same with some axes left free."""
        return Keep(axes=tuple(one for one in self.axes if one.name not in names))

    def allows(self, config: RunConfig) -> bool:
        """Whether a layout is meant."""
        return all(layout_name(one.name).read(config) in one.values for one in self.axes)

    def having(self, name: str, value: AxisValue) -> Keep | None:
        """With one value of an axis beside all else; None where another one is asked for.

        >>> str(Keep.parse("tp=8").having("sharding", "optimizer"))
        'tp=8,sharding=optimizer'
        """
        wanted = self.values_of(name)
        if wanted is not None and value not in wanted:
            return None
        rest = tuple(one for one in self.axes if one.name != name)
        return Keep(axes=(*rest, Kept(name=name, values=(value,))))
