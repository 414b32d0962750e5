"""One rank's probes: the budget, what is skipped, and what a fault leaves."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from forerun.calib.records.record_kinds import CoverageRecord, OperatorRecord, Record
from forerun.calib.workload.config import Batch, ModelShape, Parallelism, RunConfig
from forerun.calib.workload.operators import Phase
from forerun.hooks.probing import _probe_memory as probe_memory
from forerun.hooks.probing.probes import Probing
from forerun.hooks.process.guard import Guard
from forerun.hooks.process.host import Host
from forerun.hooks.process.settings import RankInfo, Settings
from forerun.hooks.recording.window import WindowPlan
from forerun.hooks.sensors.stopwatch import HostStopwatch
from forerun.hooks.session._ledger import StepGap
from forerun.hooks.session._trace_turns import ProbeScheduler

MODEL = ModelShape(
    num_layers=1,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=8,
    seq_length=16,
    vocab_size=64,
)
CONFIG = RunConfig(
    model=MODEL,
    parallelism=Parallelism(),
    batch=Batch(micro_batch_size=1, global_batch_size=4),
)
LOOK_S = 0.01
"""Cost of every look at the clock, so that slices are equally long on every machine."""


def settings(probe_s: float) -> Settings:
    rank = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, run_id="run")
    return Settings(rank=rank, probe_s=probe_s, directory=Path("unused"))


def probing(probe_s: float, put: Callable[[Record], object]) -> Probing:
    ticks = count()
    return Probing(
        CONFIG,
        settings(probe_s),
        device=torch.device("cpu"),
        stopwatch=HostStopwatch(),
        put=put,
        clock=lambda: next(ticks) * LOOK_S,
    )


def run_all(probes: Probing) -> int:
    """Slices until nothing is left."""
    number = 0
    while not probes.is_done:
        probes.run_slice(step=number, window=0)
        number += 1
        assert number < 1000
    return number


@pytest.mark.parametrize("budget_s", [0.2, 0.5])
def test_the_budget_ends_the_probes(budget_s: float) -> None:
    records: list[Record] = []
    probes = probing(budget_s, records.append)
    run_all(probes)
    assert records
    one_slice_s = 5 * LOOK_S
    assert budget_s - one_slice_s <= probes.spent_s <= budget_s + 2 * one_slice_s


def test_every_repeat_is_a_record_of_a_probe() -> None:
    records: list[Record] = []
    run_all(probing(60.0, records.append))
    operators = [r for r in records if isinstance(r, OperatorRecord)]
    assert operators == records and all(r.is_probe for r in operators)
    shapes = {(r.kind, r.shape) for r in operators}
    for kind, shape in shapes:
        phases = [r.phase for r in operators if (r.kind, r.shape) == (kind, shape)]
        assert set(phases) in ({Phase.FORWARD, Phase.BACKWARD}, {Phase.STEP})
        assert len(phases) == 5 * len(set(phases))


def test_what_does_not_fit_into_free_memory_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_memory, "available_nbytes", lambda: 0)
    records: list[Record] = []
    run_all(probing(60.0, records.append))
    (remark,) = records
    assert isinstance(remark, CoverageRecord) and (remark.installed, remark.fired) == (0, 0)
    assert remark.name == "not probed: operators for which no block of memory is free"


def turns(probe_s: float, put: Callable[[Record], object], done: list[int]) -> ProbeScheduler:
    ticks = count(0, 10)
    return ProbeScheduler(
        settings(probe_s),
        Guard(),
        put=put,
        on_done=lambda: done.append(1),
        clock=lambda: next(ticks),
    )


def host() -> Host:
    return Host(models=(torch.nn.Linear(2, 2),), run_config=lambda: CONFIG)


def test_turns_come_outside_of_windows_and_end_with_one_word() -> None:
    records: list[Record] = []
    done: list[int] = []
    mine, plan = turns(60.0, records.append, done), WindowPlan(steps=4)
    for index in range(7):
        mine.before_step(host(), plan.at(index), StepGap(), step=index - 1, window=0)
    assert not records
    between = StepGap()
    for index in range(7, 400):
        mine.before_step(host(), plan.at(index), between, step=index - 1, window=0)
    assert records and mine.is_over and done == [1]
    assert between.brackets["probe"][1] > between.brackets["probe"][0]


def test_without_the_flag_there_are_no_turns() -> None:
    mine = turns(0.0, pytest.fail, [])
    mine.before_step(host(), WindowPlan(steps=4).at(20), StepGap(), step=19, window=0)
    assert mine.is_over


def test_a_fault_is_counted_once_and_ends_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(Probing, "run_slice", broken)
    mine = turns(60.0, pytest.fail, [])
    for index in range(7, 20):
        mine.before_step(host(), WindowPlan(steps=4).at(index), StepGap(), step=index, window=0)
    assert mine.is_over
