"""Leaves: parts that a table names and nothing imports; to delete the file is to remove one."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any


def has_leaf(name: str, package: str) -> bool:
    """Return whether the module of a leaf exists; ``name`` is relative to the package."""
    try:
        return find_spec(name.partition(":")[0], package) is not None
    except ModuleNotFoundError:  # its folder is gone
        return False


def leaf(name: str, package: str) -> Any:
    """Return an object of a leaf, ``.module:object``; None if its file was deleted.

    >>> leaf(".leaves:leaf", "forerun").__name__, leaf(".gone:anything", "forerun")
    ('leaf', None)
    """
    if not has_leaf(name, package):
        return None
    module, _, attribute = name.partition(":")
    return getattr(import_module(module, package), attribute)
