"""Fields that are arguments of Megatron: one declaration, by which they are read and written.

A declared field needs nothing else: namespaces, files and launch lines are read by it, launch lines
are written by it, and its argument is known as modelled.  A field that several arguments say, or
that depends on others, has a rule in ``calib/arguments/_megatron_settings.py`` or beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from functools import lru_cache
from typing import Any

from .argument_values import Arguments, ArgumentValue, Values
from .config_json import decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An argument of Megatron that one field holds."""

    name: str
    """Its name in Megatron's namespace."""
    read: Callable[[Arguments], Any]
    """Function that returns the field's value, Megatron's default if the argument is not given."""
    unsaid: object = None
    """Value of the field at which the argument is left out; None: it is always written."""
    others: tuple[str, ...] = ()
    """Further names that a namespace may have in its place."""
    option: str = ""
    """Its option, if that is spelled otherwise; of a switch that is on by default, the option that
    turns it off."""
    is_switch: bool = False
    is_reversed: bool = False
    """The switch is on where the field is False."""
    is_list: bool = False
    behind: str = ""
    """Switch without which it has no effect; empty if it has one alone."""
    is_of_layout: bool = False
    """Layouts of one model may differ in it."""

    @property
    def is_usually_on(self) -> bool:
        """True for a switch that is on unless it is turned off."""
        return self.is_switch and self.unsaid is not self.is_reversed

    def written(self, value: Any) -> ArgumentValue:
        """Return the argument's value for one of the field."""
        if self.is_switch:
            return value is not self.is_reversed
        if self.is_list:
            return list(value)
        return value.value if isinstance(value, Enum) else value


def switch(
    name: str, *others: str, default: bool = False, unsaid: bool | None = None, **details: Any
) -> Any:
    """Return a dataclass field that is a switch (``docs/extending/megatron_argument.md``).

    ``unsaid``: the field's value without the argument, if that is not ``default``.  Any of several
    names turns it on.  ``details``: of ``Argument``.
    """
    usual = default if unsaid is None else unsaid
    is_reversed = details.get("is_reversed", False)
    is_usually_on = usual is not is_reversed
    if is_usually_on:
        details.setdefault("option", f"no_{name}")

    def read(given: Arguments) -> bool:
        is_on = any(given.is_on(one, default=is_usually_on) for one in (name, *others))
        return is_on is not is_reversed

    details |= {"unsaid": usual, "others": others, "is_switch": True}
    return _declared(Argument(name=name, read=read, **details), default)


def number(
    name: str,
    *others: str,
    default: Any = MISSING,
    unsaid: Any = MISSING,
    is_stated: bool = False,
    **details: Any,
) -> Any:
    """Return a dataclass field that is a whole number; without ``default`` and ``unsaid`` its
    argument is required.

    ``unsaid``: the field's value without the argument, if that is not ``default``; ``is_stated``:
    the argument is written even at that value.  ``details``: of ``Argument``.
    """
    usual = default if unsaid is MISSING else unsaid
    is_required = usual is MISSING

    def read(given: Arguments) -> int:
        if is_required and given.get(name, *others) is None:
            return given.required(name)
        return given.number(name, *others, default=usual)

    unsaid = None if is_stated or is_required else usual
    argument = Argument(name=name, read=read, unsaid=unsaid, others=others, **details)
    return _declared(argument, default)


def real(name: str, *, usual: float = 0.0, is_stated: bool = False, **details: Any) -> Any:
    """Return a dataclass field that is a number, 0 by default.

    ``usual``: if the argument alone is missing; ``is_stated``: it is written even at 0.
    ``details``: of ``Argument``.
    """

    def read(given: Arguments) -> float:
        return usual if given.get(name) is None else given.real(name)

    unsaid = None if is_stated else 0.0
    return _declared(Argument(name=name, read=read, unsaid=unsaid, **details), 0.0)


def listed(name: str, **details: Any) -> Any:
    """Return a dataclass field that is a tuple of words, () by default; ``details``: of
    ``Argument``."""

    def read(given: Arguments) -> tuple[str, ...]:
        return tuple(word for text in given.words(name) for word in text.split())

    return _declared(Argument(name=name, read=read, unsaid=(), is_list=True, **details), ())


def words(
    name: str,
    default: Enum,
    *,
    spelled: Mapping[str, Enum] | None = None,
    unknown: Enum | None = None,
) -> Mapping[str, Argument]:
    """Return the metadata of a dataclass field that is a word of an enum's values, always written.

    ``spelled``: further words; ``unknown``: the value for any other word, which is else refused.
    """
    members = {**{member.value: member for member in type(default)}, **(spelled or {})}

    def read(given: Arguments) -> Enum:
        # An enum of Megatron's own is a word such as ``AttnBackend.flash`` in a dump.
        word = given.text(name, default=default.value).rpartition(".")[2]
        return members.get(word, unknown) or decode(type(default), word)

    return {"argument": Argument(name=name, read=read)}


def _declared(argument: Argument, default: Any) -> Any:
    details = {} if default is MISSING else {"default": default}
    return field(metadata={"argument": argument}, **details)


@lru_cache
def arguments_of(kind: type) -> Mapping[str, Argument]:
    """Return the declared arguments of a dataclass, by field."""
    return {
        one.name: one.metadata["argument"] for one in fields(kind) if "argument" in one.metadata
    }


def read_fields(kind: type, given: Arguments) -> dict[str, Any]:
    """Return the declared fields of a dataclass, as the arguments say them."""
    return {
        name: argument.read(given)
        for name, argument in arguments_of(kind).items()
        if not argument.behind or given.is_on(argument.behind)
    }


def written_fields(part: object, accepts: Callable[[Argument], bool] = bool) -> Values:
    """Return the values of an object's declared arguments that are not left out."""
    values: Values = {}
    for name, argument in arguments_of(type(part)).items():
        value = getattr(part, name)
        if accepts(argument) and (argument.unsaid is None or value != argument.unsaid):
            values |= {argument.behind: True} if argument.behind else {}
            values[argument.name] = argument.written(value)
    return values
