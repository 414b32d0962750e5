"""Cost of the hooks per call in nanoseconds (``python benchmarks/costs/hooks.py``).

Bare and hooked calls alternate in short slices, and only the fastest slices of both are compared,
so that other load on the machine matters little.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from forerun.benchmarks.costs.idle_session import idle_session
from forerun.hooks.control import CALM_PAUSE_S
from forerun.hooks.process import Guard, Host, StoreLink, Votes, WeakHost
from forerun.hooks.sensors import (
    MAX_MARKS,
    DeviceStopwatch,
    HostStopwatch,
    ModuleHooks,
    ProcessGroupHooks,
    Recorder,
    StepLog,
    TimerHooks,
)
from forerun.hooks.session import Instruments, Session

NUM_CALLS = 4
NUM_REPEATS = 300
NUM_LAYERS = 5
Action = Callable[[], object]


class Layer(nn.Module):
    """Two linear layers under names that are hooked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(4, 4)
        self.linear_fc2 = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the second layer's output."""
        return self.linear_fc2(self.linear_fc1(hidden))


class Dispatcher:
    """A method that copies rows, as in the token dispatchers of expert layers."""

    def dispatch_postprocess(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows."""
        return rows


class QuietTimers:
    """Megatron's timers below their log level: all names share one no-op timer."""

    def __call__(self, name: str) -> QuietTimers:
        """Return the no-op timer."""
        return self

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


class Event:
    """An event of a device that has always finished."""

    def record(self, stream: object = None) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True."""
        return True

    def elapsed_time(self, end_event: object) -> float:
        """Return one millisecond."""
        return 1.0


def best_ns(action: Action) -> float:
    """Return nanoseconds of the fastest of a few calls."""
    best = float("inf")
    for _ in range(NUM_CALLS):
        begin = time.perf_counter_ns()
        action()
        best = min(best, time.perf_counter_ns() - begin)
    return best


def report(name: str, action: Action, put_on: Action, take_off: Action, *, per: int = 1) -> None:
    """Print the fastest bare and hooked slices and their difference, per unit."""
    bare = hooked = float("inf")
    for _ in range(NUM_REPEATS):
        bare = min(bare, best_ns(action))
        put_on()
        hooked = min(hooked, best_ns(action))
        take_off()
    bare, hooked = bare / per, hooked / per
    print(f"{name:48} {bare:9.0f} bare {hooked:9.0f} hooked {hooked - bare:9.0f} extra")


def report_wrapper_call(name: str, action: Action, *, per: int = 1) -> None:
    """Print the time of one call of our own."""
    taken = min(best_ns(action) for _ in range(NUM_REPEATS)) / per
    print(f"{name:48} {taken:9.0f}")


def recorded(
    hooks: ModuleHooks | ProcessGroupHooks, recorder: Recorder, *, max_marks: int = MAX_MARKS
) -> tuple[Action, Action]:
    """Return actions that put the hooks on with a recording step, and that take both off."""

    def put_on() -> None:
        hooks.install()
        sites = getattr(hooks, "sites", ())
        recorder.open(StepLog(step=0, window=0, sites=sites, max_marks=max_marks))

    def take_off() -> None:
        hooks.remove()
        recorder.close()

    return put_on, take_off


def report_modules(recorder: Recorder, guard: Guard) -> None:
    """Report operators in a chain, as in a model; then everything that is put on for one step."""
    model = nn.Sequential(*(Layer() for _ in range(NUM_LAYERS)))
    hidden = torch.ones(2, 2, 4, requires_grad=True)
    chain = recorded(ModuleHooks([model], recorder, guard), recorder)

    def forward() -> None:
        with torch.no_grad():
            model(hidden)

    per = 2 * NUM_LAYERS
    report("module forward", forward, *chain, per=per)
    both: Action = lambda: model(hidden * 1).sum().backward()  # noqa: E731
    report("module forward and backward", both, *chain, per=per)
    experts = nn.Module()
    experts.token_dispatcher = dispatcher = Dispatcher()
    methods = recorded(ModuleHooks([experts], recorder, guard), recorder)
    call: Action = lambda: dispatcher.dispatch_postprocess(hidden)  # noqa: E731
    report("dispatcher method", call, *methods)
    instruments = Instruments(WeakHost(Host(models=(model,))), guard)

    def step() -> None:
        instruments.put_on(step=0, window=0)
        instruments.take_off()

    report_wrapper_call(f"put on and take off, {per} modules", step)


def report_groups(recorder: Recorder, guard: Guard) -> None:
    """Report collectives of one rank over gloo: all of the time is the host's."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(4)
    calls = recorded(ProcessGroupHooks(recorder, guard), recorder)

    def coalesced() -> None:
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(tensor)
        manager.wait()

    cases: tuple[tuple[str, Action], ...] = (
        ("synchronous collective", lambda: dist.all_reduce(tensor)),
        ("asynchronous collective and wait", lambda: dist.all_reduce(tensor, async_op=True).wait()),
        ("coalesced collective and wait", coalesced),
    )
    for name, action in cases:
        report(name, action, *calls)
    full = recorded(ProcessGroupHooks(recorder, guard), recorder, max_marks=0)
    report("synchronous collective, no space for marks", cases[0][1], *full)
    dist.destroy_process_group()
    # The fake backend sends nothing, so only the call itself is timed.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    report("send and wait", lambda: dist.isend(tensor, 1).wait(), *calls)
    dist.destroy_process_group()


def report_marks(recorder: Recorder, guard: Guard) -> None:
    """Report phases, and the marks of a device whose events are free."""
    config = SimpleNamespace(timers=(timers := QuietTimers()))
    hooks = TimerHooks(recorder, guard)

    def phase() -> None:
        timers("forward-compute").start()
        timers("forward-compute").stop()

    def put_on() -> None:
        hooks.install([(config, "timers")])
        recorder.open(StepLog(step=0, window=0, sites=()))

    def take_off() -> None:
        hooks.remove()
        recorder.close()

    report("phase", phase, put_on, take_off)
    watch = DeviceStopwatch(Event, stream_key=lambda: 1, current_stream=object)
    watch.begin_step()
    marks = 100
    report_wrapper_call(
        "device mark, stand-in event", lambda: [watch.mark() for _ in range(marks)], per=marks
    )

    def read() -> None:
        watch.begin_step()
        for _ in range(marks):
            watch.mark()
        readings = watch.end_step()
        while not readings.is_ready():
            pass

    report_wrapper_call("device mark and its reading", read, per=marks)


def report_timer() -> None:
    """Report the step timer after the window, without and with the pipe of the last rank."""
    for name, is_last in (("step after the window", False), ("the same on the last rank", True)):
        with idle_session(is_last=is_last) as session:

            def step(session: Session = session) -> None:
                session.begin_step()
                session.end_step()
                time.sleep(0.0002)  # Lets the reader keep up, as it does during real steps.

            for _ in range(10):
                step()
            bare = min(best_ns(lambda: time.sleep(0.0002)) for _ in range(NUM_REPEATS))
            taken = min(best_ns(step) for _ in range(NUM_REPEATS))
            print(f"{name:48} {taken - bare:9.0f}")


def report_look() -> None:
    """Report processor time of one poll of the store for an order, in a thread during training."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    link = StoreLink(server, "look")
    taken = []
    for _ in range(60):
        begin_s = time.thread_time()
        Votes(link.connect(), "order", num_ranks=8).proposal(0)
        taken.append(time.thread_time() - begin_s)
    print(f"{f'a look for orders, every {CALM_PAUSE_S:g} s':40s} {median(taken) * 1e9:10,.0f}")


def main() -> None:
    """Print the extra time of each kind of hook."""
    torch.set_num_threads(1)
    recorder, guard = Recorder(HostStopwatch()), Guard()
    print("nanoseconds")
    report_modules(recorder, guard)
    report_groups(recorder, guard)
    report_marks(recorder, guard)
    report_timer()
    report_look()
    assert guard.num_faults == 0


if __name__ == "__main__":
    main()
