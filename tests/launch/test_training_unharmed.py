"""torchrun and megatron.core: training with the flag is training without it, bit for bit.

Each layout trains twice, bare and calibrated; the calibrated run is then looked at from all sides.

The promise is about this very launch; nothing cheaper has torchrun, gloo and Megatron in it.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import wandb_file
from launched import Launch
from written_files import check_written_files

from forerun.calib.layers.stage_work import step_collectives
from forerun.calib.marks.run_records import RunRecords
from forerun.calib.records.record_kinds import CollectiveRecord, CoverageRecord, StepRecord
from forerun.calib.samples.store import read_run
from forerun.calib.workload.collectives import GroupRole

ROOT = Path(__file__).parent.parent.parent
ITERS, STEPS, WARMUP = 20, 8, 3
LAYOUTS = {
    "tp2": ("--tensor-model-parallel-size", "2"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
    "dp2": ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
}
MODELLED_ROLES = (GroupRole.TP, GroupRole.PP, GroupRole.DP, GroupRole.EMBEDDING)
CONTROL_NBYTES = 64
"""Gradient norms, found-inf flags and loss sums, which the layout does not list."""
_BITS = re.compile(r"iteration +(\d+)/.*loss bits (0x[0-9a-f]{8})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A layout trained bare and calibrated."""

    name: str
    bare: subprocess.CompletedProcess[str]
    calibrated: subprocess.CompletedProcess[str]
    directory: Path

    @property
    def run(self) -> RunRecords:
        return read_run(self.directory)


def train(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = ("--standalone", "--nproc-per-node", 2, ROOT / "recipes" / "pretrain_gpt.py")
    small = ("--train-iters", ITERS, "--hidden-size", 64, "--global-batch-size", 8)
    return Launch(directory, *words, *small, *options, num_workers=2).end_well()


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name != "dp2")) for name in LAYOUTS],
    ids=LAYOUTS,
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    home = tmp_path_factory.mktemp(request.param)
    directory = home / "out"
    options = LAYOUTS[request.param]
    flags = ("--calibrate", f"--calibrate-dir={directory}", f"--calibrate-steps={STEPS}")
    return Pair(
        name=request.param,
        bare=train(home, *options),
        calibrated=train(home, *options, *flags),
        directory=directory,
    )


def losses(done: subprocess.CompletedProcess[str]) -> dict[int, str]:
    return {int(step): bits for step, bits in _BITS.findall(done.stdout)}


def test_losses_are_bit_identical(pair: Pair) -> None:
    bare = losses(pair.bare)
    assert sorted(bare) == list(range(1, ITERS + 1))
    assert losses(pair.calibrated) == bare


def test_without_the_flag_nothing_of_ours_speaks_but_the_stand_in(pair: Pair) -> None:
    ours = [line for line in pair.bare.stdout.splitlines() if "[forerun]" in line]
    assert len(ours) == 1 and "stand-in" in ours[0]


def test_the_transcript_is_printed_and_the_files_are_there(pair: Pair) -> None:
    lines = [line for line in pair.calibrated.stdout.splitlines() if "[forerun]" in line]
    for word in (" · step ", "checked:", "report:", "scored: ", "] ended "):
        assert any(word in line for line in lines), word
    # Training may end before its first answer, which then decides nothing.
    assert any("] ends " in line for line in lines) == any("decision:" in line for line in lines)
    for name in ("decision", "forecast", "answer", "score"):
        value = json.loads((pair.directory / "latest" / f"{name}.json").read_text(encoding="utf-8"))
        assert value["schema"] and value["run_id"]
    assert {"forecasts", "launch", "command"} <= check_written_files(pair.directory)


def test_every_installed_hook_fired(pair: Pair) -> None:
    rows = [
        r for records in pair.run.records.values() for r in records if isinstance(r, CoverageRecord)
    ]
    assert rows
    assert [r for r in rows if r.fired < r.installed] == []


def test_half_of_the_window_is_bare(pair: Pair) -> None:
    for records in pair.run.records.values():
        steps = [r for r in records if isinstance(r, StepRecord) and not r.flags]
        window = [r for r in steps if WARMUP <= r.step < WARMUP + STEPS]
        assert sum(r.is_hooked for r in window) == sum(not r.is_hooked for r in window)


def test_collectives_are_those_of_the_layout(pair: Pair) -> None:
    run = pair.run
    assert not run.problems
    for rank, records in run.records.items():
        calls = [
            r
            for r in records
            if isinstance(r, CollectiveRecord)
            and r.role in MODELLED_ROLES
            and len(r.ranks) > 1
            and r.nbytes > CONTROL_NBYTES
        ]
        hooked = {r.step for r in records if isinstance(r, StepRecord) and r.is_hooked}
        expected = Counter(
            {
                (call.collective, call.role, call.num_ranks, call.nbytes): count
                for call, count in step_collectives(
                    run.configs[rank], stage=run.headers[rank].stage
                )
            }
        )
        assert expected and hooked
        for step in hooked:
            counts = Counter(
                (r.collective, r.role, len(r.ranks), r.nbytes) for r in calls if r.step == step
            )
            assert counts == expected, f"rank {rank}, step {step}"


def test_wandb_holds_predicted_against_actual_at_every_step(pair: Pair) -> None:
    rows = dict(wandb_file.history(pair.directory))
    assert sorted(rows) == list(range(1, ITERS + 1))
    assert all("calib/step_time_s" in row for row in rows.values())
    after = range(WARMUP + STEPS + 1, ITERS + 1)
    assert all("calib/step_time_predicted_s" in rows[step] for step in after)
    both = pair.calibrated.stdout + pair.calibrated.stderr
    assert "wandb: WARNING" not in both
