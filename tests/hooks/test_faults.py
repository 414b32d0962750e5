"""Every fault of ``fault_cases`` in processes of its own: training ends as it would without us."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import fault_runs
import pytest
from fault_cases import FAULTS, Fault
from fault_runs import run_folder
from fault_table import kinds, num_operators, observed, run_all

pytest.importorskip("megatron")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs, made once."""
    folder = tmp_path_factory.mktemp("faults") / "runs"
    run_all(folder)
    return folder


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_training_is_the_same_and_what_was_recorded_can_be_read(folder: Path, fault: Fault) -> None:
    bare, ours, rows = observed(folder, fault, num_operators(folder, fault))
    assert bare.losses[0], "the fault struck before the first step"
    assert ours.losses == bare.losses
    assert ours.random == bare.random
    assert (bare.status, ours.status) == (fault.status, fault.status)
    assert kinds(ours) == kinds(bare)
    assert rows == fault.rows


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_no_hook_is_left_where_training_ended_by_itself(folder: Path, fault: Fault) -> None:
    _, ours, _ = observed(folder, fault, operators=0)
    if not any(ours.errors):
        assert ours.remaining_hooks == ()


def test_a_forked_child_says_nothing_to_the_companion(folder: Path) -> None:
    fault = next(fault for fault in FAULTS if "companion listening" in fault.name)
    events = run_folder(folder, fault, is_bare=False) / "out" / "events.txt"
    assert events.read_text().count('"end"') == 1


def test_a_fault_in_every_function_that_training_calls(tmp_path: Path) -> None:
    program = Path(fault_runs.__file__).with_name("fault_sweep.py")
    subprocess.run([sys.executable, str(program), str(tmp_path)], check=True)
    bare, ours = fault_runs.seen(tmp_path / "bare"), fault_runs.seen(tmp_path / "ours")
    struck = json.loads((tmp_path / "ours" / "sweep.json").read_text())["struck"]
    assert len(struck) >= 60
    assert (ours.losses, ours.random, ours.status) == (bare.losses, bare.random, (0,))
    # A window may be open at the end, and with it the watch on the garbage collector.
    assert all(name.startswith("gc: ") for name in ours.remaining_hooks)
    assert fault_runs.rows(tmp_path / "ours", operators=0).steps
