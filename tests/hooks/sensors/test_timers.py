"""The proxy in front of Megatron's timers."""

from __future__ import annotations

from argparse import Namespace
from types import ModuleType

import pytest

from forerun.calib.records.record_kinds import PhaseRecord
from forerun.hooks.process.guard import Guard
from forerun.hooks.recording.attribution import Attribution
from forerun.hooks.sensors.recorder import Recorder, StepLog
from forerun.hooks.sensors.stopwatch import HostStopwatch
from forerun.hooks.sensors.timers import TimerHooks, TimersProxy


@pytest.fixture(scope="module")
def megatron_timers() -> ModuleType:
    return pytest.importorskip("megatron.core.timers")


@pytest.fixture
def recorder(clock) -> Recorder:
    return Recorder(HostStopwatch(clock))


def phases(recorder: Recorder) -> list[PhaseRecord]:
    log = recorder.close()
    return [r for r in Attribution(log).records() if isinstance(r, PhaseRecord)]


def test_phases_are_recorded_and_megatrons_own_timers_run_as_before(
    megatron_timers: ModuleType, recorder: Recorder, clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    config = Namespace(timers=megatron_timers.Timers(2, "max"))
    hooks = TimerHooks(recorder, Guard())
    recorder.open(StepLog(step=0, window=0, sites=()))
    hooks.install([(config, "timers")])
    config.timers("forward-compute", log_level=2).start()
    clock.tick(50)
    config.timers("forward-compute").stop()
    assert config.timers("forward-compute").elapsed() >= 0.0
    assert set(config.timers._timers) == {"forward-compute"}
    hooks.remove()
    assert type(config.timers) is megatron_timers.Timers
    assert [(p.name, p.duration_ns) for p in phases(recorder)] == [("forward-compute", 50)]


def test_a_timer_that_megatron_has_switched_off_is_recorded_all_the_same(
    megatron_timers: ModuleType, recorder: Recorder, clock
) -> None:
    proxy = TimersProxy(megatron_timers.Timers(0, "max"), recorder, Guard())
    recorder.open(StepLog(step=0, window=0, sites=()))
    for _ in range(2):
        proxy("optimizer", log_level=1).start(barrier=True)
        clock.tick(5)
        proxy("optimizer").stop()
    assert [(p.microbatch, p.duration_ns) for p in phases(recorder)] == [(0, 5), (1, 5)]


def test_megatrons_own_checks_still_raise(megatron_timers: ModuleType, recorder: Recorder) -> None:
    proxy = TimersProxy(megatron_timers.Timers(0, "max"), recorder, Guard())
    with pytest.raises(AssertionError, match="larger than max"):
        proxy("x", log_level=9)


def test_without_timers_a_proxy_stands_in_and_none_comes_back(recorder: Recorder, clock) -> None:
    config = Namespace(timers=None)
    hooks = TimerHooks(recorder, Guard())
    recorder.open(StepLog(step=0, window=0, sites=()))
    hooks.install([(config, "timers"), (config, "timers")])
    assert hooks.num_installed == 1
    config.timers("forward-backward", log_level=1).start(barrier=False)
    clock.tick(8)
    config.timers("forward-backward").stop()
    hooks.remove()
    assert config.timers is None and hooks.num_installed == 0
    assert phases(recorder)[0].duration_ns == 8


def test_what_the_host_has_put_there_meanwhile_is_left_alone(recorder: Recorder) -> None:
    config = Namespace(timers=None)
    hooks = TimerHooks(recorder, Guard())
    hooks.install([(config, "timers")])
    config.timers = "new"
    hooks.remove()
    assert config.timers == "new"


def test_a_stop_without_a_start_is_ignored(recorder: Recorder) -> None:
    recorder.open(StepLog(step=0, window=0, sites=()))
    recorder.end_phase("never-begun")
    assert phases(recorder) == []
