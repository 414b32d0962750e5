"""Every number that a docstring of the core shows is what the code gives."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import forerun.calib


def _modules() -> list[str]:
    module_infos = pkgutil.walk_packages(forerun.calib.__path__, prefix="forerun.calib.")
    return ["forerun.calib", *sorted(module.name for module in module_infos)]


@pytest.mark.parametrize("name", _modules())
def test_examples_in_docstrings_hold(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
