"""Train a small model with one of four frameworks, however the process was started.

    python launched_loop.py (ddp | fsdp2 | trainer | lightning) [--experts] [--steps N]

Its parser is strict: an option of ours that reaches it ends the program.  Ranks are taken from the
variables of torchrun, Open MPI or Slurm, as programs for clusters do.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

# Before the arguments are parsed: this import removes options of ours.
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

BATCH_SIZE, SEQ_LENGTH, VOCAB_SIZE, NUM_ROWS = 2, 32, 256, 4096
_SHAPE: dict[str, Any] = dict(
    num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4,
    num_key_value_heads=4, vocab_size=VOCAB_SIZE, max_position_embeddings=SEQ_LENGTH,
)  # fmt: skip
_EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=16
)
_OF_LAUNCHERS = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"),
}


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, which are their own labels."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return NUM_ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return the row of this index, always the same."""
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCAB_SIZE, (SEQ_LENGTH,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def build_model(has_experts: bool) -> torch.nn.Module:
    """Return a decoder of two layers, dense or with four experts."""
    torch.manual_seed(1)
    if has_experts:
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SHAPE, **_EXPERTS))
    return LlamaForCausalLM(LlamaConfig(**_SHAPE))


def map_ranks() -> None:
    """Set torch's variables from those of Slurm or Open MPI, where torch's are missing."""
    for name, others in _OF_LAUNCHERS.items():
        value = next((os.environ[other] for other in others if other in os.environ), None)
        if value is not None:
            os.environ.setdefault(name, value)


def join(*, is_needed: bool) -> None:
    """Initialise the process group over all ranks; for one process only if ``is_needed``."""
    map_ranks()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    elif is_needed:
        dist.init_process_group("gloo", "tcp://127.0.0.1:0", rank=0, world_size=1)


def batches(num_steps: int) -> Any:
    """Yield a batch of rows for each step."""
    rows, rank = Rows(), dist.get_rank() if dist.is_initialized() else 0
    for step in range(num_steps):
        first = (step * 8 + rank) * BATCH_SIZE
        chosen = [rows[(first + n) % NUM_ROWS]["input_ids"] for n in range(BATCH_SIZE)]
        yield torch.stack(chosen)


def _loop(model: torch.nn.Module, num_steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for tokens in batches(num_steps):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _ddp(model: torch.nn.Module, num_steps: int, has_experts: bool) -> None:
    join(is_needed=False)
    if dist.is_initialized():
        parallel = torch.nn.parallel.DistributedDataParallel
        model = parallel(model, find_unused_parameters=has_experts)
    _loop(model, num_steps)


def _fsdp2(model: Any, num_steps: int, _: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    join(is_needed=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _loop(model, num_steps)


def _trainer(model: Any, num_steps: int, has_experts: bool) -> None:
    from transformers import Trainer, TrainingArguments

    map_ranks()
    arguments = TrainingArguments(
        output_dir="trainer-out", max_steps=num_steps, use_cpu=True, report_to="none",
        per_device_train_batch_size=BATCH_SIZE, ddp_find_unused_parameters=has_experts,
        save_strategy="no", disable_tqdm=True, logging_steps=50,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=Rows()).train()


def _lightning(model: Any, num_steps: int, has_experts: bool) -> None:
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    num_ranks = int(os.environ.get("LAUNCHED_RANKS", "1"))
    strategy = "ddp_find_unused_parameters_true" if has_experts else "ddp"
    trainer = pl.Trainer(
        accelerator="cpu", devices=num_ranks, strategy=strategy if num_ranks > 1 else "auto",
        max_steps=num_steps, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(Rows(), batch_size=BATCH_SIZE))


FRAMEWORKS: dict[str, Callable[[Any, int, bool], None]] = {
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "trainer": _trainer,
    "lightning": _lightning,
}


def main() -> None:
    """Train, and print one line at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    FRAMEWORKS[args.framework](build_model(args.experts), args.steps, args.experts)
    print("trained", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
