"""Trainings that drop all their references: objects that Forerun reaches, and that outlive them.

``reference_runs.py KIND DIRECTORY`` prints one line of JSON: ``held`` names objects of the training
that the package references after each window, ``alive`` those that outlive the training.  With
``--calibrate`` the training is watched.
"""

from __future__ import annotations

import functools
import gc
import json
import logging.handlers
import os
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS, WINDOW, EVERY = 16, 4, 10
IS_WATCHED = "FORERUN_OWNER" in os.environ
_CALL = nn.Module._call_impl
AFTER = (8, STEPS)
"""Steps after which references are checked: after the first window and after the second."""
_PLAIN = (
    dict, list, tuple, set, frozenset, types.CellType, types.MethodType, types.FunctionType,
    functools.partial,
)  # fmt: skip
records = logging.handlers.MemoryHandler(10**6, flushLevel=10**3)
"""A handler that stores its records, as those of error collectors do."""


WRITTEN_S = 20.0
"""Time limit for a writer to write its records, on a shared machine."""


class Watch:
    """Weak references to trained objects, and those that the package reaches."""

    def __init__(self) -> None:
        self.known: dict[str, weakref.ref[Any]] = {}
        self.reachable: dict[str, list[str]] = {}

    def note(self, models: list[nn.Module], optimizer: Any) -> None:
        """Register a training's modules, weights and optimizer by name."""
        for number, model in enumerate(models):
            for name, module in model.named_modules():
                self.known[f"model{number}.{name}"] = weakref.ref(module)
            for name, weight in model.named_parameters():
                self.known[f"model{number}.{name}"] = weakref.ref(weight)
        self.known["optimizer"] = weakref.ref(optimizer)

    def look(self, when: str) -> None:
        """Record the names of objects that ours reference at this moment."""
        living = {name: ref() for name, ref in self.known.items()}
        targets = {id(thing): name for name, thing in living.items() if thing is not None}
        results = {targets[id(thing)] for thing in ours() if id(thing) in targets}
        self.reachable[when] = sorted(results)

    def report(self, kind: str) -> None:
        """Print the objects that are alive once the caller has dropped its references."""
        gc.collect()
        gc.collect()
        self.look("the end")
        tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
        logs = buffers()
        until_s = time.monotonic() + WRITTEN_S
        while logs and time.monotonic() < until_s:
            logs = []
            time.sleep(0.1)
            logs = buffers()
        state = {
            "kind": kind,
            "held": self.reachable,
            "alive": sorted(name for name, ref in self.known.items() if ref() is not None),
            "tensor_nbytes": sum(t.nbytes for t in tensors),
            "num_buffers": len(logs),
            "cuda_nbytes": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
            "errors": [r.getMessage() for r in records.buffer if _has_error(r)],
        }
        os.write(1, f"LEFT {json.dumps(state)}\n".encode())


def buffers() -> list[Any]:
    """Return buffers of recorded steps; the writer's thread has the last ones a little longer."""
    gc.collect()
    return [o for o in gc.get_objects() if type(o).__name__ in ("StepLog", "DeviceStopwatch")]


def _has_error(record: logging.LogRecord) -> bool:
    args = record.args.values() if isinstance(record.args, dict) else record.args or ()
    is_ours = record.name.startswith("forerun")
    return is_ours and any(isinstance(arg, BaseException) for arg in args)


def is_ours(thing: Any) -> bool:
    """Return True for instances and functions of the package; its classes reference no training."""
    kind = type(thing)
    owner = thing if kind is types.FunctionType else kind
    name = getattr(owner, "__module__", "") or ""
    return kind is not type and isinstance(name, str) and name.partition(".")[0] == "forerun"


def ours() -> Iterator[Any]:
    """Yield all objects that the package's instances and functions reach via plain containers."""
    # Lightning sets its Trainer on every callback, ours included.
    everything = [thing for thing in gc.get_objects() if is_ours(thing)]
    pending = [thing for thing in everything if type(thing).__name__ != "ForerunCallback"]
    seen = {id(thing) for thing in pending}
    modules = {id(vars(module)) for module in list(sys.modules.values()) if module is not None}
    while pending:
        thing = pending.pop()
        yield thing
        if not (is_ours(thing) or type(thing) in _PLAIN):
            continue
        for other in gc.get_referents(thing):
            if id(other) not in seen and id(other) not in modules:
                seen.add(id(other))
                pending.append(other)


def rows() -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(1))


def wrapped(kind: str) -> nn.Module:
    model: nn.Module = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        for module in (*model.children(), model):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    return model


StepDone = Callable[[int, nn.Module], Any]


def loop(
    watch: Watch, kind: str, steps: int = STEPS, step_done: StepDone = lambda step, model: None
) -> None:
    """Train a custom loop, whose names are gone when it returns."""
    torch.manual_seed(0)
    model = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watch.note([model], optimizer)
    for step in range(1, steps + 1):
        model(rows()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step_done(step, model)
        if step in AFTER:
            watch.look(f"step {step}")


@contextmanager
def watched_by_hand(directory: Path, kind: str) -> Iterator[None]:
    """Watch one more loop of this process, as the flag does."""
    if not IS_WATCHED:
        yield
        return
    from forerun.hooks.adapters.torch_loop import TorchLoop
    from forerun.hooks.session.attaching import new_session

    session = new_session(directory=directory / kind, steps=WINDOW, every=EVERY, is_analysed=False)
    TorchLoop(session).attach()
    yield
    assert session is not None  # it lives, as that of the flag does


def plain(directory: Path) -> None:
    """Train DDP watched by the flag, then the other kinds."""
    dist.init_process_group("gloo")
    for kind in ("ddp", "fsdp1", "fsdp2"):
        with nullcontext() if kind == "ddp" else watched_by_hand(directory, kind):
            watch = Watch()
            loop(watch, kind, STEPS + 1)  # the first one only shows what there is
            watch.report(kind)
    with watched_by_hand(directory, "interrupted"):
        interrupted()
    dist.destroy_process_group()
    attached(directory)


def interrupted() -> None:
    """Catch an error from a hooked step, and train another model."""

    def fail(step: int, model: nn.Module) -> None:
        if step == 4:
            assert (nn.Module._call_impl is not _CALL) is IS_WATCHED
            raise RuntimeError("planted")

    watch = Watch()
    try:
        loop(watch, "ddp", STEPS, fail)
    except RuntimeError as err:
        assert str(err) == "planted"
    watch.report("interrupted")
    loop(Watch(), "ddp", 3)
    watch = Watch()
    loop(watch, "ddp", 3)
    watch.report("another")


def attached(directory: Path) -> None:
    from forerun.hooks.session.attaching import attach

    watch = Watch()
    torch.manual_seed(0)
    model = wrapped("")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watch.note([model], optimizer)
    folder = directory / "attach"
    with attach(
        model, optimizer, directory=folder, steps=WINDOW, every=EVERY, is_analysed=False
    ) as run:
        for step in range(1, STEPS + 1):
            with run.phase("forward-compute"):
                loss = model(rows()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            if step in AFTER:
                watch.look(f"step {step}")
    del model, optimizer, loss
    watch.report("attach")  # while ``run`` is there
    assert run is not None


def hugging_face(directory: Path, watch: Watch) -> None:
    from tiny_llama import tiny_data, tiny_llama
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Looks(TrainerCallback):
        def on_step_end(self, args, state, control, **given) -> None:
            if state.global_step == 1:
                watch.note([given["model"]], given["optimizer"])
            if state.global_step in AFTER:
                watch.look(f"step {state.global_step}")

    arguments = TrainingArguments(
        output_dir=str(directory / "saved"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(tiny_llama(), arguments, None, tiny_data(), callbacks=[Looks()]).train()


def lightning(directory: Path, watch: Watch) -> None:
    import lightning.pytorch as pl

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(32, 1)

        def training_step(self, batch, index):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, index) -> None:
            if trainer.global_step == 0:
                watch.note([module], trainer.optimizers[0])
            if trainer.global_step in AFTER:
                watch.look(f"step {trainer.global_step}")

        def on_train_end(self, trainer, module) -> None:
            watch.look(f"step {trainer.global_step}")

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 32)))
    pl.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        callbacks=[Looks()],
    ).fit(Model(), loader)


def core(directory: Path, watch: Watch) -> None:
    """Train the recipe, a loop on megatron.core."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
    import pretrain_gpt as recipe

    build, log_step = recipe.build, recipe.Log.step

    def built(args: Any) -> Any:
        parts = build(args)
        watch.note(list(parts[0]), parts[1])
        return parts

    def step(self: Any, iteration: int, *given: Any) -> None:
        log_step(self, iteration, *given)
        if iteration in AFTER:
            watch.look(f"step {iteration}")

    recipe.build, recipe.Log.step = built, step
    small = ("--train-iters", STEPS, "--hidden-size", 32, "--num-layers", 2, "--seq-length", 32,
             "--eval-iters", 0, "--micro-batch-size", 2, "--global-batch-size", 4)  # fmt: skip
    sys.argv = [sys.argv[0], *map(str, small)]
    recipe.main()
    recipe.parallel_state.destroy_global_memory_buffer()


KINDS: dict[str, Callable[[Path, Watch], None]] = {
    "hugging_face": hugging_face,
    "lightning": lightning,
    "core": core,
}

if __name__ == "__main__":
    logging.getLogger().addHandler(records)
    if sys.argv[1] == "plain":
        plain(Path(sys.argv[2]))
    else:
        kind, watched = sys.argv[1], Watch()
        KINDS[kind](Path(sys.argv[2]), watched)
        watched.report(kind)
