"""Every benchmark can be imported, as the package stands."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = {"megatron_probe.py"}
"""Copied, and run in Megatron-LM's own process."""
MODULES = sorted(
    path.relative_to(BENCHMARKS).with_suffix("").as_posix().replace("/", ".")
    for path in BENCHMARKS.rglob("*.py")
    if path.name not in SCRIPTS
)


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    import_module(f"forerun.benchmarks.{name}")
