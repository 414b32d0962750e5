"""Loops that a loader feeds, on two real ranks: the same bits with the flags and without them.

Samplers, workers of loaders and sums over gloo are the same bits only where they are real.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import fed_loops as script
import pytest
from launched import Launch

from forerun.calib.records.record_kinds import DataLength, LoopRecord
from forerun.calib.samples.store import read_run

pytestmark = pytest.mark.slow
WINDOW = 8


@cache
def launch(directory: Path, kind: str, *arguments: str) -> tuple[list[str], str]:
    """Return each rank's result, and all output."""
    directory.mkdir()
    words = ("--standalone", "--nproc-per-node", 2, script.__file__, kind, *arguments)
    done = Launch(directory, *words, num_workers=2, WANDB_MODE="disabled").end_well()
    return sorted(re.findall(r"^FED (.+)$", done.stdout, re.MULTILINE)), done.stdout + done.stderr


def launch_hooked(directory: Path, kind: str, *arguments: str) -> tuple[list[str], str]:
    flags = ("--calibrate", f"--calibrate-steps={WINDOW}", f"--calibrate-dir={directory / 'out'}")
    return launch(directory, kind, *flags, *arguments)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("sized", ()), ("sized", ("--calibrate-total-steps=24",)), ("stream", ())],
)
def test_order_losses_and_random_state_are_those_without_us(
    tmp_path: Path, kind: str, arguments: tuple[str, ...]
) -> None:
    """The models, optimizers, loaders and data die as well, and torch's methods are back."""
    results, _ = launch_hooked(tmp_path / "watched", kind, *arguments)
    bare, _ = launch(tmp_path / "bare", kind)
    assert len(results) == 2 and results == bare
    assert all(line.endswith(" 0 0") for line in results)


@pytest.mark.parametrize(
    ("kind", "total", "length"),
    [("sized", 0, "known"), ("sized", 24, "known"), ("stream", 0, "none")],
)
def test_the_loop_is_told_as_it_is(tmp_path: Path, kind: str, total: int, length: str) -> None:
    total_flags = (f"--calibrate-total-steps={total}",) if total else ()
    _, text = launch_hooked(tmp_path / "run", kind, *total_flags)
    steps = script.STEPS if kind == "sized" else 0
    loops = read_run(tmp_path / "run" / "out").loops
    assert sorted(loops) == [0, 1]
    assert loops[0] == LoopRecord(
        num_steps=total,
        data=DataLength(length),
        pass_end=steps,
        pass_steps=steps,
        samples=script.BATCH * script.ACCUMULATED,
        num_replicas=2,
        grad_nbytes=4 * (script.WIDTH * 4 + 4),
    )
    forecast = json.loads(
        (tmp_path / "run" / "out" / "latest" / "forecast.json").read_text(encoding="utf-8")
    )
    assert bool(forecast["reason_no_finish"]) == (not total)
    assert any(f"] {word} " in text for word in ("ends", "ended")) or not total
    assert total or "] ends " not in text
    assert forecast["samples_per_s"] > 0
