"""Values of Megatron's arguments, from argparse, a YAML file or a command line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeAlias

from ..errors import ConfigError

ArgumentValue: TypeAlias = "str | int | float | bool | list[str] | None"
"""Value of an argument; None if it is not given."""
Values: TypeAlias = "dict[str, ArgumentValue]"
"""Argument values by name in Megatron's namespace."""

# Larger numbers do not fit in the columns of the tables, and no size comes near.
_MOST = 2**63
# Values come from any file: a non-number raises, which callers turn into a ``ConfigError``.
_int: Callable[[Any], int] = int
_float: Callable[[Any], float] = float


class Arguments:
    """Reader of a namespace or mapping by one or several names; ``None`` counts as not given."""

    def __init__(self, args: object) -> None:
        is_mapping = isinstance(args, Mapping)
        self._of: Callable[[str], Any] = args.get if is_mapping else _attributes(args)

    def get(self, *names: str) -> object:
        """Return the first value that is given, else None."""
        for name in names:
            value = self._of(name)
            if value is not None:
                return value
        return None

    def put_over(self, values: Mapping[str, ArgumentValue]) -> Arguments:
        """Return the arguments with these values over them; None leaves one out."""
        below, over = self._of, Arguments({})
        over._of = lambda name: values[name] if name in values else below(name)
        return over

    def number(self, *names: str, default: int = 0) -> int:
        """Return a whole number; raise ``ConfigError`` with the option's name for another value."""
        value = self.get(*names)
        return default if value is None else whole(names[0], value)

    def real(self, *names: str) -> float:
        """Return a finite number, 0 if none is given; raise ``ConfigError`` for another value."""
        value = self.get(*names)
        try:
            number = _float(value or 0)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f"{option_of(names[0])} {shown(value)} is not a number; give one")
        return number

    def required(self, name: str) -> int:
        """Return a whole number without a default; raise ``ConfigError`` if it is missing."""
        if self.get(name) is None:
            raise ConfigError(
                f"{name} is missing from the arguments of the run; give {option_of(name)}"
            )
        return self.number(name)

    def is_on(self, *names: str, default: bool = False) -> bool:
        """Return the state of a switch."""
        value = self.get(*names)
        return default if value is None else is_true(value)

    def text(self, *names: str, default: str = "") -> str:
        """Return a text; for an enum member its text value, else its name."""
        value = self.get(*names)
        if isinstance(value, Enum):
            return value.value if isinstance(value.value, str) else value.name
        return default if value is None else str(value)

    def words(self, *names: str) -> tuple[str, ...]:
        """Return a tuple of texts; a single value gives a tuple of one."""
        value = self.get(*names)
        if value is None:
            return ()
        return tuple(str(v) for v in value) if isinstance(value, list | tuple) else (str(value),)


def _attributes(args: object) -> Callable[[str], Any]:
    return lambda name: getattr(args, name, None)


def option_of(name: str) -> str:
    """Return the command-line option of a name in the namespace."""
    return "--" + name.replace("_", "-")


def name_of(option: str) -> str:
    """Return the name in the namespace of a command-line option.

    >>> name_of("--num-layers")
    'num_layers'
    """
    return option.lstrip("-").replace("-", "_")


def is_true(value: object) -> bool:
    """Return False for every spelling of false in YAML, JSON and shells, else True."""
    return str(value).lower() not in ("false", "0", "none", "")


def whole(name: str, value: object) -> int:
    """Return a whole number; raise ``ConfigError`` with the option's name for another value."""
    try:
        number = _int(value)
        if abs(number) > _MOST:
            raise ConfigError(f"{option_of(name)} is above 64 bits; give a smaller number")
        return number
    except ConfigError:
        raise
    except (TypeError, ValueError, OverflowError) as err:
        raise ConfigError(
            f"{option_of(name)} {shown(value)} is not a whole number; give one"
        ) from err


def shown(value: object) -> str:
    """Return a value for an error message, shortened, since it may come from any file."""
    if not isinstance(value, (str, int, float)):
        return f"({type(value).__name__})"
    text = repr(value[:80] if isinstance(value, str) else value)
    return text if len(text) <= 82 else f"{text[:80]}..."


class QuickEnum(Enum):
    """Enum that hashes members by identity, valid since each is a single object.

    This is ten times as fast as hashing by name, which matters when operators of thousands of
    layouts are looked up.
    """

    __hash__ = object.__hash__
