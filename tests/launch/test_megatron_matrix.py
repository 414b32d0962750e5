"""The matrix of Megatron-LM versions: its checks can fail, and a cell of it where clones are given.

``FORERUN_MEGATRON_CLONES`` names a folder with one clone (or exported tag) per version.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "megatron_matrix.py"
CLONES = os.environ.get("FORERUN_MEGATRON_CLONES", "")


@pytest.fixture(scope="module")
def matrix() -> Any:
    spec = importlib.util.spec_from_file_location("megatron_matrix", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["megatron_matrix"] = module
    spec.loader.exec_module(module)
    return module


def a_rank(num_steps: int) -> dict[str, Any]:
    """Return a probe's output: state 0 is plain, state 1 that of a hooked step, 2 of one that has
    something on the model."""
    plain = {"module hooks": {}, "timers": {}, "class methods": [], "gc callbacks": []}
    names = ["Module._call_impl", "ProcessGroup.allreduce", "Work.wait"]
    hooked = {**plain, "class methods": names, "gc callbacks": ["z"]}
    hung = {**hooked, "module hooks": {"_forward_hooks x": 1}}
    step = {"losses": {"lm loss": (1.5).hex()}, "grad_norm": (0.25).hex(), "state": 0}
    steps = {str(number): copy.deepcopy(step) for number in range(num_steps)}
    return {"rank": 0, "states": [plain, hooked, hung], "steps": steps, "seams": []}


def test_a_last_bit_is_seen(matrix: Any) -> None:
    left, right = {0: a_rank(4)}, {0: a_rank(4)}
    assert matrix.same_numbers(left, right, range(4)) == "ok"
    right[0]["steps"]["3"]["grad_norm"] = (0.25 + 2**-54).hex()
    assert "iteration 3: grad_norm" in matrix.same_numbers(left, right, range(4))
    assert matrix.same_numbers(left, right, range(3)) == "ok"
    assert matrix.same_numbers(left, right, range(4, 5)) != "ok", "a step that is not there"


def test_hooks_that_stay_are_seen_and_hooks_that_never_were_too(matrix: Any) -> None:
    cell = matrix.Cell(version="v", layout="pp2")
    bare, calibrated = {0: a_rank(matrix.STOP_AT)}, {0: a_rank(matrix.STOP_AT)}
    assert "blind" in matrix.hooks_gone(cell, bare, calibrated)
    calibrated[0]["steps"]["5"]["state"] = 1
    assert matrix.hooks_gone(cell, bare, calibrated) == "ok"
    calibrated[0]["steps"]["6"]["state"] = 2
    assert "on what is the user's: ['module hooks']" in matrix.hooks_gone(cell, bare, calibrated)
    calibrated[0]["steps"]["6"]["state"] = 1
    calibrated[0]["steps"][str(matrix.STOP_AT - 1)]["state"] = 1
    assert "left behind" in matrix.hooks_gone(cell, bare, calibrated)


def test_calls_are_counted_as_nccl_tests_counts_bytes(matrix: Any) -> None:
    calls = {
        "all_gather_single | TP | 0,1 | 64,32": 2,
        "_allgather_base | TP | 0,1 | 64,32": 1,
        "reduce_scatter_single | TP | 0,1 | 32,64": 1,
        "all_to_all_single | EP | 0,1 | 40,48": 1,
        "send | PP | 0,1 | 16,0 | 1": 3,
        "barrier | default_pg | 0,1 | 0": 1,
    }
    assert matrix.counted(calls) == {
        ("all_gather", "TP", (0, 1), 64): 3,
        ("reduce_scatter", "TP", (0, 1), 64): 1,
        ("all_to_all", "EP", (0, 1), 48): 1,
        ("send", "PP", (0, 1), 16): 3,
        ("other", "default_pg", (0, 1), -1): 1,
    }


def test_a_stop_needs_the_same_iteration_and_its_checkpoint(matrix: Any, tmp_path: Path) -> None:
    ranks = {0: a_rank(matrix.STOP_AT), 1: a_rank(matrix.STOP_AT)}
    log = f"exiting program at iteration {matrix.STOP_AT}"
    assert "no checkpoint" in matrix.stopped(ranks, log, tmp_path)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text(f"{matrix.STOP_AT}\n", encoding="utf-8")
    assert matrix.stopped(ranks, log, tmp_path) == "ok"
    assert matrix.stopped(ranks, "", tmp_path) != "ok"
    ranks[1] = a_rank(matrix.STOP_AT - 1)
    assert "ranks ended" in matrix.stopped(ranks, log, tmp_path)


@pytest.mark.nightly
@pytest.mark.skipif(not CLONES, reason="needs FORERUN_MEGATRON_CLONES, a folder with clones")
def test_a_cell_of_the_matrix_is_green(tmp_path: Path) -> None:
    versions = sorted(path.parent.name for path in Path(CLONES).glob("*/pretrain_gpt.py"))
    version = "core_v0.16.1" if "core_v0.16.1" in versions else versions[0]
    out = tmp_path / "cells.json"
    command = [sys.executable, str(SCRIPT), CLONES, "--versions", version, "--layouts", "pp2-vp2"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (cell,) = json.loads(out.read_text(encoding="utf-8"))
    assert set(cell["results"].values()) == {"ok"}
