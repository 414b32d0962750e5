"""Two gloo ranks that probe on a group without a description, the only one beside the world.

Prints one line of JSON for each rank.  The device is the stand-in with the model of an allocator;
200 MB are free on one rank, and plenty on the other.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from device_memory import MIB, Allocator, charged
from device_timeline import installed

from forerun.calib.records.record_kinds import CollectiveRecord, CoverageRecord, Record
from forerun.calib.workload.collectives import GroupRole
from forerun.calib.workload.config import Batch, ModelShape, Parallelism, RunConfig
from forerun.hooks.probing._probe_transfers import find_carrier
from forerun.hooks.probing.probes import Probing
from forerun.hooks.process.guard import Guard
from forerun.hooks.process.settings import RankInfo, Settings
from forerun.hooks.sensors.process_groups import GroupRoles, ProcessGroupHooks
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.step_log import StepLog
from forerun.hooks.sensors.stopwatch import DeviceStopwatch, HostStopwatch

LAYOUT = Parallelism(dp=2, ranks_per_node=2)
CONFIG = RunConfig(
    model=ModelShape(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=16,
        seq_length=32,
        vocab_size=128,
    ),
    parallelism=LAYOUT,
    batch=Batch(micro_batch_size=2, global_batch_size=8),
)
FREE_NBYTES = (100_000_000_000, 200_000_000)


def carriers(group: Any) -> dict[str, Any]:
    """Look up carriers without a description, and try the one of the group."""
    roles = GroupRoles(None, LAYOUT)
    carrier = find_carrier(GroupRole.DP, (0, 1), roles)
    total = torch.ones(1)
    if carrier is not None:
        dist.all_reduce(total, group=carrier.group)
    return {
        "is_the_group": carrier is not None and carrier.group is group,
        "total": total.item(),
        "of_no_layout": find_carrier(GroupRole.DP, (0, 1), GroupRoles()) is None,
        "of_other_ranks": find_carrier(GroupRole.DP, (0,), roles) is None,
    }


def probed(name: str) -> dict[str, Any]:
    """Return all probes of a run: counts of each transfer, messages, the allocator."""
    rank = dist.get_rank()
    info = RankInfo(rank=rank, world_size=2, local_rank=rank, local_world_size=2, run_id=name)
    records: list[Record] = []
    ticks = count()
    with installed(), charged(device_nbytes=1000 * MIB) as memory:
        memory.segment("large", 200 * MIB)
        memory.segment("small", 100 * MIB)
        memory.peak, memory.free_nbytes = memory.reserved, FREE_NBYTES[rank]
        before = state(memory)
        probes = Probing(
            CONFIG,
            Settings(rank=info, probe_s=1e9, directory=Path("unused")),
            device=torch.device("cpu"),
            stopwatch=DeviceStopwatch(lambda: torch.cuda.Event(enable_timing=True)),
            put=records.append,
            clock=lambda: float(next(ticks)),
        )
        for step in range(400):
            if probes.is_done:
                break
            probes.run_slice(step, 0)
            torch.cuda.synchronize()
        is_as_before = state(memory) == before
    moved = [r for r in records if isinstance(r, CollectiveRecord)]
    return {
        "ran": Counter("send" if r.peer >= 0 else r.collective.value for r in moved),
        "remarks": sorted(r.name for r in records if isinstance(r, CoverageRecord)),
        "is_done": probes.is_done,
        "is_as_before": is_as_before,
    }


def state(memory: Allocator) -> tuple[object, ...]:
    return memory.peak, memory.reserved, memory.stats()


def train(group: Any) -> None:
    """Train a hooked step that only reduces gradients."""
    recorder, guard = Recorder(HostStopwatch()), Guard()
    hooks = ProcessGroupHooks(recorder, guard)
    hooks.install()
    recorder.open(StepLog(step=0, window=0, sites=()))
    dist.all_reduce(torch.ones(4), group=group)
    recorder.close()
    hooks.remove()


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    result = {"carriers": carriers(group), "fresh": probed("fresh")}
    train(group)
    result["used"] = probed("used")
    print(f"found {dist.get_rank()} {json.dumps(result)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
