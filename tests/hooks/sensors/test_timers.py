"""Phases, seen at the calls of Megatron's timers."""

from __future__ import annotations

import copy
import pickle
from argparse import Namespace
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from forerun.calib.marks._attribution import Attribution
from forerun.calib.records.record_kinds import PhaseRecord
from forerun.hooks.process.guard import Guard
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.step_log import StepLog
from forerun.hooks.sensors.stopwatch import HostStopwatch
from forerun.hooks.sensors.timers import TimerHooks


@pytest.fixture(scope="module")
def megatron_timers() -> ModuleType:
    return pytest.importorskip("megatron.core.timers")


@pytest.fixture
def recorder(clock) -> Recorder:
    return Recorder(HostStopwatch(clock))


@pytest.fixture
def hooks(recorder: Recorder) -> Iterator[TimerHooks]:
    hooks = TimerHooks(recorder, Guard())
    recorder.open(StepLog(step=0, window=0, sites=()))
    yield hooks
    hooks.remove()


def phases(recorder: Recorder) -> list[PhaseRecord]:
    log = recorder.close()
    return [r for r in Attribution(log).records() if isinstance(r, PhaseRecord)]


def methods(module: ModuleType) -> list[Any]:
    kinds = (module.Timers, module.Timer, module.DummyTimer)
    return [vars(kind).get(name) for kind in kinds for name in ("__call__", "start", "stop")]


def test_phases_are_recorded_and_megatrons_own_timers_run_as_before(
    megatron_timers: ModuleType,
    recorder: Recorder,
    hooks: TimerHooks,
    clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    before = methods(megatron_timers)
    config = Namespace(timers=(timers := megatron_timers.Timers(2, "max")))
    hooks.install([(config, "timers")])
    config.timers("forward-compute", log_level=2).start()
    clock.tick(50)
    config.timers("forward-compute").stop()
    assert config.timers("forward-compute").elapsed() >= 0.0
    assert config.timers is timers and set(timers._timers) == {"forward-compute"}
    assert type(timers("forward-compute")) is megatron_timers.Timer
    hooks.remove()
    assert methods(megatron_timers) == before
    assert [(p.name, p.duration_ns) for p in phases(recorder)] == [("forward-compute", 50)]


def test_a_timer_that_megatron_has_switched_off_is_recorded_all_the_same(
    megatron_timers: ModuleType, recorder: Recorder, hooks: TimerHooks, clock
) -> None:
    timers = megatron_timers.Timers(0, "max")
    hooks.install([(Namespace(timers=timers), "timers")])
    for _ in range(2):
        timers("optimizer", log_level=1).start(barrier=True)
        timers("inside", log_level=2).start()
        clock.tick(5)
        timers("inside").stop()
        timers("optimizer").stop()
    marked = [(p.name, p.microbatch, p.duration_ns) for p in phases(recorder)]
    assert marked == [(name, k, 5) for k in range(2) for name in ("inside", "optimizer")]


def test_other_timers_of_the_class_are_none_of_the_runs(
    megatron_timers: ModuleType, recorder: Recorder, hooks: TimerHooks
) -> None:
    config = Namespace(timers=megatron_timers.Timers(0, "max"))
    hooks.install([(config, "timers")])
    others = megatron_timers.Timers(0, "max")
    others("optimizer", log_level=1).start()
    others("optimizer").stop()
    assert phases(recorder) == []


def test_megatrons_own_checks_still_raise(megatron_timers: ModuleType, hooks: TimerHooks) -> None:
    timers = megatron_timers.Timers(0, "max")
    hooks.install([(Namespace(timers=timers), "timers")])
    with pytest.raises(AssertionError, match="larger than max"):
        timers("x", log_level=9)


def test_where_there_are_no_timers_phases_are_seen_and_none_comes_back(
    recorder: Recorder, hooks: TimerHooks, clock
) -> None:
    config = Namespace(timers=None)
    hooks.install([(config, "timers"), (config, "timers")])
    assert hooks.num_installed == 1
    config.timers("forward-backward", log_level=1).start(barrier=False)
    clock.tick(8)
    config.timers("forward-backward").stop()
    hooks.remove()
    assert config.timers is None and hooks.num_installed == 0
    assert phases(recorder)[0].duration_ns == 8


def test_what_is_planted_is_none_in_every_copy(hooks: TimerHooks) -> None:
    config = Namespace(timers=None, inside=[1])
    hooks.install([(config, "timers")])
    for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert copied == Namespace(timers=None, inside=[1])
    assert copy.copy(config.timers) is None


def test_what_the_host_has_put_there_meanwhile_is_left_alone(hooks: TimerHooks) -> None:
    config = Namespace(timers=None)
    hooks.install([(config, "timers")])
    config.timers = "new"
    hooks.remove()
    assert config.timers == "new"


def test_a_stop_without_a_start_is_ignored(recorder: Recorder) -> None:
    recorder.open(StepLog(step=0, window=0, sites=()))
    recorder.end_phase("never-begun")
    assert phases(recorder) == []
