"""Marks of a window on a device by layout, and their cost (``python benchmarks/costs/marks.py``).

Schedules of large models are replayed through the recorder, the budget and the ledger of a session,
with events that take 1 us to record and 2 us to read.  Step times are those of public runs on H100
(Megatron-Bridge's performance page: Llama 3 8B, 14,079 tokens/s a GPU; 70B, 1,619).  The host time
of a mark is measured here, on real modules.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from forerun.benchmarks.costs.hooks import NUM_LAYERS, NUM_REPEATS, Layer, best_ns, recorded
from forerun.benchmarks.markdown_text import markdown_head, markdown_row
from forerun.calib.workload import Collective, GroupRole, OperatorKind
from forerun.hooks.process import Guard
from forerun.hooks.recording import WindowEnd, WindowPlan, samples
from forerun.hooks.sensors import (
    BACKWARD,
    FORWARD,
    MAX_EVENTS,
    MAX_MARKS,
    MAX_WINDOW_MARKS,
    DeviceStopwatch,
    ModuleHooks,
    Recorder,
    Site,
    StepLog,
    TransferKind,
    backward_mark,
)
from forerun.hooks.session import Ledger, MarkBudget

RECORD_S, READ_S = 1e-6, 2e-6
SITES = 11
"""Operators of a dense layer: four linears, attention, its rotary embedding, two norms, the
activation, dropout with the residual, and the layer."""
WINDOW = 20
MOST_STEPS = 400
RAW = ((8, 1, 4), (8, 1, 6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One rank's part of a step; ``calls`` are tensor-parallel collectives per layer and pass."""

    name: str
    step_s: float
    num_layers: int
    num_microbatches: int
    num_chunks: int = 1
    num_sync_calls: int = 0
    num_async_calls: int = 0
    num_stage_calls: int = 0
    num_buckets: int = 0


_TP = {"num_sync_calls": 3, "num_async_calls": 2}
LAYOUTS = (
    Layout(name="8B TP1 DP8, 16 mb", step_s=9.3, num_layers=32, num_microbatches=16,
           num_buckets=200),
    Layout(name="8B TP2 DP4, 32 mb", step_s=9.3, num_layers=32, num_microbatches=32,
           num_buckets=100, **_TP),
    Layout(name="70B TP8 PP1, 64 mb", step_s=40.5, num_layers=80, num_microbatches=64,
           num_buckets=200, **_TP),
    Layout(name="70B TP8 PP4, 32 mb", step_s=5.1, num_layers=20, num_microbatches=32,
           num_stage_calls=2, num_buckets=50, **_TP),
    Layout(name="70B TP4 PP8 VP5, 128 mb", step_s=20.2, num_layers=10, num_microbatches=128,
           num_chunks=5, num_stage_calls=2, num_buckets=50, **_TP),
    Layout(name="1.3B TP1 DP8, 1 mb", step_s=0.125, num_layers=24, num_microbatches=1,
           num_buckets=33),
)  # fmt: skip


def burn(time_s: float) -> None:
    """Busy-wait for ``time_s`` seconds."""
    end_s = time.perf_counter() + time_s
    while time.perf_counter() < end_s:
        pass


class CostlyEvent:
    """An event with the cost of a device's; it completes when it is recorded."""

    num_made = 0
    clock_ms = 0.0

    def __init__(self) -> None:
        CostlyEvent.num_made += 1
        self.at_ms = 0.0

    def record(self, stream: object = None) -> None:
        """Queue the event; the device works 50 us between two of them."""
        CostlyEvent.clock_ms += 0.05
        self.at_ms = CostlyEvent.clock_ms
        burn(RECORD_S)

    def query(self) -> bool:
        """Return True: the device keeps up with the host here."""
        return True

    def elapsed_time(self, end_event: CostlyEvent) -> float:
        """Return milliseconds to another event."""
        burn(READ_S)
        return end_event.at_ms - self.at_ms


class ItemCollector:
    """Collects the items passed to a writer."""

    num_dropped = 0

    def __init__(self) -> None:
        self.items: list[Any] = []

    def put(self, item: Any) -> bool:
        """Store the item."""
        self.items.append(item)
        return True


def mark_cost_s() -> float:
    """Return seconds of one mark with its event, in real modules, forward and backward."""
    guard = Guard(lambda: None)
    recorder = Recorder(DeviceStopwatch(CostlyEvent, stream_key=lambda: 0))
    model = torch.nn.Sequential(*(Layer() for _ in range(NUM_LAYERS)))
    hidden = torch.ones(2, 2, 4, requires_grad=True)
    put_on, take_off = recorded(ModuleHooks([model], recorder, guard), recorder)
    action: Callable[[], object] = lambda: model(hidden * 1).sum().backward()  # noqa: E731
    bare = hooked = float("inf")
    num_marks = 0
    for _ in range(NUM_REPEATS):
        bare = min(bare, best_ns(action))
        put_on()
        hooked = min(hooked, best_ns(action))
        take_off()
    put_on()
    action()
    log = recorder.close()
    assert log is not None
    num_marks = max(log.marks)
    return (hooked - bare) * 1e-9 / num_marks


def kind(role: GroupRole, peer: int = -1) -> TransferKind:
    """Return a kind of transfer."""
    return TransferKind(
        collective=Collective.ALL_GATHER, role=role, group=f"{role.value}#1", ranks=(0, 1),
        peer=peer,
    )  # fmt: skip


class Player:
    """Replays the steps of a layout through the real recorder."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        CostlyEvent.num_made = 0
        kinds = [OperatorKind.LINEAR_FC1] * SITES
        self.sites = tuple(
            Site(kind=one, layer=layer) for layer in range(layout.num_layers) for one in kinds
        )
        self.recorder = Recorder(DeviceStopwatch(CostlyEvent, stream_key=lambda: 0))
        self.budget = MarkBudget(num_sites=len(self.sites))
        passes = layout.num_microbatches * layout.num_chunks
        order = [n // layout.num_chunks for n in range(passes)]
        self.microbatches = tuple(order)

    def step(self, number: int, num_hooked: int, num_steps: int) -> StepLog:
        """Return one hooked step, closed."""
        layout, watch = self.layout, self.recorder.stopwatch
        chosen = samples(self.microbatches, num_hooked)
        chosen = self.budget.chosen(chosen, num_hooked, num_steps, layout.step_s)
        log = self.recorder.open(
            StepLog(
                step=number, window=0, sites=self.sites, samples=chosen, samples_transfers=True,
                frequent=self.budget.frequent, largest_pass=self.budget.largest_pass,
                max_marks=min(MAX_MARKS, MAX_WINDOW_MARKS // num_steps, watch.num_available),
            )
        )  # fmt: skip
        self.recorder.begin_phase("forward-backward")
        for place in range(len(self.microbatches)):
            self.stage_calls(log)
            self.one_pass(log, FORWARD, place)
            self.stage_calls(log)
            self.one_pass(log, BACKWARD, place)
        self.recorder.end_phase("forward-backward")
        closed = self.recorder.close()
        assert closed is log
        level = self.budget.level(num_steps, 1, layout.step_s)
        self.budget.learn(log, is_thin=level > 0)
        return log

    def stage_calls(self, log: StepLog) -> None:
        """Record the messages between stages, outside of the passes."""
        for peer in range(self.layout.num_stage_calls):
            self.call(log, kind(GroupRole.PP, peer), is_async=True)

    def one_pass(self, log: StepLog, name: str, place: int) -> None:
        """Record a forward or backward pass of one chunk."""
        layout, recorder = self.layout, self.recorder
        recorder.begin_phase(name)
        for layer in range(layout.num_layers // layout.num_chunks):
            for site in range(SITES):
                if name == FORWARD:
                    span = recorder.begin_span(layer * SITES + site)
                    if span >= 0:
                        recorder.end_span(span, recorder.stopwatch.mark(), RAW, 2)
                elif log.is_sampling:
                    for is_begin in (True, False):
                        recorder.mark_backward(log, [backward_mark(0, is_begin=is_begin)])
            for count, is_async in (
                (layout.num_sync_calls, False),
                (layout.num_async_calls, True),
            ):
                for _ in range(count):
                    self.call(log, kind(GroupRole.TP), is_async=is_async)
        if name == BACKWARD and place == len(self.microbatches) - 1:
            for _ in range(layout.num_buckets):
                self.call(log, kind(GroupRole.DP), is_async=True)
        recorder.end_phase(name)

    def call(self, log: StepLog, what: TransferKind, *, is_async: bool) -> None:
        """Record a collective and its wait."""
        recorder = self.recorder
        transfer = recorder.add_transfer(log.kind_number(what), 1 << 20)
        recorder.begin_wait(transfer)
        recorder.end_wait(transfer, is_done=not is_async)
        if is_async:
            recorder.begin_wait(transfer)
            recorder.end_wait(transfer)


def replay_row(layout: Layout, mark_s: float) -> list[str]:
    """Return a row of the table."""
    player, collector = Player(layout), ItemCollector()
    ledger = Ledger(collector, Guard(lambda: None), lambda *_, **__: None)  # pyright: ignore
    plan = WindowPlan(steps=WINDOW, num_warmup=0)
    marks: list[int] = []
    late = 0
    for number in range(WINDOW):
        if plan.at(number).is_hooked:
            log = player.step(number, len(marks), plan.num_hooked)
            marks.append(max(log.marks))
            ledger.add_log(log)
        if number == WINDOW - 1:
            ledger._first = 0
            ledger.end_window(None)
        ledger.drain(step_s=layout.step_s)
    while not any(isinstance(item, WindowEnd) for item in collector.items) and late < MOST_STEPS:
        ledger.drain(step_s=layout.step_s)
        late += 1
    end = next(item for item in collector.items if isinstance(item, WindowEnd))
    num_steps = sum(isinstance(item, StepLog) for item in collector.items)
    num_timed = sum(log.num_pass_marks > 0 for log in collector.items if isinstance(log, StepLog))
    made_s = sum(marks) * mark_s
    window_s = WINDOW * layout.step_s
    return [
        layout.name,
        f"{layout.step_s:g} s",
        f"{sum(marks) / len(marks):,.0f} ({max(marks):,})",
        f"{num_steps} of {len(marks)}, {num_timed} with operators",
        str(late),
        f"{CostlyEvent.num_made:,}",
        f"{made_s / window_s:.2%} ({max(marks) * mark_s / layout.step_s:.2%})",
        f"{(sum(marks) * READ_S) / window_s:.2%}",
        str(end.record.num_dropped),
    ]


def main() -> None:
    """Print the table."""
    mark_s = mark_cost_s()
    print(f"a mark of an operator takes {mark_s * 1e6:.2f} us here, with 1 us for its event; "
          f"window of {WINDOW} steps, at most {MAX_EVENTS:,} events\n")  # fmt: skip
    print(markdown_head([
        "layout", "step", "marks a hooked step (most)", "hooked steps read",
        "steps to the answer", "events", "made, of the window (of one step)", "read", "dropped",
    ]))  # fmt: skip
    for layout in LAYOUTS:
        print(markdown_row(replay_row(layout, mark_s)))


if __name__ == "__main__":
    main()
