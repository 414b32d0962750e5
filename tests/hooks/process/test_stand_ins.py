"""What the compiler passes over is found beside threads that import."""

from __future__ import annotations

import gc
import sys
from types import ModuleType

import pytest

from forerun.hooks.process.stand_ins import pass_over_package


def test_a_module_that_another_thread_imports_meanwhile_is_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collection lets other threads run, and any tuple that is made may begin one."""
    known = sys.modules.copy()
    monkeypatch.setattr(sys, "modules", known)
    num_imported = 0

    def imported(phase: str, info: dict[str, int]) -> None:
        nonlocal num_imported
        num_imported += 1
        known[f"imported_{num_imported}"] = ModuleType("imported")

    before = gc.get_threshold()
    gc.callbacks.append(imported)
    gc.set_threshold(1)
    try:
        pass_over_package()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(imported)
    assert num_imported
