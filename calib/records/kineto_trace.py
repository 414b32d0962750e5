"""What a Kineto trace says: the work of the device, who launched it, and what of it is a product.

The events are those of PyTorch's profiler, read in the process or from its Chrome trace; the words
for their categories are Kineto's own.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..workload import Collective

CPU_OP = "cpu_op"
USER_RANGE = "user_annotation"
KERNEL = "kernel"
DEVICE_WORK = frozenset({KERNEL, "gpu_memcpy", "gpu_memset"})
RUNTIME = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime"})
MESSAGE_OP = "record_param_comms"
SHAPES = "Input Dims"
_ATEN = "aten::"
_PRODUCT_OPS = frozenset(
    f"{_ATEN}{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_grouped_mm")
)
# cuBLAS, cuBLASLt (nvjet on Hopper and later), CUTLASS and rocBLAS (Cijk) name their kernels so.
_PRODUCT_KERNEL = re.compile(r"(?<!fb)gemm|nvjet|cutlass|xmma|wgmma|^Cijk", re.IGNORECASE)
_SPLIT_SUM = re.compile(
    r"split_?k_?reduce|reduce_?splitk|\breduce_(bf16|fp8_in_bf16_out)_cuda", re.IGNORECASE
)
"""Sums of cuBLAS, and those behind a product in parts of Transformer Engine (userbuffers.cu)."""
# Attention is built of CUTLASS's parts and has its types in its names.
_ATTENTION_KERNEL = re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)
_NORM = re.compile(
    r"(layer|rms)_?norm|::normalization::|\bln_bwd_|GammaBetaBackward|cuCompute(Part)?Grad",
    re.IGNORECASE,
)
"""Kernels of Transformer Engine, Apex and PyTorch, and PyTorch's operations on a CPU."""
_COLLECTIVES = (
    ("allreduce", Collective.ALL_REDUCE),
    ("allgather", Collective.ALL_GATHER),
    ("reducescatter", Collective.REDUCE_SCATTER),
    ("alltoall", Collective.ALL_TO_ALL),
    ("broadcast", Collective.BROADCAST),
    ("send", Collective.SEND),
    ("recv", Collective.RECV),
)
"""How the names of libraries begin, without underscores."""
_TRANSFER_KERNEL = re.compile(
    r"[nr]ccl|mscclpp|multimem_(?=all|reduce)|(one|two)_shot_all_?reduce|cross_device_reduce"
    r"|userbuffers_|nvshmem",
    re.IGNORECASE,
)
"""NCCL and RCCL, and what PyTorch's symmetric memory and servers of models have of their own;
Transformer Engine's userbuffers, and NVSHMEM.
"""
_EXCHANGE_KERNEL = re.compile(r"(deep|hybrid)_ep::(?![\w:]*layout)[\w:]*(dispatch|combine)")
"""DeepEP and HybridEP move the rows of experts; counting them, ``layout``, is no transfer."""
_USERBUFFERS = (
    (re.compile(r"userbuffers_\w+_ag"), Collective.ALL_GATHER),
    (re.compile(r"userbuffers_\w+_rs"), Collective.REDUCE_SCATTER),
    (re.compile(r"userbuffers_\w+_sum"), Collective.ALL_REDUCE),
)
_LATE_NODE = "_RegisterDelayedWgradForExperts"
"""Computes the weights' gradients that linears have put off (Megatron-LM core_v0.18.0 and later,
moe_layer.py, --overlap-dispatch-backward-with-experts-wgrad), on a stream of its own."""
_PIECES_RATIO = 1.5
"""A whole product is as long as all pieces of one like it, two or more."""
_IN_KERNEL = re.compile(
    r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast)|cross_device_reduce",
    re.IGNORECASE,
)
Paced = Callable[[Iterable[Any]], Iterable[Any]]
"""Hands things on as they are, with pauses between where there is something to wait for."""
_WRAPPERS = ("autograd::", "torch::autograd", "c10d::", "torch::jit")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """One span of a trace.

    ``number`` is a host operation's own, ``link`` that of the operation around a launch (0: not
    known), ``correlation`` what a launch shares with its work on the device.
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
        """First nanosecond after it."""
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCollective:
    """What a collective's kernel says of itself; ``group`` is its description and name."""

    collective: Collective
    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedWork:
    """One kernel or copy; on a CPU, one operation of the framework.

    ``launched_ns`` is when the host asked for it, ``call`` the host operation around it.
    ``is_whole`` says that this call is at most one product; below a library's own node of autograd
    there may be several.  ``inner`` is the size that a product sums over, 0 where it is not known.
    ``is_late`` says that operators before have put it off, whichever is open around it.
    """

    name: str
    start_ns: int
    duration_ns: int
    launched_ns: int
    call: int = 0
    is_product: bool = False
    is_whole: bool = True
    inner: int = 0
    is_late: bool = False
    message: TracedCollective | None = None


def collective_named(text: str) -> Collective:
    """The collective that PyTorch's traces and its flight recorder call ``text``.

    >>> [collective_named(name).value for name in ("nccl:_all_gather_base", "nccl:send 0->1")]
    ['all_gather', 'send']
    >>> collective_named("_reduce_scatter_base"), collective_named("nccl:coalesced")
    (<Collective.REDUCE_SCATTER: 'reduce_scatter'>, <Collective.OTHER: 'other'>)
    """
    name = text.rpartition(":")[2].replace("_", "").lower()
    return next((kind for start, kind in _COLLECTIVES if name.startswith(start)), Collective.OTHER)


def kernel_collective(name: str) -> Collective | None:
    """What a kernel transfers by its name; ``OTHER`` where it does not say, None if it is none.

    A send and a receive have one kernel, which is an all-to-all's as well.

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


def work_of(events: Sequence[TraceEvent], paced: Paced = iter) -> list[TracedWork]:
    """What the device did in the order of launching; where it did nothing, what the host did."""
    work = device_work(events, paced=paced) or _host_work(events, paced)
    return sorted(work, key=lambda item: (item.launched_ns, item.start_ns))


def busy_ns(work: Iterable[TracedWork]) -> int:
    """How long any of it ran: what runs at once, on several streams, counts once.

    >>> begins = (0, 5, 20)
    >>> busy_ns(TracedWork(name="", start_ns=n, duration_ns=9, launched_ns=0) for n in begins)
    23
    """
    total_ns = end_ns = 0
    for begin_ns, done_ns in sorted((w.start_ns, w.start_ns + w.duration_ns) for w in work):
        total_ns += max(0, done_ns - max(begin_ns, end_ns))
        end_ns = max(end_ns, done_ns)
    return total_ns


def split_gradients(
    work: Sequence[TracedWork],
    *,
    tokens: int,
    outputs: int,
    num_forward: int = 0,
    is_in_pieces: bool = False,
) -> tuple[Sequence[TracedWork], Sequence[TracedWork]] | None:
    """A linear's backward work, in order, as input gradient and weight gradient.

    A product that sums over ``tokens`` is of the weight's gradient, one over ``outputs`` of the
    input's.  Where shapes do not tell, the input's come first, as in Megatron, in Transformer
    Engine and in PyTorch with a bias (not without one: MmBackward0).  What follows the products
    belongs to the weight: bias, casts, accumulation; but a normalization that is part of the linear
    goes back from the input's gradient, whenever it runs.  None where the products are not two for
    each of the ``num_forward`` of the forward pass (0: not known): weights that are frozen, or
    whose gradient is put off.

    With ``is_in_pieces`` the product of the input's gradient may be in pieces, between which they
    are exchanged; that of the weight's, which is the last, never is (Transformer Engine d0067d0,
    pytorch/module/linear.py: only ``bulk_overlap`` for it).
    """
    ends = _product_ends(work)
    if is_in_pieces:
        ends = _without_pieces(work, ends)
    if not ends or len(ends) % 2 or (num_forward and len(ends) != 2 * num_forward):
        return None
    middle, last = ends[len(ends) // 2 - 1], ends[-1]
    first = next(item for item in work if item.is_product)
    begin, end = _normalized(work, last)
    norm, tail = work[begin:end], (*work[last:begin], *work[end:])
    if tokens != outputs and first.inner == tokens:
        return (*work[middle:last], *norm), (*work[:middle], *tail)
    return (*work[:middle], *norm), (*work[middle:last], *tail)


def num_products(work: Sequence[TracedWork]) -> int:
    """How many products there are."""
    return len(_product_ends(work))


def _product_ends(work: Sequence[TracedWork]) -> list[int]:
    """The end of each product: behind the last piece of work of its call.

    Of several products of one call, each ends behind the sum of its own parts.
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


def _without_pieces(work: Sequence[TracedWork], ends: list[int]) -> list[int]:
    """The end of the last piece and that of the whole product behind; none if there is none."""
    if len(ends) < 3:
        return ends
    *pieces, last = [item.duration_ns for item in work if item.is_product]
    return ends[-2:] if last > _PIECES_RATIO * median(pieces) else []


def products_of(work: Sequence[TracedWork]) -> list[Sequence[TracedWork]]:
    """Each product with what comes before it; what follows the last one belongs to that."""
    ends = _product_ends(work)
    ends = [*ends[:-1], len(work)] if ends else []
    return [work[begin:end] for begin, end in zip((0, *ends), ends, strict=False)]


def is_exchanged(work: TracedWork) -> bool:
    """True for a piece of a product that Transformer Engine's userbuffers send or receive.

    >>> name = "userbuffers_fp16_sum_inplace_gpu_rr_rs_oop(int, int)"
    >>> is_exchanged(TracedWork(name=name, start_ns=0, duration_ns=1, launched_ns=0))
    True
    """
    return "userbuffers_" in work.name


def _normalized(work: Sequence[TracedWork], begin: int) -> tuple[int, int]:
    """From the first work of a normalization on to behind the last, from ``begin`` on."""
    places = [n for n in range(begin, len(work)) if _NORM.search(work[n].name)]
    return (places[0], places[-1] + 1) if places else (begin, begin)


def device_work(
    events: Sequence[TraceEvent],
    categories: frozenset[str] = DEVICE_WORK,
    paced: Paced = iter,
) -> list[TracedWork]:
    """What the device did, in the order of the events; work that nobody launched is left out."""
    launches, operations, done = {}, {}, []
    for event in paced(events):
        if event.category in categories:
            done.append(event)
        elif event.category == CPU_OP and event.number:
            operations[event.number] = event
        elif event.category in RUNTIME and event.correlation:
            launches[event.correlation] = event
    nesting: Nesting | None = None
    traced_work = []
    for event in paced(done):
        launch = launches.get(event.correlation)
        call = operations.get(event.link) or operations.get(launch.link if launch else 0)
        if call is None and launch is not None:
            nesting = nesting or Nesting(operations_by_thread(events))
            call = nesting.event_around(launch)
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
                inner=_inner(call),
                is_late=call is not None and call.name.startswith(_LATE_NODE),
                message=_message(event, call),
            )
        )
    return traced_work


def _launch_ns(launch: TraceEvent | None, call: TraceEvent | None) -> int:
    """When the host launched; its clock is the operations', a launch's may be some us off."""
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


def _inner(call: TraceEvent | None) -> int:
    """Size that ``aten::mm(a, b)`` sums over: the last of a."""
    if call is None or call.name != "aten::mm":
        return 0
    dims = call.details.get(SHAPES)
    return int(dims[0][-1]) if dims and dims[0] else 0


def _message(event: TraceEvent, call: TraceEvent | None) -> TracedCollective | None:
    details = event.details
    if "Collective name" not in details and call is not None and call.name == MESSAGE_OP:
        details = call.details
    if "Collective name" in details:
        description = details.get("Process Group Description", "")
        return TracedCollective(
            collective=collective_named(str(details["Collective name"])),
            group=f"{description}#{details.get('Process Group Name', '')}",
        )
    collective = kernel_collective(event.name) if event.category == KERNEL else None
    return None if collective is None else TracedCollective(collective=collective, group="")


def _host_work(events: Sequence[TraceEvent], paced: Paced) -> list[TracedWork]:
    """The outermost operations of the framework on each thread: they do not overlap."""
    ends: dict[int, int] = {}
    traced_work = []
    for event in paced(sorted(_operations(paced(events)), key=_outer_first)):
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
                inner=_inner(event),
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
    """Operations of the host, or its events of other categories too, parents before children."""
    threads: dict[int, list[TraceEvent]] = {}
    for event in events:
        if event.category in categories:
            threads.setdefault(event.thread, []).append(event)
    return {thread: sorted(inside, key=_outer_first) for thread, inside in threads.items()}


def _outer_first(event: TraceEvent) -> tuple[int, int]:
    return event.start_ns, -event.duration_ns


class Nesting:
    """Which event of the host is in which, by thread and time; for traces without links."""

    def __init__(self, threads: Mapping[int, list[TraceEvent]]) -> None:
        self.threads = threads
        self._starts = {t: [e.start_ns for e in inside] for t, inside in threads.items()}
        self.parents = {t: _parents(inside) for t, inside in threads.items()}
        """Position of the event around each one of a thread; -1 where there is none."""

    def around(self, launch: TraceEvent) -> int | None:
        """Position of the innermost event of the launch's thread at that time."""
        inside = self.threads.get(launch.thread)
        if inside is None:
            return None
        at = bisect_right(self._starts[launch.thread], launch.start_ns) - 1
        while at >= 0 and inside[at].end_ns < launch.start_ns:
            at = self.parents[launch.thread][at]
        return at if at >= 0 else None

    def event_around(self, launch: TraceEvent) -> TraceEvent | None:
        """The innermost event of the launch's thread at that time."""
        at = self.around(launch)
        return None if at is None else self.threads[launch.thread][at]


def _parents(inside: Sequence[TraceEvent]) -> list[int]:
    stack: list[int] = []
    parents = []
    for position, event in enumerate(inside):
        while stack and inside[stack[-1]].end_ns <= event.start_ns:
            stack.pop()
        parents.append(stack[-1] if stack else -1)
        stack.append(position)
    return parents
