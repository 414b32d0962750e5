"""A loop that is thrown out of a hooked step and begun again in the same process, for real.

Both loops are the recipe's own: process groups are destroyed and made anew, and so is the model.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launched import Launch

from forerun.calib.records.record_kinds import CoverageRecord, OperatorRecord, StepRecord
from forerun.calib.samples.store import read_run

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
ITERS, WINDOW, WARMUP, FAILS_AT = 12, 8, 3, 6
_BITS = re.compile(r"iteration +(\d+)/.*loss bits (0x[0-9a-f]{8})")
TWICE = """
import gc, sys, weakref
sys.path.insert(0, {recipes!r})
import pretrain_gpt as script
import torch
from torch._C._distributed_c10d import ProcessGroup

methods = {{name: value for name, value in vars(ProcessGroup).items() if callable(value)}}
forward, build, calls, models = script.forward_step, script.build, [0], []

def failing(data, model):
    calls[0] += 1
    if calls[0] == {fails_at} * 2 + 2:
        assert not clean(), "not in a hooked step"
        raise RuntimeError("planted")
    return forward(data, model)

def kept(args):
    built = build(args)
    models.append(weakref.ref(built[0][0]))
    return built

def clean():
    now = {{name: value for name, value in vars(ProcessGroup).items() if callable(value)}}
    return now == methods and not any("forerun" in str(call) for call in gc.callbacks)

script.forward_step, script.build = failing, kept
try:
    script.main()
except RuntimeError as err:
    print("thrown out:", err, "clean:", clean())
script.parallel_state.destroy_model_parallel()
torch.distributed.destroy_process_group()
script.parallel_state.destroy_global_memory_buffer()
print("begin again")
script.forward_step = forward
script.main()
gc.collect()
print("old model is gone:", models[0]() is None, "clean:", clean())
"""


def run(*command: str, cwd: Path) -> str:
    small = ("--train-iters", ITERS, "--hidden-size", 32, "--num-layers", 2, "--seq-length", 32,
             "--eval-iters", 0, "--micro-batch-size", 2, "--global-batch-size", 4)  # fmt: skip
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": 0}
    return Launch(cwd, *command, *small, MASTER_ADDR="localhost", **place).end_well().stdout


def test_the_second_loop_is_hooked_anew_and_trains_as_if_there_were_no_hooks(
    tmp_path: Path,
) -> None:
    script = tmp_path / "twice.py"
    recipes = str(ROOT / "recipes")
    script.write_text(TWICE.format(recipes=recipes, fails_at=FAILS_AT), encoding="utf-8")
    bare = run(str(ROOT / "recipes" / "pretrain_gpt.py"), cwd=tmp_path)
    flags = ("--calibrate", f"--calibrate-steps={WINDOW}", "--calibrate-wandb=off")
    first, separator, second = run(str(script), *flags, cwd=tmp_path).partition("begin again")
    assert "thrown out: planted clean: True" in first and separator
    assert "old model is gone: True clean: True" in second
    assert _BITS.findall(second) == _BITS.findall(bare) and len(_BITS.findall(bare)) == ITERS
    records = read_run(tmp_path / "forerun-out").records[0]
    steps = {(r.window, r.step): r for r in records if isinstance(r, StepRecord)}
    attempts = {window: [step for w, step in steps if w == window] for window, _ in steps}
    # The second loop goes on with the session's own count: Megatron's iteration is not told here.
    first_resumed_step = attempts[1000][0]
    assert attempts[0] == list(range(FAILS_AT))
    assert attempts[1000] == list(range(first_resumed_step, first_resumed_step + WARMUP + WINDOW))
    for window, numbers in attempts.items():
        hooked = [number for number in numbers if steps[window, number].is_hooked]
        seen = {r.step for r in records if isinstance(r, OperatorRecord) and r.window == window}
        assert hooked and set(hooked) == seen
    coverage = [r for r in records if isinstance(r, CoverageRecord)]
    assert coverage and all(r.fired >= r.installed for r in coverage)
