"""One small training on CPU ranks, of one kind of loop: ``loop_run.py KIND STEPS DIRECTORY``.

Runs under torchrun.  Every loop trains the same two-layer model of tokens through a ``DataLoader``,
with two micro-batches per step if the loop accumulates.  Only ``attach`` calls Forerun; the other
loops are unaware of it.  The last line of the last rank is the end of the last step, in Unix
seconds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, WIDTH, SEQ, MICRO_BATCH, ACCUMULATED = 512, 128, 64, 4, 2
PAUSE_S = 0.02
"""Seconds that a micro-batch waits for its data, as in real loops: a processor is idle
meanwhile."""


class Tokens(Dataset[torch.Tensor]):
    """Rows of tokens, each drawn with its index as the seed."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, number: int) -> torch.Tensor:
        time.sleep(PAUSE_S / MICRO_BATCH)
        generator = torch.Generator().manual_seed(number)
        return torch.randint(0, VOCAB, (SEQ,), generator=generator)


class Model(nn.Module):
    """Next-token prediction by two gated layers; no known configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch of shape (samples, tokens)."""
        hidden = self.embedding(tokens).cumsum(1)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.head(hidden[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def wrapped(kind: str) -> nn.Module:
    """Return the model under DDP, FSDP2, or FSDP2 with two replicas (HSDP)."""
    torch.manual_seed(0)
    model = Model()
    if kind in ("ddp", "attach", "stream"):
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = dist.get_world_size()
    shape, names = ((world,), ("shard",))
    if kind == "hsdp":
        shape, names = ((2, world // 2), ("copy", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Stream(IterableDataset[torch.Tensor]):
    """The rows of ``Tokens`` as a stream without a length."""

    def __init__(self, rows: Tokens) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self._rows[number] for number in range(len(self._rows)))


def batches(kind: str, num_steps: int) -> Iterator[torch.Tensor]:
    """Yield all micro-batches of one pass over the data, which is the whole run."""
    world = dist.get_world_size()
    if kind == "stream":
        rows = Tokens(num_steps * ACCUMULATED * MICRO_BATCH)
        return iter(DataLoader(Stream(rows), batch_size=MICRO_BATCH))
    data = Tokens(num_steps * ACCUMULATED * MICRO_BATCH * world)
    sampler: Any = DistributedSampler(data, shuffle=True, seed=1)
    return iter(DataLoader(data, batch_size=MICRO_BATCH, sampler=sampler))


def plain(kind: str, num_steps: int, directory: Path) -> None:
    """Train in a plain loop."""
    dist.init_process_group("gloo")
    model = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run: Any = nullcontext()
    if kind == "attach":
        import forerun

        run = forerun.attach(model, optimizer, train_iters=num_steps, directory=directory)
    with run:
        for number, tokens in enumerate(batches(kind, num_steps)):
            model(tokens).backward()
            if (number + 1) % ACCUMULATED == 0:
                optimizer.step()
                optimizer.zero_grad()
                if kind == "attach":
                    run.step()
        print_end()
    dist.destroy_process_group()


def print_end() -> None:
    """Print the end of this rank's last step."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"ENDED {time.time():.3f}", flush=True)


def hugging_face(kind: str, num_steps: int, directory: Path) -> None:
    """Train a Llama with the Trainer of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    shape = LlamaConfig(
        num_hidden_layers=2, hidden_size=WIDTH, intermediate_size=256, num_attention_heads=4,
        vocab_size=VOCAB, max_position_embeddings=SEQ,
    )  # fmt: skip
    training_arguments = TrainingArguments(
        output_dir=str(directory / "trainer"),
        max_steps=num_steps,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ACCUMULATED,
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1000,
        ddp_find_unused_parameters=False,
    )

    def joined(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        tokens = torch.stack(rows)
        return {"input_ids": tokens, "labels": tokens}

    data = Tokens(num_steps * ACCUMULATED * MICRO_BATCH * int(os.environ["WORLD_SIZE"]))
    Trainer(LlamaForCausalLM(shape), training_arguments, joined, data).train()
    print_end()


def lightning(kind: str, num_steps: int, directory: Path) -> None:
    """Train with Lightning's Trainer."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Model()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    data = Tokens(num_steps * ACCUMULATED * MICRO_BATCH * int(os.environ["WORLD_SIZE"]))
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp",
        max_steps=num_steps, accumulate_grad_batches=ACCUMULATED, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=directory,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(data, batch_size=MICRO_BATCH, shuffle=True))
    print_end()


KINDS: dict[str, Callable[[str, int, Path], None]] = {
    **dict.fromkeys(("ddp", "stream", "fsdp2", "hsdp", "attach"), plain),
    "hugging_face": hugging_face,
    "lightning": lightning,
}

if __name__ == "__main__":
    KINDS[sys.argv[1]](sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
