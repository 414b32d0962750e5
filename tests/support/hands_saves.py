"""Saving outside the loop: pools, processes, threads, sharded checkpoints, functions in files."""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
from typing import Any

import torch
import torch.distributed as dist
from hands_loop import MADE, Net, Training, case, loss_of


class Saver:
    """An object that refers to a function of torch, and is saved in a checkpoint."""

    def __init__(self) -> None:
        self.save = torch.save


@case(is_slow=True)
def save_in_a_new_process(training: Training) -> None:
    context = multiprocessing.get_context("spawn")
    for number in training.steps():
        training.step()
        if number == MADE - 1:
            arguments = ({"x": 1}, training.path("x.pt"))
            process = context.Process(target=torch.save, args=arguments)
            process.start()
            process.join()
            training.note("exit", process.exitcode)


@case()
def save_functions(training: Training) -> None:
    """A checkpoint contains ``torch.save``, which is the function of that name."""
    saver: Saver | None = None
    for number in training.steps():
        training.backward()
        training.note("in", [pickle.dumps(torch.save), torch.save is torch.serialization.save])
        if number == MADE - 3:
            saver = Saver()
        training.update()
        if number >= MADE - 3:
            checkpoint = {"model": training.net.state_dict(), "callback": saver}
            torch.save(checkpoint, training.path(f"{number}.pt"))
        training.note("after", [torch.save.__qualname__, torch.save.__module__])


@case()
def public_functions(training: Training) -> None:
    """Imports from torch are the same objects in every step, and are pickled by name."""
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")

    functions = {
        "save": lambda: torch.save,
        "backward": lambda: torch.autograd.backward,
        "dcp": lambda: dcp.save,
        "async": lambda: dcp.async_save,
        "train": lambda: torch.nn.Module.train,
        "load": lambda: torch.load,
    }
    before = {name: find() for name, find in functions.items()}
    for _ in training.steps():
        training.backward()
        for name, find in functions.items():
            result: Any = find()
            training.note(name, [pickle.dumps(result), result.__qualname__])
            training.note(name, pickle.loads(pickle.dumps(before[name])) is result)
        training.update()
        training.note("names", [find().__qualname__ for find in functions.values()])


@case()
def distributed_checkpoint(training: Training) -> None:
    """Saved at once and beside training, then read back."""
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")

    for number in training.steps():
        training.backward()
        if number in (MADE, MADE + 2):
            state = {"model": training.net.state_dict()}
            dcp.save(state, checkpoint_id=training.path(f"in-{number}"), no_dist=True)
        training.update()
        if number in (MADE - 1, MADE, MADE + 2):
            state = {"model": training.net.state_dict(), "optim": training.optimizer.state_dict()}
            dcp.save(state, checkpoint_id=training.path(f"after-{number}"), no_dist=True)
    read = {"model": Net().state_dict()}
    dcp.load(read, checkpoint_id=training.path(f"after-{MADE}"), no_dist=True)
    training.note("read", read)


@case(ranks=2, is_slow=True)
def distributed_checkpoint_by_two(training: Training) -> None:
    """Two ranks write one checkpoint, at once and beside training."""
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")

    home, waiting = training.files, None
    group = dist.new_group(backend="gloo")  # the thread that saves has collectives of its own
    for number in training.steps():
        training.backward()
        if number == MADE:
            dcp.save({"model": training.net.state_dict()}, checkpoint_id=home / "in")
        training.update()
        if number in (MADE - 1, MADE):
            if waiting is not None:
                waiting.result()
            state = {"model": training.net.state_dict(), "optim": training.optimizer.state_dict()}
            waiting = dcp.async_save(
                state, checkpoint_id=home / f"beside-{number}", process_group=group
            )
    assert waiting is not None
    waiting.result()
    read = {"model": Net().state_dict()}
    dcp.load(read, checkpoint_id=home / f"beside-{MADE}")
    training.note("read", read)


@case(ranks=2, is_slow=True, has_operators=False)
def shards(training: Training) -> None:
    """FSDP2's own model, whose shards are saved in the window, alone and by a checkpoint of all."""
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    net = Net()
    for module in (*net.layers, net):
        fully_shard(module, mesh=mesh)
    training.net = training.model = net
    training.loss_of = lambda tokens: loss_of(net, tokens)
    training.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for number in training.steps():
        training.backward()
        local = {name: p.to_local() for name, p in net.state_dict().items()}
        training.note("shards", local)
        training.update()
        torch.save(local, training.path(f"{number}.pt"))
        if number in (MADE - 1, MADE):
            model, optim = get_state_dict(net, training.optimizer)
            state = {"model": model, "optim": optim}
            dcp.save(state, checkpoint_id=training.files / f"all-{number}")
            training.note("keys", [sorted(model), sorted(optim)])
