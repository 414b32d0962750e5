"""Custom loops over DDP that a ``DataLoader`` feeds: ``fed_loops.py KIND``, under torchrun.

It prints, for each rank, a hash of all batches in their order, the losses to the last bit, the
random state at the end, and what of torch is still replaced.
"""

from __future__ import annotations

import gc
import hashlib
import os
import struct
import sys
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

ROWS, WIDTH, BATCH, ACCUMULATED, PASSES = 96, 8, 2, 2, 1
STEPS = ROWS // BATCH // ACCUMULATED * PASSES


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._rows)


def train(kind: str) -> tuple[str, list[str], list[weakref.ref]]:
    torch.manual_seed(3)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 4), nn.Dropout()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.randn(ROWS, WIDTH)
    if kind == "stream":
        loader = DataLoader(Stream(rows), batch_size=BATCH)
    else:
        loader = DataLoader(TensorDataset(rows), batch_size=BATCH, shuffle=True)
    order, losses, number = hashlib.sha256(), [], 0
    for _ in range(PASSES):
        for batch in loader:
            data = batch if kind == "stream" else batch[0]
            order.update(data.numpy().tobytes())
            loss = model(data).square().mean()
            loss.backward()
            losses.append(struct.pack(">d", loss.item()).hex())
            number += 1
            if number % ACCUMULATED == 0:
                optimizer.step()
                optimizer.zero_grad()
    known = [weakref.ref(thing) for thing in (model, optimizer, loader, loader.dataset)]
    return order.hexdigest(), losses, known


def main(kind: str) -> None:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    dist.init_process_group("gloo")
    order, losses, known = train(kind)
    gc.collect()
    alive = sum(find() is not None for find in known)
    state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    methods = (DataLoader.__iter__, _BaseDataLoaderIter.__next__)
    replaced = sum(hasattr(method, "__wrapped__") for method in methods)
    line = f"FED {dist.get_rank()} {order} {','.join(losses)} {state} {alive} {replaced}\n"
    os.write(1, line.encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
