"""Callbacks after an import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from forerun.hooks.process import post_import
from forerun.hooks.process.post_import import when_imported


@pytest.fixture(autouse=True)
def nothing_waits_after_a_test() -> Iterator[None]:
    yield
    post_import._FINDER._waiting.clear()
    sys.meta_path[:] = [one for one in sys.meta_path if one is not post_import._FINDER]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "hookable").mkdir()
    (tmp_path / "hookable" / "__init__.py").write_text("from .inner import value\n")
    (tmp_path / "hookable" / "inner.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "hookable"
    for name in ("hookable", "hookable.inner"):
        sys.modules.pop(name, None)


def test_the_callback_runs_after_the_module_and_before_its_importer_goes_on(package: str) -> None:
    def double(module: ModuleType) -> None:
        module.value *= 2

    when_imported(f"{package}.inner", double)
    assert importlib.import_module(package).value == 2


def test_an_imported_module_is_called_back_at_once(package: str) -> None:
    module = importlib.import_module(package)
    seen: list[ModuleType] = []
    when_imported(package, seen.append)
    assert seen == [module]


def test_a_fault_of_the_callback_never_reaches_the_import(
    package: str, caplog: pytest.LogCaptureFixture
) -> None:
    when_imported(package, lambda module: 1 / 0)
    assert importlib.import_module(package).value == 1
    assert "ZeroDivisionError" in caplog.text


def test_two_callbacks_run_in_order_and_once(package: str) -> None:
    seen: list[int] = []
    when_imported(package, lambda module: seen.append(1))
    when_imported(package, lambda module: seen.append(2))
    module = importlib.import_module(package)
    importlib.reload(module)
    assert seen == [1, 2]


def test_a_failing_import_fails_as_without_us(tmp_path: Path, package: str) -> None:
    (tmp_path / "hookable" / "inner.py").write_text("raise RuntimeError('own fault')\n")
    when_imported(f"{package}.inner", lambda module: None)
    with pytest.raises(RuntimeError, match="own fault"):
        importlib.import_module(package)


def test_a_module_that_is_not_there_is_still_not_there() -> None:
    when_imported("no_such_module_here", lambda module: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_here")
