"""The same rows give the same models on other processors, whose BLAS and NumPy round otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SUPPORT = Path(__file__).parents[2] / "support"
TOLERANCE_LOG = 1e-6
"""Tolerance of predicted times and of both ends of their intervals; 5e-9 was observed."""
NEEDED_FLAG = {"Prescott": "pni", "Haswell": "avx2", "Zen": "avx2", "SkylakeX": "avx512dq"}
OLD_NUMPY = "X86_V3 X86_V4 AVX512_ICL AVX512_SPR"
"""Instructions that NumPy is kept from: its exponentials and logarithms round otherwise, too."""
pytestmark = pytest.mark.slow


@cache
def _predictions(core: str, num_threads: int, numpy_without: str = "") -> dict[str, Any]:
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("OPENBLAS_", "NPY_"))},
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
        "OPENBLAS_NUM_THREADS": str(num_threads),
        "OMP_NUM_THREADS": str(num_threads),
        "NPY_DISABLE_CPU_FEATURES": numpy_without,
        **({"OPENBLAS_CORETYPE": core} if core else {}),
    }
    command = [sys.executable, "-W", "error::RuntimeWarning", SUPPORT / "model_predictions.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def _can_run(core: str) -> bool:
    flags = Path("/proc/cpuinfo")
    return flags.exists() and NEEDED_FLAG[core] in flags.read_text().split()


@pytest.mark.parametrize(
    ("core", "num_threads", "numpy_without"),
    [
        ("", 2, ""),
        ("SkylakeX", 1, ""),
        ("Haswell", 1, ""),
        ("Zen", 2, ""),
        ("Prescott", 1, ""),
        ("Prescott", 2, OLD_NUMPY),
    ],
)
def test_models_agree_across_processors(core: str, num_threads: int, numpy_without: str) -> None:
    if core and not _can_run(core):
        pytest.skip(f"this processor cannot run the kernels of {core}")
    here, there = _predictions("", 1), _predictions(core, num_threads, numpy_without)
    assert there["logs"].keys() == here["logs"].keys()
    assert there["threads"] == [num_threads]
    for name, logs in here["logs"].items():
        apart = np.abs(np.array(there["logs"][name]) - np.array(logs)).max()
        assert apart < TOLERANCE_LOG, f"{name}: {apart:.1e} apart on {there['cores']}"


def test_other_kernels_were_run() -> None:
    """Both libraries, NumPy's and SciPy's, follow the variable."""
    runnable = [core for core in ("Haswell", "Prescott") if _can_run(core)]
    if len(runnable) < 2:
        pytest.skip("this processor has one kind of kernels")
    first, second = (_predictions(core, 1)["cores"] for core in runnable)
    assert len(first) == len(second) == 1
    assert first != second
