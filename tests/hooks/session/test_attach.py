"""A loop of one's own, without Megatron and without torch.distributed."""

from __future__ import annotations

import atexit
import gc
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import forerun
from forerun.calib.records.record_kinds import (
    CoverageRecord,
    OperatorRecord,
    PhaseRecord,
    StepFlag,
    StepRecord,
    WindowRecord,
)
from forerun.calib.samples.store import read_run
from forerun.calib.workload.config import Batch, ModelShape, Parallelism, RunConfig
from forerun.calib.workload.operators import OperatorKind
from forerun.hooks.recording.window import NUM_WARMUP_STEPS
from forerun.hooks.session import devices
from forerun.hooks.session.attaching import attach

CONFIG = RunConfig(
    model=ModelShape(
        num_layers=1,
        hidden_size=4,
        ffn_hidden_size=8,
        num_attention_heads=1,
        num_query_groups=1,
        kv_channels=4,
        seq_length=2,
        vocab_size=8,
    ),
    parallelism=Parallelism(),
    batch=Batch(micro_batch_size=1, global_batch_size=1),
)


@pytest.fixture(autouse=True)
def no_exit_handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    yield registered


class Loop:
    def __init__(self, directory: Path, **options) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.losses: list[float] = []
        self.run = attach(
            self.model,
            self.optimizer,
            options.pop("config", None),
            directory=directory,
            is_analysed=False,
            **options,
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(2, 4)).square().sum()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def train(self, num_steps: int) -> list[float]:
        with self.run as run:
            for _ in range(num_steps):
                self.step()
                run.step()
        return self.losses


def records(directory: Path, kind: type) -> list:
    return [r for r in read_run(directory).records[0] if isinstance(r, kind)]


@pytest.mark.parametrize("config", [CONFIG, None])
def test_the_header_names_the_device_before_the_first_window(
    tmp_path: Path, config: RunConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU all headers said ``cpu``: they are written in the first step, hooks come later."""
    monkeypatch.setattr(devices, "name_of", lambda _: "NVIDIA H200")
    Loop(tmp_path, steps=4, config=config).train(2)
    run = read_run(tmp_path)
    assert {header.device for header in run.headers.values()} == {"NVIDIA H200"}


def test_steps_windows_and_the_optimizer_are_recorded(tmp_path: Path) -> None:
    Loop(tmp_path, steps=4).train(12)
    steps = records(tmp_path, StepRecord)
    assert [s.step for s in steps] == list(range(NUM_WARMUP_STEPS + 4))
    assert [s.is_hooked for s in steps[NUM_WARMUP_STEPS:]] == [True, False, False, True]
    # Python may collect garbage in any step.
    flags = [set(s.flags) - {StepFlag.COLLECTED} for s in steps]
    assert flags[:NUM_WARMUP_STEPS] == [{StepFlag.WARMUP}] * NUM_WARMUP_STEPS
    assert not any(flags[NUM_WARMUP_STEPS:])
    operators = records(tmp_path, OperatorRecord)
    assert [(o.kind, o.shape) for o in operators] == [(OperatorKind.OPTIMIZER, (20,))] * 2
    silent = [c.name for c in records(tmp_path, CoverageRecord) if not c.installed]
    assert silent == ["operators not recorded: the layers of the model are of no known library"]
    window = records(tmp_path, WindowRecord)
    assert [(w.first_step, w.last_step, w.num_faults, w.num_dropped) for w in window] == [
        (3, 6, 0, 0)
    ]
    assert window[0].memory_peak_nbytes > 10**6


def test_the_losses_are_bitwise_those_of_the_bare_loop(tmp_path: Path) -> None:
    bare = Loop(tmp_path)
    for _ in range(12):
        bare.step()
    assert Loop(tmp_path, steps=8).train(12) == bare.losses


def test_the_run_is_described_once_where_the_config_is_given(tmp_path: Path) -> None:
    Loop(tmp_path, steps=4, config=CONFIG).train(8)
    assert read_run(tmp_path).configs[0] == CONFIG


def test_named_phases_are_recorded_and_evaluation_is_left_out_of_the_step(
    tmp_path: Path,
) -> None:
    loop = Loop(tmp_path, steps=4)
    with loop.run as run:
        for number in range(8):
            loop.step()
            with run.phase("data"):
                pass
            if number == 5:
                with run.phase("eval"):
                    torch.ones(400, 400) @ torch.ones(400, 400)
            run.step()
    names = [p.name for p in records(tmp_path, PhaseRecord)]
    assert names.count("data") == 2 and names.count("eval") == 1
    flagged = [s.step for s in records(tmp_path, StepRecord) if StepFlag.EVALUATED in s.flags]
    assert flagged == [5]


def test_a_step_with_a_full_collection_is_flagged(tmp_path: Path) -> None:
    loop = Loop(tmp_path, steps=4)
    with loop.run as run:
        for number in range(8):
            loop.step()
            if number == 4:
                gc.collect()
            run.step()
    flagged = [s.step for s in records(tmp_path, StepRecord) if StepFlag.COLLECTED in s.flags]
    assert 4 in flagged


def test_a_window_that_training_cuts_short_is_closed_and_written(tmp_path: Path) -> None:
    Loop(tmp_path, steps=20).train(6)
    window = records(tmp_path, WindowRecord)[0]
    assert (window.first_step, window.last_step) == (3, 5)
    assert not any(known.installed for known in records(tmp_path, CoverageRecord))


def test_the_end_starts_no_thread_which_python_may_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 3.12 on none starts while the process ends; what comes after is then lost."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if loop.run._session._is_finished:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    loop = Loop(tmp_path, steps=4, every=10)
    loop.train(NUM_WARMUP_STEPS + 2)
    assert [w.num_faults for w in records(tmp_path, WindowRecord)] == [0]


def test_every_opens_a_second_window(tmp_path: Path) -> None:
    Loop(tmp_path, steps=4, every=10).train(16)
    assert [w.window for w in records(tmp_path, WindowRecord)] == [0, 1]


def test_training_goes_on_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "records").write_text("in the way")
    assert len(Loop(tmp_path, steps=4).train(10)) == 10


def test_three_faults_remove_everything_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hooked
) -> None:
    from forerun.hooks.session.instruments import Instruments

    loop = Loop(tmp_path, steps=20)
    monkeypatch.setattr(Instruments, "put_on", lambda *_, **__: 1 / 0)
    assert len(loop.train(20)) == 20
    assert loop.run._session.guard.is_tripped
    assert not hooked(loop.model)


def test_faulted_steps_are_flagged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.hooks.sensors.recorder import Recorder

    faults = iter([True])

    def begin_phase(self, name: str) -> None:
        if next(faults, False):
            raise RuntimeError("once")

    monkeypatch.setattr(Recorder, "begin_phase", begin_phase)
    Loop(tmp_path, steps=4).train(8)
    flagged = [s.step for s in records(tmp_path, StepRecord) if StepFlag.FAULTED in s.flags]
    assert flagged == [3]


def test_the_file_is_one_json_object_per_line(tmp_path: Path) -> None:
    Loop(tmp_path, steps=4).train(8)
    path = next(tmp_path.rglob("rank-00000.jsonl"))
    assert all(isinstance(json.loads(line), dict) for line in path.read_text().splitlines())


def test_switched_off_it_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_OFF", "1")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    threads = set(threading.enumerate())
    with attach(model, optimizer, CONFIG, directory=tmp_path / "out", steps=4) as run:
        for _ in range(10):
            with run.phase("forward"):
                model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            run.step()
            assert not run.should_stop()
            assert set(threading.enumerate()) == threads
    assert not list(tmp_path.iterdir())


def test_every_public_name_is_where_the_facade_looks() -> None:
    assert all(getattr(forerun, name) is not None for name in forerun.__all__)


def test_the_records_are_where_the_run_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program then works in a folder of results, and lists it."""
    results = tmp_path / "results"
    results.mkdir()
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, steps=4, is_analysed=False) as run:
        for _ in range(8):
            monkeypatch.chdir(results)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            run.step()
    assert list(results.iterdir()) == []
    assert read_run(tmp_path / "forerun-out").records[0]
