"""Probes on a device take blocks that training has cached, and leave its allocator as it was."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from device_memory import MIB, Allocator, charged
from device_timeline import installed

from forerun.calib.advice.probe_sizes import PROBED_KINDS
from forerun.calib.advice.probes import operator_probe
from forerun.calib.records.record_kinds import CoverageRecord, OperatorRecord, Record
from forerun.calib.workload.collectives import Collective
from forerun.calib.workload.config import (
    Attention,
    Batch,
    Experts,
    Fp8Recipe,
    ModelShape,
    Normalization,
    Parallelism,
    PositionEmbedding,
    Precision,
    RunConfig,
)
from forerun.calib.workload.operators import OperatorKind
from forerun.hooks.probing._probe_memory import DeviceMemoryBudget, connection_nbytes
from forerun.hooks.probing._probe_operators import make_bench
from forerun.hooks.probing.probes import Probing
from forerun.hooks.process.settings import RankInfo, Settings
from forerun.hooks.sensors.stopwatch import DeviceStopwatch

CPU = torch.device("cpu")
GPT = RunConfig(
    model=ModelShape(
        num_layers=2,
        hidden_size=512,
        ffn_hidden_size=2048,
        num_attention_heads=8,
        num_query_groups=8,
        kv_channels=64,
        seq_length=256,
        vocab_size=4096,
    ),
    parallelism=Parallelism(),
    batch=Batch(micro_batch_size=4, global_batch_size=8),
    precision=Precision.BF16,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
LLAMA = replace(
    GPT,
    model=replace(
        GPT.model,
        is_gated=True,
        has_bias=False,
        num_query_groups=2,
        normalization=Normalization.RMS_NORM,
        position_embedding=PositionEmbedding.ROPE,
        experts=Experts(num_experts=4, ffn_hidden_size=2048),
    ),
)
RUNS = {
    "gpt": GPT,
    "llama": LLAMA,
    "fused": replace(LLAMA, attention=Attention.FUSED),
    "fp32": replace(GPT, precision=Precision.FP32),
}


def shape_of(kind: OperatorKind, run: RunConfig) -> tuple[int, ...]:
    groups, wide = run.model.num_query_groups, 1 + run.model.is_gated
    shapes = {
        OperatorKind.EMBEDDING: (1024, 512, 4096),
        OperatorKind.POSITION: (1024, 64 * (8 + 2 * groups)),
        OperatorKind.CORE_ATTENTION: (4, 8, groups, 256, 64),
        OperatorKind.ACTIVATION: (1024, 2048 * wide, 2048),
        OperatorKind.LOSS: (1024, 4096),
        OperatorKind.OPTIMIZER: (10_000_000,),
        OperatorKind.ROUTER: (1024, 512, 4),
        OperatorKind.GROUPED_LINEAR: (4, 1024, 512, 2048),
        OperatorKind.PERMUTE: (1024, 512, 1),
    }
    return shapes.get(kind, (1024, 512, 2048) if kind.is_linear else (1024, 512))


def plant_cached_blocks(memory: Allocator, nbytes: int, *, small_nbytes: int = 8 * MIB) -> None:
    """Free blocks of that size, and a peak far above what is in use."""
    memory.segment("large", -(-nbytes // (2 * MIB)) * 2 * MIB)
    for _ in range(-(-small_nbytes // (2 * MIB))):
        memory.segment("small", 2 * MIB)
    memory.peak = memory.reserved


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("kind", sorted(PROBED_KINDS, key=lambda kind: kind.value))
def test_a_probe_needs_no_more_than_is_told(kind: OperatorKind, run: RunConfig) -> None:
    """One free block of that size, on a device that has no more, is enough."""
    nbytes = 4 if kind is OperatorKind.OPTIMIZER else run.precision.nbytes
    shape = shape_of(kind, run)
    probe = operator_probe((kind, shape, nbytes), run)
    with charged(device_nbytes=probe.nbytes + probe.small_nbytes + 4 * MIB) as memory:
        plant_cached_blocks(memory, probe.nbytes, small_nbytes=probe.small_nbytes)
        before = memory.stats(), memory.reserved
        dtype = torch.float32 if nbytes == 4 else torch.bfloat16
        bench = make_bench(kind, shape, run, dtype=dtype, device=CPU)
        most = memory.peak
        for _ in range(3):
            bench.forward()
            bench.backward()
        assert (memory.stats(), memory.reserved) == before
        assert memory.peak == most


def plant_fragments(memory: Allocator, number: int) -> None:
    """Segments of 20 MiB, each with 9 left; the peak is all of them."""
    for _ in range(number):
        segment = memory.segment("large", 20 * MIB)
        assert memory.allocate(11 * MIB).segment is segment
    memory.peak = memory.reserved


def test_fragments_hold_no_probe_however_many_they_are() -> None:
    """In sum they are five times what is asked for, and the device has nothing more."""
    with charged(device_nbytes=1000 * MIB) as memory:
        plant_fragments(memory, 50)
        assert memory.reserved - memory.allocated == 450 * MIB
        one = DeviceMemoryBudget(torch.device("cuda", 0))
        assert not one.has(90 * MIB)
        assert one.has(9 * MIB)
        assert not one.is_disturbed()
        memory.free_nbytes = 0
        with pytest.raises(torch.OutOfMemoryError):
            memory.allocate(90 * MIB)
        assert one.is_disturbed()


@pytest.mark.parametrize(
    "where", [{"stream": 7}, {"pool_id": (0, 1)}], ids=["another stream's", "a graph's"]
)
def test_blocks_that_do_not_serve_the_stream_do_not_count(where: dict[str, object]) -> None:
    with charged(device_nbytes=400 * MIB) as memory:
        memory.segment("large", 200 * MIB, **where)
        memory.peak = memory.reserved
        assert not DeviceMemoryBudget(torch.device("cuda", 0)).has(100 * MIB)
        memory.segment("large", 200 * MIB)
        assert DeviceMemoryBudget(torch.device("cuda", 0)).has(100 * MIB)


def test_a_probe_stays_below_the_peak_of_training() -> None:
    with charged(device_nbytes=1000 * MIB) as memory:
        memory.segment("large", 200 * MIB)
        memory.peak = 50 * MIB
        assert DeviceMemoryBudget(torch.device("cuda", 0)).has(40 * MIB)
        assert not DeviceMemoryBudget(torch.device("cuda", 0)).has(60 * MIB)


def test_an_allocator_that_shows_no_blocks_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``cudaMallocAsync``, of which torch has no snapshot."""

    def raises(**_: object) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support snapshot")

    with charged(device_nbytes=1000 * MIB) as memory:
        plant_cached_blocks(memory, 200 * MIB)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", raises)
        assert not DeviceMemoryBudget(torch.device("cuda", 0)).has(40 * MIB)


@pytest.fixture
def stopwatch() -> DeviceStopwatch:
    return DeviceStopwatch(lambda: torch.cuda.Event(enable_timing=True))


def probed(run: RunConfig, stopwatch: DeviceStopwatch) -> list[Record]:
    """All probes of a rank alone, a second of its clock for each look at it."""
    records: list[Record] = []
    ticks = count()
    probes = Probing(
        run,
        Settings(
            rank=RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, run_id="run"),
            probe_s=1e9,
            directory=Path("unused"),
        ),
        device=CPU,
        stopwatch=stopwatch,
        put=records.append,
        clock=lambda: float(next(ticks)),
    )
    for number in range(2000):
        if probes.is_done:
            break
        probes.run_slice(step=number, window=0)
        torch.cuda.synchronize()
    assert probes.is_done
    return records


SMALL = replace(GPT, model=replace(GPT.model, seq_length=128, vocab_size=1024))
OTHERS = replace(SMALL, parallelism=Parallelism(dp=2, ranks_per_node=2))


@pytest.mark.slow
def test_the_allocator_is_after_the_probes_as_it_was_before(stopwatch: DeviceStopwatch) -> None:
    with installed(), charged(device_nbytes=600 * MIB) as memory:
        plant_cached_blocks(memory, 400 * MIB, small_nbytes=200 * MIB)
        memory.free_nbytes = 0
        before = memory.peak, memory.reserved, memory.stats()
        records = probed(OTHERS, stopwatch)
        assert {r.kind for r in records if isinstance(r, OperatorRecord)} > {OperatorKind.NORM}
        assert not [r for r in records if isinstance(r, CoverageRecord)]
        assert (memory.peak, memory.reserved, memory.stats()) == before


def test_with_fragments_alone_nothing_is_probed_and_that_is_said(
    stopwatch: DeviceStopwatch,
) -> None:
    with installed(), charged(device_nbytes=600 * MIB) as memory:
        plant_fragments(memory, 20)
        before = memory.peak, memory.reserved, memory.stats()
        records = probed(OTHERS, stopwatch)
        assert (memory.peak, memory.reserved, memory.stats()) == before
        (remark,) = records
        assert isinstance(remark, CoverageRecord)
        assert remark.name == "not probed: operators for which no block of memory is free"


def test_a_probe_that_took_more_than_was_told_is_the_last(
    monkeypatch: pytest.MonkeyPatch, stopwatch: DeviceStopwatch
) -> None:
    monkeypatch.setattr(DeviceMemoryBudget, "has", lambda *_: True)
    with installed(), charged(device_nbytes=600 * MIB) as memory:
        records = probed(OTHERS, stopwatch)
        assert memory.num_segment_allocs > 0
    remarks = [r.name for r in records if isinstance(r, CoverageRecord)]
    assert remarks == ["probes ended: one made the allocator ask the device for memory"]
    assert len({(r.kind, r.shape) for r in records if isinstance(r, OperatorRecord)}) == 1


@pytest.mark.slow
def test_products_of_8_bits_are_not_probed_in_16(stopwatch: DeviceStopwatch) -> None:
    run = replace(OTHERS, fp8=Fp8Recipe.DELAYED, precision=Precision.BF16)
    with installed(), charged(device_nbytes=600 * MIB) as memory:
        plant_cached_blocks(memory, 400 * MIB, small_nbytes=200 * MIB)
        records = probed(run, stopwatch)
    kinds = {r.kind for r in records if isinstance(r, OperatorRecord)}
    assert not [kind for kind in kinds if kind.is_quantized]
    assert {OperatorKind.NORM, OperatorKind.LOGITS} <= kinds
    (remark,) = (r.name for r in records if isinstance(r, CoverageRecord))
    assert remark.startswith("not probed: products, ")


def test_a_connection_is_what_its_channels_buffer() -> None:
    """NCCL's own figures: 8 x 512 x 8 x 16, 120 x 640 x 8 x 8 and 4 MiB for a channel."""
    channel = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + (4 << 20)
    assert connection_nbytes(Collective.ALL_REDUCE, 8) == 64 * channel
    assert connection_nbytes(Collective.SEND, 8) == 32 * channel
    assert connection_nbytes(Collective.ALL_TO_ALL, 8) == 7 * 32 * channel
