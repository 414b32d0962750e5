"""A transformers Llama in a plain loop: under a trace, and sharded by FSDP2."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from forerun.benchmarks.gpu.bench import Bench
from forerun.calib.records import CoverageRecord, OperatorRecord, StepFlag, StepRecord, TraceRecord
from forerun.calib.samples import read_run
from forerun.calib.workload import TraceChoice
from forerun.hooks.process import PAUSE_S, SLICE_S, Pacer, Settings, current_rank
from forerun.hooks.recording import kineto
from forerun.hooks.session import AttachedRun, Session

_WARMUP = 3
_SHORT_S = 20e-6
_MIB = 1 << 20


class Llama:
    """A decoder, its optimizer, and steps that end when the loss is known."""

    def __init__(self, bench: Bench, *, is_sharded: bool = False) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        wide, deep, self.vocab = (64, 2, 256) if bench.is_cpu else (2048, 12, 32_000)
        self.batch, self.seq = (2, 32) if bench.is_cpu else (2, 2048)
        config = LlamaConfig(
            num_hidden_layers=deep,
            hidden_size=wide,
            intermediate_size=wide * 11 // 4,
            num_attention_heads=4 if bench.is_cpu else 16,
            num_key_value_heads=4 if bench.is_cpu else 16,
            vocab_size=self.vocab,
            max_position_embeddings=self.seq,
        )
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config).to("cuda", dtype=torch.bfloat16)
        self.model = _sharded(model) if is_sharded else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.tokens = torch.randint(0, self.vocab, (self.batch, self.seq), device="cuda")

    def step(self) -> float:
        """Run a step of one micro-batch; return seconds until its loss is on the host."""
        begin_s = time.perf_counter()
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()
        return time.perf_counter() - begin_s

    def attached(self, folder: Path, *, steps: int, trace: TraceChoice) -> AttachedRun:
        """Attach Forerun to the loop, without a companion."""
        settings = Settings(rank=current_rank(), steps=steps, directory=folder, trace=trace)
        return AttachedRun(Session(settings), (self.model,), self.optimizer, None)


def _sharded(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trace(bench: Bench) -> None:
    """Measure a traced step: seconds, memory outside the allocator, and the steps after it."""
    # No stand-in has kernels that a profiler sees: a rehearsal traces the CPU's operators.
    bench.begin_device(is_timed=False)
    loop = Llama(bench)
    window, around = 20, 20
    before = [loop.step() for _ in range(_WARMUP + around)][_WARMUP:]
    times_s = []
    with _watched(bench), loop.attached(
        bench.work / "run", steps=window, trace=TraceChoice.ON
    ) as run:  # fmt: skip
        for _ in range(_WARMUP + window + 1 + around):
            times_s.append(loop.step())
            run.step()
    at = _WARMUP + window
    after = times_s[-around // 2 :]
    bench.put(
        before_step_s=statistics.median(before),
        traced_step_s=times_s[at],
        reading_step_s=statistics.median(times_s[at + 1 : -around // 2]),
        after_step_s=statistics.median(after),
        after_frac=statistics.median(after) / statistics.median(before) - 1,
        steps_s=times_s,
    )
    records = [
        r for rank_records in read_run(bench.work / "run").records.values() for r in rank_records
    ]
    bench.put(
        num_traced=sum(isinstance(r, TraceRecord) for r in records),
        num_traced_steps=sum(StepFlag.TRACED in r.flags for r in records if _is_step(r)),
        remarks=[
            r.name for r in records if isinstance(r, CoverageRecord) and r.name.startswith("trace")
        ],
    )
    _profile_as_a_user(bench, loop)


def _is_step(record: object) -> bool:
    return isinstance(record, StepRecord)


@contextmanager
def _watched(bench: Bench) -> Iterator[None]:
    """Time each entry point of Forerun's tracer, and the device's free memory before and after."""
    entry_points = {"begin": "prepare_s", "_start": "start_s", "end": "stop_s"}
    originals = {name: getattr(kineto.Tracer, name) for name in entry_points}

    def put_watch(name: str) -> None:
        def watched(tracer: Any) -> Any:
            free = torch.cuda.mem_get_info()[0]
            begin_s = time.perf_counter()
            result = originals[name](tracer)
            spent_s = time.perf_counter() - begin_s
            free_after = torch.cuda.mem_get_info()[0]
            key = name.strip("_")
            measured = {
                entry_points[name]: spent_s,
                f"{key}_free_mib": (free // _MIB, free_after // _MIB),
            }
            bench.put(**{k: v for k, v in measured.items() if k not in bench.figures})
            return result

        setattr(kineto.Tracer, name, watched)

    for name in entry_points:
        put_watch(name)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(kineto.Tracer, name, original)


def _profile_as_a_user(bench: Bench, loop: Llama) -> None:
    """Check that a user's profiler still sees kernels, and measure the cost of its first step."""
    from torch.profiler import profile, supported_activities

    with profile(activities=supported_activities()) as user_profiler:
        spent_s = loop.step()
    kernels = sum(
        event.device_type == torch.autograd.DeviceType.CUDA for event in user_profiler.events()
    )
    bench.put(users_kernels=kernels, users_step_s=spent_s)
    bench.put(last_step_s=statistics.median(loop.step() for _ in range(10)))


def pace(bench: Bench) -> None:
    """Time steps with and without a thread making records at our pace, in alternating blocks."""
    bench.begin_device(is_timed=False)
    loop, around = Llama(bench), 4
    for _ in range(2 * _WARMUP):
        loop.step()
    begun, ended = threading.Event(), threading.Event()
    row = {"kind": "linear_fc1", "shape": [4096, 2048, 5632], "start_ns": 1 << 60, "step": 12}

    def work() -> None:
        pacer = Pacer()
        while not ended.is_set():
            begun.wait()
            json.dumps(row)
            pacer.keep()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    alone, concurrent = [], []
    for _ in range(10):
        loop.step()
        alone += [loop.step() for _ in range(around)]
        begun.set()
        concurrent += [loop.step() for _ in range(around)]
        begun.clear()
    ended.set()
    begun.set()
    thread.join()
    frac = statistics.mean(concurrent) / statistics.mean(alone) - 1
    bench.put(
        alone_step_s=statistics.mean(alone), beside_frac=frac, slice_s=SLICE_S, pause_s=PAUSE_S
    )


def fsdp(bench: Bench) -> None:
    """Compare operators under FSDP2 on a mesh of one rank with the same model unsharded."""
    import torch.distributed as dist

    bench.begin_device()
    plain = _operators(bench, "plain", is_sharded=False)
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    sharded = _operators(bench, "sharded", is_sharded=True)
    dist.destroy_process_group()
    shared = sorted(plain.keys() & sharded.keys())
    rows = {key: (plain[key], sharded[key]) for key in shared}
    errors = [abs(b / a - 1) for a, b in rows.values() if a >= _SHORT_S]
    total = sum(b for _, b in rows.values()) / sum(a for a, _ in rows.values()) - 1
    bench.put(
        num_operators=len(shared),
        only_plain=sorted(plain.keys() - sharded.keys()),
        only_sharded=sorted(sharded.keys() - plain.keys()),
        largest_frac=max(errors),
        median_frac=statistics.median(errors),
        all_frac=abs(total),
        operators_s=rows,
    )


def _operators(bench: Bench, name: str, *, is_sharded: bool) -> dict[str, float]:
    """Return median seconds by kind, phase and shape, without those in which the device waited."""
    loop = Llama(bench, is_sharded=is_sharded)
    folder, times_s = bench.work / name, []
    with loop.attached(folder, steps=12, trace=TraceChoice.OFF) as run:
        for _ in range(_WARMUP + 12 + 8):
            times_s.append(loop.step())
            run.step()
    bench.put(**{f"{name}_step_s": statistics.median(times_s[_WARMUP:])})
    times_by_operator = defaultdict(list)
    for records in read_run(folder).records.values():
        for r in records:
            if isinstance(r, OperatorRecord):
                shape = "x".join(map(str, r.shape))
                self_ns = r.duration_ns - r.host_bound_ns
                times_by_operator[f"{r.kind.value} {r.phase.value} {shape}"].append(self_ns / 1e9)
    del loop
    torch.cuda.empty_cache()
    return {key: statistics.median(times) for key, times in times_by_operator.items()}
