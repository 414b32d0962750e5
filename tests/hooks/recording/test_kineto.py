"""Steps that are really traced, on a CPU; what is against it; and that nothing is left behind."""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_timeline import installed
from te_layers import TransformerLayer
from torch import nn
from torch.autograd.profiler import KinetoStepTracker
from torch.profiler import ProfilerActivity

from forerun.calib.marks._traced_records import traced_records
from forerun.calib.marks.run_records import MOST_TRACES, RankFile
from forerun.calib.marks.traced_step import MARK, MAX_TRACE_NBYTES, TracedStep
from forerun.calib.records.chrome_trace import from_chrome
from forerun.calib.records.record_kinds import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    CoverageRecord,
    OperatorRecord,
    PhaseRecord,
    Record,
    StepFlag,
    StepRecord,
    TraceRecord,
)
from forerun.calib.samples.store import read_run
from forerun.calib.workload.operators import OperatorKind, Phase
from forerun.calib.workload.run_options import AutoSwitch
from forerun.hooks.process.guard import Guard
from forerun.hooks.process.host import Host, WeakHost
from forerun.hooks.process.settings import RankInfo, Settings
from forerun.hooks.recording.kineto import Tracer, reason_against
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.step_log import StepLog
from forerun.hooks.sensors.stopwatch import HostStopwatch
from forerun.hooks.session.instruments import Instruments
from forerun.hooks.session.session import Session

TOKENS, HIDDEN, FFN = 16, 32, 64
TOO_FEW = "of the device are free, less than the 1.5 GiB that a trace may take"
RANK = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, run_id="run")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(HIDDEN, FFN)
        self.linear_fc2 = nn.Linear(FFN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(torch.relu(self.linear_fc1(hidden)))


class Loop:
    """Two micro-batches a step, bracketed as a framework would do it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(Mlp(), Mlp())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.host = Host(models=(self.model,), optimizers=(self.optimizer,))

    def step(self, recorder) -> float:
        loss = torch.zeros(())
        for _ in range(2):
            hidden = torch.ones(TOKENS, 1, HIDDEN, requires_grad=True)
            recorder.begin_phase(FORWARD)
            loss = self.model(hidden).square().mean()
            recorder.end_phase(FORWARD)
            recorder.begin_phase(BACKWARD)
            loss.backward()
            recorder.end_phase(BACKWARD)
        recorder.begin_phase(OPTIMIZER)
        self.optimizer.step()
        self.optimizer.zero_grad()
        recorder.end_phase(OPTIMIZER)
        return float(loss.detach())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Traced:
    """A traced step, the events of its file, and what is read from it."""

    step: TracedStep
    trace: dict[str, Any]
    name_and_ns: list[tuple[str, int]] = field(init=False)

    def __post_init__(self) -> None:
        events = from_chrome(self.trace["traceEvents"])
        events.sort(key=lambda event: event.start_ns)
        self.name_and_ns = [(event.name, event.duration_ns) for event in events]

    def records(self) -> list[Record]:
        """Return the records, by the line of the rank's file."""
        step = TracedStep.from_json(json.loads(self.step.to_line()))
        return [*traced_records(step, copy.deepcopy(self.trace["traceEvents"]))]

    def of(self, name: str) -> list[int]:
        """Return the durations of the events of a name."""
        return [duration_ns for known, duration_ns in self.name_and_ns if known == name]


def trace(loop: Loop, **settings: object) -> Traced:
    instruments = Instruments(WeakHost(loop.host), Guard(), **settings)  # type: ignore[arg-type]
    tracer = Tracer(instruments.recorder, is_device=False)
    tracer.begin()
    instruments.put_on(step=5, window=0, is_traced=True)
    loop.step(instruments.recorder)
    exported = tracer.end()
    assert instruments.take_off() is None  # the tracer has closed the log
    assert exported is not None
    value = json.loads(exported.file.read_text())
    exported.discard()
    assert not exported.file.parent.exists()
    return Traced(exported.step, value)


def test_the_parts_of_a_linear_are_the_profilers_own_times():
    traced = trace(Loop())
    products, forwards = traced.of("aten::mm"), traced.of("aten::linear")
    # A mean has a sum as well, of three axes.
    adds = [
        event.duration_ns
        for event in from_chrome(traced.trace["traceEvents"])
        if event.name == "aten::sum" and len(event.details["Input Dims"][0]) == 2
    ]
    records = [r for r in traced.records() if isinstance(r, TraceRecord)]
    linears = [r for r in records if r.kind.is_linear]
    sums = {
        phase: sum(r.duration_ns for r in linears if r.phase is phase)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    }
    # Four linears in two micro-batches, each with two products.
    assert [len(linears), len(products), len(adds)] == [2 * 8, 2 * 8, 8]
    assert sums[Phase.FORWARD] >= sum(forwards)
    assert sums[Phase.BACKWARD] >= sum(products) + sum(adds)
    shapes = {r.shape for r in linears if r.kind is OperatorKind.LINEAR_FC1}
    assert shapes == {(TOKENS, HIDDEN, FFN)}
    (update,) = (r for r in records if r.phase is Phase.STEP)
    assert update.shape == (sum(p.numel() for p in Loop().model.parameters()),)


def test_h2_a_norm_inside_a_linear_goes_back_with_it():
    loop = Loop()
    loop.model = nn.Sequential(TransformerLayer(1, HIDDEN, FFN, is_fused=True, is_delayed=False))
    loop.host = Host(models=(loop.model,), optimizers=(loop.optimizer,))
    traced = trace(loop)
    norms = traced.of("aten::native_layer_norm_backward")
    weights, products = traced.of("aten::addmm")[1::2], traced.of("aten::mm")
    into = [products[n] for n in (3, 7)]
    records = [r for r in traced.records() if isinstance(r, TraceRecord)]
    assert [len(norms), len(weights), len(products)] == [2, 2, 8]  # in two micro-batches
    fc1 = [r for r in records if r.kind is OperatorKind.LINEAR_FC1]
    backward = [r.duration_ns for r in fc1 if r.phase is Phase.BACKWARD]
    for number, *parts in zip(backward, into, norms, weights, strict=True):
        assert number >= sum(parts)


class Delaying(Loop):
    """Weights' gradients come after each backward pass, the last layer's first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = TransformerLayer(1, HIDDEN, FFN, is_fused=True, is_delayed=True)
        self.model = nn.Sequential(self.layer)
        self.host = Host(models=(self.model,), optimizers=(self.optimizer,))

    def step(self, recorder) -> float:
        hidden = torch.ones(TOKENS, 1, HIDDEN, requires_grad=True)
        recorder.begin_phase(FORWARD)
        loss = self.model(hidden).square().mean()
        recorder.end_phase(FORWARD)
        recorder.begin_phase(BACKWARD)
        loss.backward()
        recorder.end_phase(BACKWARD)
        self.layer.linear_fc2.backward_dw()
        self.layer.linear_fc1.backward_dw()
        return float(loss.detach())


def test_gradients_that_were_put_off_are_not_called_a_whole_backward_pass():
    """The products of the weights are no operator's here."""
    traced = trace(Delaying())
    products = [ns for name, ns in traced.name_and_ns if name in ("aten::mm", "aten::addmm")]
    assert len(products) == 6
    records = [r for r in traced.records() if isinstance(r, TraceRecord)]
    linears = [r for r in records if r.kind.is_linear]
    assert [(r.kind, r.phase) for r in linears] == [
        (OperatorKind.LINEAR_FC1, Phase.FORWARD),
        (OperatorKind.LINEAR_FC2, Phase.FORWARD),
    ]
    for trace_record, product in zip(linears, products[:2], strict=True):
        assert trace_record.duration_ns >= product


def test_a_long_step_is_traced_from_its_last_but_one_micro_batch_on():
    traced = trace(Loop(), microbatches=(0, 1))
    names = [name for name, _ in traced.name_and_ns]
    records = traced.records()
    assert {r.microbatch for r in records if isinstance(r, TraceRecord) and r.kind.is_linear} == {0}
    assert names.count(MARK) == traced.step.num_marks
    # It lasts to the end of the step, so the other micro-batch is in it as well.
    assert names.count("aten::linear") == 8


def test_a_step_without_the_chosen_micro_batch_gives_nothing_and_frees_the_profiler():
    loop = Loop()
    instruments = Instruments(WeakHost(loop.host), Guard(), microbatches=(0, 1, 2, 3))
    tracer = Tracer(instruments.recorder, is_device=False)
    tracer.begin()
    instruments.put_on(step=5, window=0, is_traced=True)
    loop.step(instruments.recorder)
    assert tracer.end() is None
    instruments.take_off()
    with torch.profiler.profile() as user_profiler:
        Loop().step(instruments.recorder)
    assert any(event.key == "aten::linear" for event in user_profiler.key_averages())


def test_a_trace_that_lost_marks_gives_nothing_and_says_so():
    traced = trace(Loop())
    events = [e for e in traced.trace["traceEvents"] if e.get("name") != MARK]
    records = Traced(traced.step, {"traceEvents": events}).records()
    (note,) = records
    assert isinstance(note, CoverageRecord) and note.installed == 0
    assert note.name == f"trace: the trace has 0 of {traced.step.num_marks} marks"


def test_a_device_without_kernels_is_named():
    traced = trace(Loop())
    (note,) = Traced(replace(traced.step, is_device=True), traced.trace).records()
    assert isinstance(note, CoverageRecord) and "no kernels" in note.name


VARIABLES = ("TEARDOWN_CUPTI", "DISABLE_CUPTI_LAZY_REINIT")


def test_m2_the_environment_of_cupti_is_as_before(monkeypatch):
    loop = Loop()
    instruments = Instruments(WeakHost(loop.host), Guard())
    for before in ({}, {VARIABLES[0]: "0"}, {VARIABLES[0]: "1", VARIABLES[1]: "1"}):
        environ = dict(before)
        monkeypatch.setattr(os, "environ", environ)
        tracer = Tracer(instruments.recorder, is_device=False)
        tracer.begin()
        # PyTorch sets both where it knows of CUDA graphs on an older CUDA.
        tracer._profile.start_trace = (
            lambda start=tracer._profile.start_trace, environment=environ: (
                start(),
                environment.update({VARIABLES[0]: "0", VARIABLES[1]: "1"}),
            )
        )
        tracer.end()
        assert environ == before


class Kineto:
    """Kineto's use of the variable (libkineto/src/CuptiActivityApi.cpp, teardownContext).

    Whenever a trace is prepared or has ended, and one was on before: a thread flushes and then
    waits for a call of CUDA's runtime; CUPTI is gone behind that call, whatever is traced then.
    """

    def __init__(self, monkeypatch) -> None:
        self.is_on = self.is_traced = False
        self.lost: list[str] = []
        self.variable_after: list[str | None] = []
        self.threads: list[threading.Thread] = []
        self._called = threading.Event()
        self._is_pending = False
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda: SimpleNamespace(query=self.call), raising=False
        )

    def call(self) -> bool:
        """A call of CUDA's runtime, of anybody's."""
        if self._is_pending:
            self._called.set()
            self.threads[-1].join()
        return True

    def prepare_trace(self) -> None:
        self._reset("prepared")
        self.is_on = self.is_traced = True

    def start_trace(self) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("{}")

    def stop_trace(self) -> None:
        self.is_traced = False
        self._reset("ended")

    def _reset(self, when: str) -> None:
        if self.is_on and os.environ.get(VARIABLES[0]) == "1":
            self._called.clear()
            self.threads.append(threading.Thread(target=self._tear_down, args=(when,), daemon=True))
            self.threads[-1].start()

    def _tear_down(self, when: str) -> None:
        time.sleep(0.02)
        self._is_pending = True
        self._called.wait()
        self._is_pending = self.is_on = False
        self.variable_after.append(os.environ.get(VARIABLES[0]))
        if self.is_traced:
            self.lost.append(when)


def device_trace(monkeypatch, kineto: Kineto) -> None:
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: kineto)
    recorder = Recorder(HostStopwatch())
    tracer = Tracer(recorder, is_device=True)
    tracer.begin()
    recorder.open(StepLog(step=5, window=0, sites=()))
    recorder.begin_phase(FORWARD)
    kineto.call()
    recorder.end_phase(FORWARD)
    exported = tracer.end()
    assert exported is not None
    exported.discard()


def test_m2_a_trace_of_the_users_before_ours_is_not_taken_down_in_ours(monkeypatch):
    """It was: the variable was set before Kineto's reset, which then began the thread."""
    kineto = Kineto(monkeypatch)
    kineto.prepare_trace()
    kineto.stop_trace()
    device_trace(monkeypatch, kineto)
    assert kineto.lost == []
    assert not kineto.is_on


def test_m2_a_trace_of_the_users_right_after_ours_has_its_kernels(monkeypatch):
    """It had none: CUPTI went with the next call of CUDA, and the variable before the thread."""
    kineto = Kineto(monkeypatch)
    device_trace(monkeypatch, kineto)
    assert VARIABLES[0] not in os.environ
    kineto.prepare_trace()
    kineto.call()
    kineto.stop_trace()
    kineto.call()
    assert kineto.lost == []
    assert kineto.variable_after == ["1"]  # CUPTI comes up again with the next trace only
    assert not any(thread.is_alive() for thread in kineto.threads)


def test_m2_a_thread_that_does_not_end_is_not_waited_for_long(monkeypatch):
    kineto = Kineto(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=bool))
    device_trace(monkeypatch, kineto)
    assert VARIABLES[0] not in os.environ
    assert kineto.threads[0].is_alive()
    kineto.call()


def test_m2_the_users_own_traces_are_what_they_are_without_us(tmp_path):
    def user_traces(choice: AutoSwitch) -> list[list[str]]:
        folder = tmp_path / choice.value
        loop, session = Loop(), Session(settings(folder, choice))
        before = threading.enumerate()
        results = []
        for step in range(12):
            if step == 0:
                session.describe(loop.host)
            is_traced_by_user = step in (2, 8, 10)  # ours is step 7
            with (
                torch.profiler.profile()
                if is_traced_by_user
                else contextlib.nullcontext() as user_profiler
            ):
                session.begin_step()
                loop.step(session)
                session.end_step()
            if user_profiler is not None:
                names = sorted(e.name() for e in user_profiler.profiler.kineto_results.events())
                results.append([name for name in names if name.startswith("aten::")])
        session.finish()
        assert session.guard.num_faults == 0
        assert threading.enumerate() == before
        return results

    counted = dict(KinetoStepTracker._step_dict)
    with_us = user_traces(AutoSwitch.ON)
    assert {r.step for r in of_type(tmp_path / "on", TraceRecord)} == {7}
    assert with_us == user_traces(AutoSwitch.OFF)
    assert all(with_us)
    assert dict(KinetoStepTracker._step_dict) == counted


def test_m2_a_profiler_of_the_users_that_waits_is_left_alone(tmp_path):
    """Ours was on whenever its turn came: an error in the user's code."""
    schedule = torch.profiler.schedule(wait=5, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(schedule=schedule):
        train(tmp_path, AutoSwitch.ON)
    (note,) = (r for r in of_type(tmp_path, CoverageRecord) if r.name.startswith("trace"))
    assert note.name == "trace skipped: your own profiler may start at any step"


def test_a_pytorch_that_traces_no_device_traces_none(monkeypatch):
    """It recorded two events around each operation, and no kernel, at hundreds of steps' time."""
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {ProfilerActivity.CPU})
    expected = "this PyTorch was built without the tracing of device kernels"
    assert reason_against(8, is_device=True, is_graphed=False) == expected


def settings(tmp_path: Path, choice: AutoSwitch) -> Settings:
    return Settings(rank=RANK, steps=4, directory=tmp_path, trace=choice)


def train(tmp_path: Path, choice: AutoSwitch, num_steps: int = 10) -> list[float]:
    loop, session = Loop(), Session(settings(tmp_path, choice))
    losses = []
    for _ in range(num_steps):
        if not losses:
            session.describe(loop.host)
        session.begin_step()
        losses.append(loop.step(session))
        session.end_step()
    session.finish()
    assert session.guard.num_faults == 0
    return losses


def of_type(tmp_path: Path, kind: type) -> list:
    return [r for r in read_run(tmp_path).records[0] if isinstance(r, kind)]


def test_a_session_traces_one_step_after_the_window(tmp_path):
    traced = train(tmp_path / "on", AutoSwitch.ON)
    assert traced == train(tmp_path / "off", AutoSwitch.OFF)
    steps = of_type(tmp_path / "on", StepRecord)
    assert [s.step for s in steps if StepFlag.TRACED in s.flags] == [7]
    assert [s.step for s in steps if s.is_hooked] == [3, 6]
    assert {r.step for r in of_type(tmp_path / "on", TraceRecord)} == {7}
    assert len(of_type(tmp_path / "off", StepRecord)) == 7
    notes = {r.name: r.fired for r in of_type(tmp_path / "on", CoverageRecord)}
    assert notes["trace"] == 1
    assert not torch.autograd._profiler_enabled()


def bomb() -> bytes:
    return gzip.compress(b'{"traceEvents": [' + b" " * (MAX_TRACE_NBYTES + 1) + b"]}")


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (None, "is not here; copy it beside the rank's file"),
        (b"", "damaged or cut off"),
        (lambda: gzip.compress(b'{"traceEvents": ['), "damaged or cut off"),
        (lambda: gzip.compress(b'{"traceEvents": [nonsense]}'), "damaged or cut off"),
        (lambda: gzip.compress(b'{"traceEvents": [' + b"[" * 99_999), "damaged or cut off"),
        (lambda: gzip.compress(b'{"traceEvents": [' + b"{}," * 200_002), "more than 200000 events"),
        (lambda: gzip.compress(b"{}")[:-6], "ended before the end-of-stream marker"),
        (b"no gzip at all", "Not a gzipped file"),
        (bomb, "damaged or cut off"),
    ],
)
def test_a_damaged_trace_costs_itself_alone(tmp_path, data, named):
    train(tmp_path, AutoSwitch.ON)
    (path,) = (tmp_path / "records" / "run").glob("trace-*")
    path.unlink()
    if data is not None:
        path.write_bytes(data() if callable(data) else data)
    run = read_run(tmp_path)
    (problem,) = run.problems
    assert named in problem and path.name in problem
    assert {type(r) for r in run.records[0]} >= {StepRecord, PhaseRecord, OperatorRecord}


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1],
        {"traceEvents": 7},
        {"traceEvents": [{"ph": "X", "name": MARK, "ts": 1e300, "dur": 0}]},
        {"traceEvents": [{"ph": "X", "name": MARK, "ts": "1", "dur": 0}] * 3},
    ],
)
def test_a_trace_of_another_form_is_refused_with_words(tmp_path, value):
    train(tmp_path, AutoSwitch.ON)
    (path,) = (tmp_path / "records" / "run").glob("trace-*")
    path.write_bytes(gzip.compress(json.dumps(value).encode()))
    run = read_run(tmp_path)
    remarks = [r.name for r in run.records[0] if isinstance(r, CoverageRecord) and not r.fired]
    assert run.problems or any("marks" in name for name in remarks)
    assert not any(isinstance(r, TraceRecord) for r in run.records[0])


def test_a_line_names_no_file_elsewhere(tmp_path):
    train(tmp_path, AutoSwitch.ON)
    (path,) = (tmp_path / "records" / "run").glob("trace-*")
    records = tmp_path / "records" / "run" / "rank-00000.jsonl"
    records.write_text(records.read_text().replace(path.name, "../../secret.json.gz"))
    (problem,) = read_run(tmp_path).problems
    assert "'../../secret.json.gz' is not the name of a trace" in problem


def test_a_file_of_many_traces_is_read_to_a_limit(tmp_path):
    """Each costs seconds, and a line is short."""
    train(tmp_path, AutoSwitch.ON)
    path = tmp_path / "records" / "run" / "rank-00000.jsonl"
    head, *others = path.read_text().splitlines(keepends=True)
    (line,) = (one for one in others if json.loads(one)["type"] == TracedStep.TYPE)
    file = RankFile("rank", read_trace=lambda _: [])
    file.take([head, *[line] * (MOST_TRACES + 1)])
    assert len(file.records) == MOST_TRACES
    assert file.problems == [f"rank:{MOST_TRACES + 2}: more than {MOST_TRACES} traces; skipped"]


def test_without_room_for_a_trace_the_window_is_as_without_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: str(tmp_path / "gone"))
    train(tmp_path, AutoSwitch.ON)
    notes = [r.name for r in of_type(tmp_path, CoverageRecord) if r.name.startswith("trace")]
    assert len(notes) == 1 and notes[0].startswith("trace skipped: ")
    assert {s.step for s in of_type(tmp_path, StepRecord)} == set(range(8))


def test_on_a_cpu_a_trace_has_to_be_asked_for(tmp_path):
    train(tmp_path, AutoSwitch.AUTO)
    assert of_type(tmp_path, TraceRecord) == []
    assert [s.flags for s in of_type(tmp_path, StepRecord)][3:] == [()] * 4


def test_beside_a_profiler_of_the_users_the_step_is_a_bare_one(tmp_path):
    with torch.profiler.profile() as user_profiler:
        train(tmp_path, AutoSwitch.ON)
    assert any(event.key == "aten::linear" for event in user_profiler.key_averages())
    assert of_type(tmp_path, TraceRecord) == []
    (note,) = (r for r in of_type(tmp_path, CoverageRecord) if r.name.startswith("trace"))
    assert note.name == "trace skipped: your own profiler is on"
    assert note.installed == 0


@pytest.mark.parametrize(
    ("environ", "arguments", "is_graphed", "expected"),
    [
        ({}, None, False, ""),
        ({"NSYS_PROFILING_SESSION_ID": "1"}, None, False, "Nsight Systems is profiling"),
        (
            {"CUDA_INJECTION64_PATH": "x.so"},
            None,
            False,
            "a tool in CUDA_INJECTION64_PATH is profiling",
        ),
        ({}, {"profile": True}, False, "--profile traces steps 10 to 12"),
        ({}, {"profile": False}, False, ""),
        ({}, {"profile": True, "profile_step_start": 90, "profile_step_end": 95}, False, ""),
    ],
)
def test_the_trace_stands_down_and_says_why(monkeypatch, environ, arguments, is_graphed, expected):
    if arguments is not None:
        known = {"profile_step_start": 10, "profile_step_end": 12, **arguments}
        module = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(**known))
        monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    monkeypatch.setattr(os, "environ", environ)
    with_memory(monkeypatch, 80 << 30)
    assert reason_against(8, is_device=True, is_graphed=is_graphed) == expected


def with_memory(monkeypatch, free_nbytes: int) -> None:
    """A device with so much free, and a profiler that traces devices."""
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {ProfilerActivity.CUDA})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free_nbytes, 80 << 30))


@pytest.mark.parametrize(
    ("cuda", "hip", "expected"),
    [
        ("12.4", None, "a trace breaks CUDA graphs before CUDA 12.6, and this is 12.4"),
        ("12.6", None, ""),
        (None, "6.2.4", "the effect of a trace on graphs of ROCm 6.2.4 is untested"),
    ],
)
def test_graphs_are_said_to_break_on_their_own_platform(monkeypatch, cuda, hip, expected):
    with_memory(monkeypatch, 80 << 30)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert reason_against(8, is_device=True, is_graphed=True) == expected


@pytest.mark.parametrize(
    ("free_nbytes", "is_device", "expected"),
    [
        ((3 << 29) - 1, True, f"1.5 GiB {TOO_FEW}"),
        (3 << 29, True, ""),
        (200 << 20, True, f"200.0 MiB {TOO_FEW}"),
        (0, False, ""),
    ],
)
def test_a_full_device_is_not_traced(monkeypatch, free_nbytes, is_device, expected):
    with_memory(monkeypatch, 80 << 30)
    monkeypatch.setenv("FORERUN_TEST_FREE_NBYTES", str(free_nbytes))
    with installed():
        assert reason_against(8, is_device=is_device, is_graphed=False) == expected
