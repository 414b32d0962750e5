"""Sixteen gloo ranks of one small training, forked from a process that has imported torch once.

    python many_ranks.py DIRECTORY

Each rank trains twice from the same seed, bare and then under ``attach``, and prints a JSON line
with the losses and the collectives that its groups counted in both.  The first and the second half
of the ranks write to directories of their own, as on two nodes without a common disk.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_shape import TINY

from forerun.calib.workload.config import Batch, Parallelism, RunConfig
from forerun.hooks.session.attaching import attach

WORLD = 16
TP = 2
NUM_STEPS = 9
WINDOW = 4
LAYOUT = Parallelism(tp=TP, dp=WORLD // TP)
CONFIG = RunConfig(
    model=TINY, parallelism=LAYOUT, batch=Batch(micro_batch_size=1, global_batch_size=WORLD // TP)
)


def train(
    rank: int, group: Any, around: Callable[[Any, Any], AbstractContextManager[Any]]
) -> list[float]:
    torch.manual_seed(1)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(rank)
    losses = []
    with around(model, optimizer) as run:
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 16, generator=draw)).square().mean()
            loss.backward()
            for weight in model.parameters():
                dist.all_reduce(weight.grad, group=group)
                dist.all_reduce(weight.grad)
            optimizer.step()
            losses.append(loss.item())
            if run is not None:
                run.step()
    return losses


def counts(*groups: Any) -> list[int]:
    """Return the numbers of collectives that the backends have counted."""
    return [group._get_sequence_number_for_group() for group in groups]


def work(rank: int, store: dist.TCPStore, directory: Path) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    groups = [
        dist.new_group(list(range(i, i + TP)), group_desc="TENSOR_MODEL_PARALLEL_GROUP")
        for i in range(0, WORLD, TP)
    ]
    mine, everyone = groups[rank // TP], dist.group.WORLD
    node = directory / f"node{rank * 2 // WORLD}"
    begin = counts(mine, everyone)
    bare = train(rank, mine, lambda model, optimizer: nullcontext())
    middle = counts(mine, everyone)
    hooked = train(
        rank,
        mine,
        lambda model, optimizer: attach(
            model, optimizer, CONFIG, directory=node, steps=WINDOW, is_analysed=False
        ),
    )
    end = counts(mine, everyone)
    row = {
        "rank": rank,
        "bare": bare,
        "hooked": hooked,
        "bare_calls": [b - a for a, b in zip(begin, middle, strict=True)],
        "hooked_calls": [b - a for a, b in zip(middle, end, strict=True)],
    }
    (directory / f"told-{rank}.json").write_text(json.dumps(row))
    dist.destroy_process_group()


def in_child(call: Callable[[], object]) -> int:
    """Fork a process that runs ``call`` and exits; return its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        call()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def serve(port: int) -> None:
    """Host the store, as torchrun's agent does: this process has threads and must not fork."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(port, str(server.port).encode())
    while True:
        time.sleep(60.0)


def main() -> int:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    reader, writer = os.pipe()
    server = in_child(lambda: serve(writer))
    port = int(os.read(reader, 16))
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="many", LOCAL_WORLD_SIZE="8")

    def join(rank: int) -> None:
        os.environ["LOCAL_RANK"] = str(rank % 8)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        work(rank, store, directory)

    children = [in_child(lambda rank=rank: join(rank)) for rank in range(WORLD)]
    try:
        return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


if __name__ == "__main__":
    sys.exit(main())
