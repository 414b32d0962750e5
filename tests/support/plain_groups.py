"""A watched custom loop over FSDP2, HSDP and DDP, and PyTorch's own counts of its transfers.

``plain_groups.py DIRECTORY`` leaves records in a folder for each kind, and prints the bytes of
DDP's buckets and the number of FSDP2's operations, each by PyTorch's own count.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

KINDS = ("fsdp2", "hsdp", "ddp", "hsdp-again")
WIDTH, DEPTH, STEPS, WINDOW = 64, 3, 14, 8
BUCKET_MB = 0.02
"""Small enough that DDP has a bucket for each layer."""


def wrapped(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    shape, names = ((4,), ("shard",)) if kind == "fsdp2" else ((2, 2), ("replicate", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for module in (*model.children(), model):
        fully_shard(module, mesh=mesh)
    return model


def counted(kind: str, model: nn.Module, step: Callable[[], None]) -> str:
    """Return ``name=number`` of PyTorch's own counts of one more step."""
    if kind == "ddp":
        step()
        sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        return "buckets=" + sizes.replace(" ", "")
    with CommDebugMode() as comms:
        step()
    counts = comms.get_comm_counts().items()
    return " ".join(f"{str(packet).rpartition('.')[2]}={number}" for packet, number in counts)


def train(kind: str, directory: Path) -> None:
    from forerun.hooks.adapters.torch_loop import TorchLoop
    from forerun.hooks.session.attaching import new_session

    model = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    session = new_session(directory=directory / kind, steps=WINDOW, is_analysed=False)
    TorchLoop(session).attach()

    def step() -> None:
        loss = model(torch.randn(8, WIDTH, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS):
        step()
    summary = counted(kind, model, step)
    session.finish()
    if dist.get_rank() == 0:
        os.write(1, f"TOLD {kind} {summary}\n".encode())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for kind in KINDS:
        train(kind, Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()
