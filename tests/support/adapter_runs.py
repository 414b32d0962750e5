"""Small trainings under torchrun, one framework each: once watched, once not, in one process.

``adapter_runs.py KIND DIRECTORY`` prints the losses of both, and what is left on the model.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import ProcessGroup

_LOGGED = ("loss", "grad_norm")
STEPS, ACCUMULATED, EVALUATED, SAVED = 12, 2, 6, 8


def write(*words: object) -> None:
    """Write a line in one call: two ranks share the output."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def print_losses(name: str, losses: list[float]) -> None:
    bits = [struct.pack(">d", loss).hex() for loss in losses]
    write("LOSSES", name, ",".join(bits))


def print_hook_counts(model: nn.Module) -> None:
    modules = list(model.modules())
    hooked = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)
    covered = sum("forward" in vars(m) for m in modules)
    replaced = [n for n, v in vars(ProcessGroup).items() if type(v).__name__ == "function"]
    is_torchs = torch.autograd.backward.__qualname__ == "backward"
    write("LEFT", hooked, covered, len(replaced), int(not is_torchs))


def plain(kind: str, directory: Path) -> None:
    """Train a custom loop over DDP, FSDP1 or FSDP2."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*model.children(), model):
            fully_shard(module, mesh=mesh)
    before = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(STEPS):
        for _ in range(ACCUMULATED):
            loss = model(torch.randn(8, 32, generator=generator)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if step == EVALUATED:
            model.eval()
            with torch.no_grad():
                model(torch.ones(8, 32))
            model.train()
        if step == SAVED:
            torch.save(torch.ones(3), directory / f"{kind}-{dist.get_rank()}.pt")
    print_losses(kind, losses)
    if kind == "fsdp2":
        write("OWN", before)
    print_hook_counts(model)


def watched_by_hand(kind: str, directory: Path) -> None:
    """Watch one more loop of this process, as the flag does."""
    from forerun.hooks.adapters.torch_loop import TorchLoop
    from forerun.hooks.session.attaching import new_session

    session = new_session(directory=directory / kind, steps=8, is_analysed=False)
    TorchLoop(session).attach()
    plain(kind, directory)
    session.finish()


def plains(directory: Path) -> None:
    dist.init_process_group("gloo")
    plain("ddp", directory)
    if "FORERUN_OWNER" in os.environ:
        for kind in ("fsdp1", "fsdp2"):
            watched_by_hand(kind, directory)
    else:
        for kind in ("fsdp1", "fsdp2"):
            plain(kind, directory)
    dist.destroy_process_group()


def hugging_face(directory: Path) -> None:
    from tiny_llama import tiny_data, tiny_llama
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    class Losses(TrainerCallback):
        def __init__(self) -> None:
            self.values: list[float] = []

        def on_log(self, args, state, control, logs=None, **given) -> None:
            self.values += [value for name, value in (logs or {}).items() if name in _LOGGED]

    def train(name: str, report_to: str) -> None:
        set_seed(3)
        model, data = tiny_llama(), tiny_data()
        arguments = TrainingArguments(
            output_dir=str(directory / name),
            max_steps=STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=ACCUMULATED,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=EVALUATED,
            save_strategy="steps",
            save_steps=SAVED,
            save_only_model=True,
            use_cpu=True,
            report_to=report_to,
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
        )
        losses = Losses()
        trainer = Trainer(model, arguments, None, data, data[:16], callbacks=[losses])
        trainer.train()
        print_losses(name, losses.values)
        print_hook_counts(model)

    train("watched", "wandb")
    train("bare", "none")


def lightning(directory: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 1))
            self.losses: list[float] = []

        def training_step(self, batch, index):
            loss = self.net(batch[0]).square().mean()
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, index) -> None:
            self.net(batch[0])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train(name: str) -> None:
        pl.seed_everything(1, verbose=False)
        rows = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)
        model = Model()
        saves = ModelCheckpoint(directory / name, every_n_train_steps=SAVED, save_top_k=-1)
        pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_steps=STEPS,
            accumulate_grad_batches=ACCUMULATED,
            val_check_interval=EVALUATED * ACCUMULATED,
            limit_val_batches=2,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            callbacks=[saves],
        ).fit(model, loader, loader)
        print_losses(name, model.losses)
        print_hook_counts(model)

    train("watched")
    train("bare")


KINDS: dict[str, Callable[[Path], None]] = {
    "plain": plains,
    "hugging_face": hugging_face,
    "lightning": lightning,
}

if __name__ == "__main__":
    KINDS[sys.argv[1]](Path(sys.argv[2]))
