"""A training of one rank that a test can pause: ``tiny_training.py DIRECTORY GO [anything ...]``.

It ends some steps after the file ``GO`` is there, and prints what became of it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from tiny_shape import TINY

from forerun.calib.workload.config import Batch, Cadence, Parallelism, RunConfig
from forerun.hooks.session.attaching import attach

NUM_LAST = 10


def main(directory: Path, go: Path) -> None:
    """Train until the file exists and then to the end, or until a stop is requested."""
    config = RunConfig(
        model=TINY,
        parallelism=Parallelism(),
        batch=Batch(micro_batch_size=1, global_batch_size=1),
        cadence=Cadence(train_iters=100_000),
    )
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_remaining = NUM_LAST
    with attach(model, optimizer, config, directory=directory, steps=4, on_advice="stop") as run:
        while num_remaining:
            optimizer.zero_grad()
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            time.sleep(0.02)
            run.step()
            if run.should_stop():
                print("STOPPED", flush=True)
                return
            num_remaining -= go.exists()
    print("DONE", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
