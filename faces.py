"""Lazy exports of a package: names of its ``__init__``, each loaded on first use.

The names are those that the ``__init__`` imports under ``TYPE_CHECKING``: one list for readers,
type checkers and this module.  ``from ..memory import peak`` thus loads only the module that
defines ``peak``, and a command that does not need numpy does not load it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazy_getattr(package: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that lists its exports under ``TYPE_CHECKING``."""
    homes: dict[str, str] = {}

    def named(name: str) -> Any:
        if not homes:
            homes.update(exported_names(package))
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # ``from`` takes an AttributeError of ours for a missing name, and hides what was wrong.
        try:
            value = getattr(import_module(homes[name], package), name)
        except AttributeError as err:
            raise ImportError(f"{name} of {package}{homes[name]}: {err}") from err
        setattr(sys.modules[package], name, value)
        return value

    return named


def exported_names(package: str) -> dict[str, str]:
    """Return the module of each name that a package exports, relative to the package.

    The names are read from the package's source, through its loader; raises ``ImportError`` if
    there is no source.
    """
    spec = find_spec(package)
    loader: Any = spec and spec.loader
    source = loader and loader.get_source(package)
    if source is None:
        raise ImportError(f"{package} has no source; its names are listed there: install the wheel")
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    shown = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    return {alias.name: f".{node.module}" for node in shown for alias in node.names}
