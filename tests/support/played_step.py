"""A step of nested operators on a device in virtual time, through the real recorder.

What the host needs for a call, and the device for a kernel, is planted; so is what hooks take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from device_clock import LAUNCH_S, Clock
from device_streams import Device, Event, install_device, uninstall_device
from device_truth import Truth

from forerun.calib.records.record_kinds import OperatorRecord, Record
from forerun.calib.workload.operators import OperatorKind, Phase
from forerun.hooks.sensors.recorder import Recorder, backward_mark
from forerun.hooks.sensors.step_log import Site, StepLog
from forerun.hooks.sensors.stopwatch import DeviceStopwatch

KINDS = (OperatorKind.RESIDUAL, OperatorKind.POSITION, OperatorKind.LINEAR_FC1)
LAYER, POSITION, LINEAR = range(3)
SITES = tuple(Site(kind=kind) for kind in KINDS)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs in seconds: of a call on the host, of its kernel, of our hooks at a mark."""

    call_s: float
    kernel_s: float
    before_mark_s: float = 0.0
    after_end_s: float = 0.0


@dataclass
class Play:
    """A step of nested operators on a device, through the real recorder."""

    costs: Costs
    drift_frac: float = 0.0
    clock: Clock = field(default_factory=lambda: Clock(Truth()))
    host_s: dict[tuple[int, Phase], float] = field(default_factory=lambda: defaultdict(float))
    busy_s: dict[tuple[int, Phase], float] = field(default_factory=lambda: defaultdict(float))
    """Seconds charged to the host and the device for the model's calls, by site and phase."""
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = Device(self.clock)
        install_device(self.device)
        self.spans: list[tuple[int, int]] = []
        self.is_capturing = False
        drift = 1.0 + self.drift_frac

        class Read(Event):
            def elapsed_time(self, end_event: Event) -> float:
                return super().elapsed_time(end_event) * drift

        self.recorder = Recorder(
            DeviceStopwatch(
                lambda: Read(enable_timing=True),
                stream_key=self.stream_key,
                current_stream=lambda: self.device.current,
                is_capturing=lambda: self.is_capturing,
                clock=lambda: round(self.clock.host_s * 1e9),
            )
        )

    def stream_key(self) -> int:
        """Return the stream's key; charge the host for our work before each mark."""
        self.clock.host_s += self.costs.before_mark_s
        return self.device.current.cuda_stream

    @contextmanager
    def step(self) -> Iterator[StepLog]:
        log = self.recorder.open(StepLog(step=0, window=0, sites=SITES))
        try:
            yield log
            self.recorder.close()
            self.clock.synchronize()
            assert log.resolve()
        finally:
            uninstall_device()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.recorder.begin_phase(name)
        yield
        self.recorder.end_phase(name)

    def call(self, key: tuple[int, Phase]) -> None:
        self.clock.host_s += self.costs.call_s
        self.clock.launch(self.device.line, self.costs.kernel_s)
        self.host_s[key] += self.costs.call_s + LAUNCH_S
        self.busy_s[key] += self.costs.kernel_s

    def operator(self, site: int, num_calls: int, inner: Callable[[], None] | None = None) -> None:
        span = self.recorder.begin_span(site)
        self.call((site, Phase.FORWARD))
        if inner is not None:
            inner()
        for _ in range(num_calls - 1):
            self.call((site, Phase.FORWARD))
        at = self.recorder.stopwatch.mark()
        self.clock.host_s += self.costs.after_end_s  # shapes are read, the graph is followed
        self.recorder.end_span(span, at, ((8, 1, 8), (8, 1, 16)), 2)
        self.spans.append((site, span))

    def layer(self) -> None:
        def nested() -> None:
            self.operator(POSITION, 3, inner=lambda: self.operator(LINEAR, 2))
            self.operator(LINEAR, 2)
            self.call((LAYER, Phase.FORWARD))
            self.operator(LINEAR, 2)

        self.operator(LAYER, 3, inner=nested)

    def backward(self, log: StepLog) -> None:
        """Run the linears' backward passes in the engine's order."""
        for site, span in reversed(self.spans):
            if site == LINEAR:
                self.recorder.mark_backward(log, [backward_mark(span, is_begin=True)])
                for _ in range(2):
                    self.call((LINEAR, Phase.BACKWARD))
                self.recorder.mark_backward(log, [backward_mark(span, is_begin=False)])


def operators(records: Sequence[Record], phase: Phase) -> dict[int, list[OperatorRecord]]:
    result = defaultdict(list)
    for record in records:
        if isinstance(record, OperatorRecord) and record.phase is phase:
            result[KINDS.index(record.kind)].append(record)
    return result
