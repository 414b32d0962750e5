"""Device work in a Kineto trace: kernels, their launches, and which are matrix products.

The events are those of PyTorch's profiler, read in the process or from its Chrome trace; their
categories have Kineto's names.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..workload.collectives import Collective

CPU_OP = "cpu_op"
USER_RANGE = "user_annotation"
KERNEL = "kernel"
DEVICE_WORK = frozenset({KERNEL, "gpu_memcpy", "gpu_memset"})
RUNTIME = frozenset(
    f"{kind}_{level}"
    for kind in ("cuda", "hip", "xpu", "mtia", "privateuse1")
    for level in ("runtime", "driver")
)
_ACCELERATED = re.compile(r"(kernel|gpu|cuda|hip|xpu|mtia|hpu|privateuse1)(_|$)")
"""Categories of Kineto's accelerators (pytorch/kineto, libkineto/src/ActivityType.cpp)."""
MESSAGE_OP = "record_param_comms"
SHAPES = "Input Dims"
_ATEN = "aten::"
_PRODUCT_OPS = frozenset(
    f"{_ATEN}{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_grouped_mm")
)
# Kernel names of cuBLAS, cuBLASLt (nvjet on Hopper and later), CUTLASS and rocBLAS (Cijk).
_PRODUCT_KERNEL = re.compile(r"(?<!fb)gemm|nvjet|cutlass|xmma|wgmma|^Cijk", re.IGNORECASE)
_SPLIT_SUM = re.compile(
    r"split_?k_?reduce|reduce_?splitk|\breduce_(bf16|fp8_in_bf16_out)_cuda", re.IGNORECASE
)
"""Split-K sums of cuBLAS, and sums after Transformer Engine's split products (userbuffers.cu)."""
# Attention kernels are built from CUTLASS and have its types in their names.
_ATTENTION_KERNEL = re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)
_COLLECTIVES = (
    ("allreduce", Collective.ALL_REDUCE),
    ("allgather", Collective.ALL_GATHER),
    ("reducescatter", Collective.REDUCE_SCATTER),
    ("alltoall", Collective.ALL_TO_ALL),
    ("broadcast", Collective.BROADCAST),
    ("send", Collective.SEND),
    ("recv", Collective.RECV),
)
"""Collectives by the beginning of their library name, without underscores."""
_TRANSFER_KERNEL = re.compile(
    r"[nr]ccl|mscclpp|multimem_(?=all|reduce)|(one|two)_shot_all_?reduce|cross_device_reduce"
    r"|userbuffers_|nvshmem",
    re.IGNORECASE,
)
"""Kernels of NCCL and RCCL, of PyTorch's symmetric memory and of serving frameworks; Transformer
Engine's userbuffers, and NVSHMEM.
"""
_EXCHANGE_KERNEL = re.compile(r"(deep|hybrid)_ep::(?![\w:]*layout)[\w:]*(dispatch|combine)")
"""DeepEP's and HybridEP's transfers of experts' rows; ``layout``, which counts them, is none."""
_USERBUFFERS = (
    (re.compile(r"userbuffers_\w+_ag"), Collective.ALL_GATHER),
    (re.compile(r"userbuffers_\w+_rs"), Collective.REDUCE_SCATTER),
    (re.compile(r"userbuffers_\w+_sum"), Collective.ALL_REDUCE),
)
_LATE_NODE = "_RegisterDelayedWgradForExperts"
"""Autograd node that computes the weight gradients deferred by linears, on its own stream
(Megatron-LM core_v0.18.0 and later, moe_layer.py, --overlap-dispatch-backward-with-experts-wgrad).
"""
_IN_KERNEL = re.compile(
    r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast)|cross_device_reduce",
    re.IGNORECASE,
)
_WRAPPERS = ("autograd::", "torch::autograd", "c10d::", "torch::jit")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """One span of a trace.

    ``number`` identifies a host operation, ``link`` is the number of the operation around a launch
    (0 if unknown), ``correlation`` is shared by a launch and its work on the device.
    """

    name: str
    category: str
    start_ns: int
    duration_ns: int
    thread: int = 0
    number: int = 0
    link: int = 0
    correlation: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def end_ns(self) -> int:
        """First nanosecond after the span."""
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCollective:
    """Collective as its kernel reports it; ``group`` has the group's description and name."""

    collective: Collective
    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedWork:
    """One kernel or copy; on a CPU, one operation of the framework.

    ``launched_ns`` is when the host launched it, ``call`` the host operation around it.
    ``is_whole`` means that this call has at most one product; a library's own autograd node may
    have several.  ``is_late`` means that earlier operators deferred it, whichever operator is open
    around it.
    """

    name: str
    start_ns: int
    duration_ns: int
    launched_ns: int
    call: int = 0
    is_product: bool = False
    is_whole: bool = True
    is_late: bool = False
    message: TracedCollective | None = None


def accelerator_kind(events: Iterable[TraceEvent]) -> str:
    """Return the kind of accelerator that was active (cuda, hip, xpu, ...); empty if there is none.

    >>> kinds = (("gemm", KERNEL), ("hipLaunchKernel", "cuda_runtime"), ("aten::mm", CPU_OP))
    >>> events = [TraceEvent(name=n, category=c, start_ns=0, duration_ns=1) for n, c in kinds]
    >>> accelerator_kind(events), accelerator_kind(events[:1]), accelerator_kind(events[2:])
    ('hip', 'kernel', '')
    """
    kinds: dict[str, None] = {}
    for event in events:
        if category := _ACCELERATED.match(event.category):
            is_hip = category[1] == "cuda" and event.name.startswith("hip")
            kinds["hip" if is_hip else category[1]] = None
    named = [kind for kind in kinds if kind not in ("kernel", "gpu")]
    return "hip" if "hip" in named else next(iter((*named, *kinds)), "")


def collective_named(text: str) -> Collective:
    """Return the collective that PyTorch's traces and its flight recorder call ``text``.

    >>> [collective_named(name).value for name in ("nccl:_all_gather_base", "nccl:send 0->1")]
    ['all_gather', 'send']
    >>> collective_named("_reduce_scatter_base"), collective_named("nccl:coalesced")
    (<Collective.REDUCE_SCATTER: 'reduce_scatter'>, <Collective.OTHER: 'other'>)
    """
    name = text.rpartition(":")[2].replace("_", "").lower()
    return next((kind for start, kind in _COLLECTIVES if name.startswith(start)), Collective.OTHER)


def group_named(details: Mapping[str, object]) -> str:
    """Return the description and name of a transfer's group, "" if the details do not name it.

    >>> group_named({"Process Group Description": "dp", "Process Group Name": "3"}), group_named({})
    ('dp#3', '')
    """
    if "Process Group Name" not in details:
        return ""
    return f"{details.get('Process Group Description', '')}#{details['Process Group Name']}"


def kernel_collective(name: str) -> Collective | None:
    """Return the collective in a kernel's name, ``OTHER`` if unclear, None if it is no transfer.

    Send and receive share one kernel, which all-to-all uses as well.

    >>> kernel_collective("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    <Collective.ALL_GATHER: 'all_gather'>
    >>> kernel_collective("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)")
    <Collective.OTHER: 'other'>
    >>> kernel_collective("void multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)")
    <Collective.ALL_REDUCE: 'all_reduce'>
    >>> kernel_collective("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)")
    <Collective.ALL_TO_ALL: 'all_to_all'>
    >>> kernel_collective("void at::native::reduce_kernel<512, 1>()")
    """
    if _EXCHANGE_KERNEL.search(name):
        return Collective.ALL_TO_ALL
    if not _TRANSFER_KERNEL.search(name):
        return None
    name_match = _IN_KERNEL.search(name)
    if name_match is None:
        named = (kind for pattern, kind in _USERBUFFERS if pattern.search(name))
        return next(named, Collective.OTHER)
    return collective_named(name_match[1]) if name_match[1] else Collective.ALL_REDUCE


def work_of(events: Sequence[TraceEvent]) -> list[TracedWork]:
    """Return the device's work in launch order, or the host's if the device had none."""
    work = device_work(events) or _host_work(events)
    return sorted(work, key=lambda item: (item.launched_ns, item.start_ns))


def busy_ns(work: Iterable[TracedWork]) -> int:
    """Return the time in which any of the work ran; work on several streams at once counts once.

    >>> begins = (0, 5, 20)
    >>> busy_ns(TracedWork(name="", start_ns=n, duration_ns=9, launched_ns=0) for n in begins)
    23
    """
    total_ns = end_ns = 0
    for begin_ns, done_ns in sorted((w.start_ns, w.start_ns + w.duration_ns) for w in work):
        total_ns += max(0, done_ns - max(begin_ns, end_ns))
        end_ns = max(end_ns, done_ns)
    return total_ns


def num_products(work: Sequence[TracedWork]) -> int:
    """Return the number of products."""
    return len(_product_ends(work))


def _product_ends(work: Sequence[TracedWork]) -> list[int]:
    """Return the end of each product: the position after the last work of its call.

    If one call has several products, each ends after the sum of its own parts.
    """
    ends: list[int] = []
    for position, item in enumerate(work):
        is_same = bool(ends) and work[ends[-1] - 1].call == item.call
        is_sum = is_same and ends[-1] == position and _SPLIT_SUM.search(item.name)
        if is_sum or (is_same and item.call and item.is_whole):
            ends[-1] = position + 1
        elif item.is_product:
            ends.append(position + 1)
    return ends


def products_of(work: Sequence[TracedWork]) -> list[Sequence[TracedWork]]:
    """Return each product with the work before it; work after the last one belongs to that one."""
    ends = _product_ends(work)
    ends = [*ends[:-1], len(work)] if ends else []
    return [work[begin:end] for begin, end in zip((0, *ends), ends, strict=False)]


def device_work(
    events: Sequence[TraceEvent],
    categories: frozenset[str] = DEVICE_WORK,
) -> list[TracedWork]:
    """Return the device's work in event order, without work whose launch is unknown."""
    launches = Launches(events)
    traced_work = []
    for event in events:
        if event.category not in categories:
            continue
        launch, call = launches.of(event)
        if call is None and launch is None:
            continue
        traced_work.append(
            TracedWork(
                name=event.name,
                start_ns=event.start_ns,
                duration_ns=event.duration_ns,
                launched_ns=_launch_ns(launch, call),
                call=call.number if call else 0,
                is_product=event.category == KERNEL and _is_product(event.name, call),
                is_whole=call is None or call.name.startswith(_ATEN),
                is_late=call is not None and call.name.startswith(_LATE_NODE),
                message=_message(event, call),
            )
        )
    return traced_work


def _launch_ns(launch: TraceEvent | None, call: TraceEvent | None) -> int:
    """Return the launch time by the operations' clock; that of launches may be some us off."""
    if call is None:
        return launch.start_ns if launch is not None else 0
    if launch is None:
        return call.start_ns
    return max(call.start_ns, min(launch.start_ns, call.end_ns))


def _is_product(name: str, call: TraceEvent | None) -> bool:
    if _SPLIT_SUM.search(name):
        return False
    if call is not None and call.name in _PRODUCT_OPS:
        return True
    return bool(_PRODUCT_KERNEL.search(name)) and not _ATTENTION_KERNEL.search(name)


def _message(event: TraceEvent, call: TraceEvent | None) -> TracedCollective | None:
    details = event.details
    if "Collective name" not in details and call is not None and call.name == MESSAGE_OP:
        details = call.details
    if "Collective name" in details:
        return TracedCollective(
            collective=collective_named(str(details["Collective name"])), group=group_named(details)
        )
    collective = kernel_collective(event.name) if event.category == KERNEL else None
    return None if collective is None else TracedCollective(collective=collective, group="")


def _host_work(events: Sequence[TraceEvent]) -> list[TracedWork]:
    """Return the framework's outermost operations on each thread, which do not overlap."""
    ends: dict[int, int] = {}
    traced_work = []
    for event in sorted(_operations(events), key=_outer_first):
        if event.start_ns < ends.get(event.thread, event.start_ns):
            continue
        ends[event.thread] = event.end_ns
        traced_work.append(
            TracedWork(
                name=event.name,
                start_ns=event.start_ns,
                duration_ns=event.duration_ns,
                launched_ns=event.start_ns,
                call=event.number,
                is_product=event.name in _PRODUCT_OPS,
            )
        )
    return traced_work


def _operations(events: Iterable[TraceEvent]) -> Iterable[TraceEvent]:
    return (
        e
        for e in events
        if e.category == CPU_OP and "::" in e.name and not e.name.startswith(_WRAPPERS)
    )


def operations_by_thread(
    events: Iterable[TraceEvent], categories: frozenset[str] = frozenset({CPU_OP})
) -> dict[int, list[TraceEvent]]:
    """Group the host's operations, or events of ``categories``, by thread, parents first."""
    threads: dict[int, list[TraceEvent]] = {}
    for event in events:
        if event.category in categories:
            threads.setdefault(event.thread, []).append(event)
    return {thread: sorted(inside, key=_outer_first) for thread, inside in threads.items()}


def _outer_first(event: TraceEvent) -> tuple[int, int]:
    return event.start_ns, -event.duration_ns


class Nesting:
    """Nesting of the host's events, by thread and time, for traces without links."""

    def __init__(self, threads: Mapping[int, list[TraceEvent]]) -> None:
        self.threads = threads
        self._starts = {t: [e.start_ns for e in inside] for t, inside in threads.items()}
        self.parents = {t: _parents(inside) for t, inside in threads.items()}
        """Position of the event around each event of a thread; -1 if there is none."""

    def around(self, launch: TraceEvent) -> TraceEvent | None:
        """Return the innermost event around a launch, on its thread; None if there is none."""
        inside = self.threads.get(launch.thread, ())
        at = bisect_right(self._starts.get(launch.thread, ()), launch.start_ns) - 1
        while at >= 0 and inside[at].end_ns < launch.start_ns:
            at = self.parents[launch.thread][at]
        return inside[at] if at >= 0 else None


class Launches:
    """Launch of each kernel, and the host's event around it: by number, else by thread and time.

    Only events of ``host_categories`` may be around a launch.
    """

    def __init__(
        self,
        events: Sequence[TraceEvent],
        host_categories: frozenset[str] = frozenset({CPU_OP}),
    ) -> None:
        self._events = events
        self._host_categories = host_categories
        self.by_correlation: dict[int, TraceEvent] = {}
        self._operations: dict[int, TraceEvent] = {}
        for event in events:
            if event.category == CPU_OP and event.number:
                self._operations[event.number] = event
            elif event.category in RUNTIME and event.correlation:
                self.by_correlation[event.correlation] = event

    @cached_property
    def nesting(self) -> Nesting:
        """Nesting of the host's events."""
        return Nesting(operations_by_thread(self._events, self._host_categories))

    def of(self, work: TraceEvent) -> tuple[TraceEvent | None, TraceEvent | None]:
        """Return the launch of a kernel or copy and the host's event around it, None if unknown."""
        launch = self.by_correlation.get(work.correlation)
        call = self._operations.get(work.link)
        if call is None and launch is not None:
            call = self._operations.get(launch.link) or self.nesting.around(launch)
        return launch, call


def _parents(inside: Sequence[TraceEvent]) -> list[int]:
    stack: list[int] = []
    parents = []
    for position, event in enumerate(inside):
        while stack and inside[stack[-1]].end_ns <= event.start_ns:
            stack.pop()
        parents.append(stack[-1] if stack else -1)
        stack.append(position)
    return parents
