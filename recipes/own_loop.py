"""Train a small hand-written GPT, described by hand: ``attach`` in place of the flag.

    torchrun --standalone --nproc-per-node 2 own_loop.py

For cases that the flag cannot detect: a model that transformers does not know, optimizers that are
not torch's.  Omit ``--calibrate``, or the loop is observed twice.  A
loop over DDP or FSDP should use the flag, which sees their internal transfers.
``run_config`` is the part to get right: everything modelled rests on it.
Needs Forerun's extra ``analysis``.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import forerun
from forerun.calib.workload.config import Batch, Cadence
from forerun.calib.workload.model_shape import ModelShape, PositionEmbedding
from forerun.calib.workload.parallelism import Parallelism

NUM_LAYERS, HIDDEN_SIZE, NUM_HEADS, VOCAB_SIZE = 4, 128, 4, 256
MICRO_BATCH_SIZE, SEQ_LENGTH = 4, 64


def run_config(steps: int, world_size: int, device: str) -> forerun.RunConfig:
    """Return the run's configuration: model, parallelism, batch and length."""
    shape = ModelShape(
        num_layers=NUM_LAYERS,
        hidden_size=HIDDEN_SIZE,
        ffn_hidden_size=4 * HIDDEN_SIZE,
        num_attention_heads=NUM_HEADS,
        num_query_groups=NUM_HEADS,  # as many as heads: no grouped queries
        kv_channels=HIDDEN_SIZE // NUM_HEADS,
        seq_length=SEQ_LENGTH,
        vocab_size=VOCAB_SIZE,
        is_tied=False,  # the head has weights of its own
        position_embedding=PositionEmbedding.NONE,
    )
    return forerun.RunConfig(
        model=shape,
        parallelism=Parallelism(dp=world_size),
        # Batch of a step over all ranks; with accumulation k times as much.
        batch=Batch(
            micro_batch_size=MICRO_BATCH_SIZE, global_batch_size=MICRO_BATCH_SIZE * world_size
        ),
        cadence=Cadence(train_iters=steps),
        device=device if device == "cpu" else torch.cuda.get_device_name(),
        framework=f"PyTorch {torch.__version__}",
    )


def main() -> None:
    """Train to the last step, or until an advised and requested stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="forerun-out")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    torch.manual_seed(1)
    model = Gpt().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    config = run_config(args.steps, dist.get_world_size(), device)
    # After init_process_group, so that ranks are known; train_iters is the forecast's end.
    with forerun.attach(
        model, optimizer, config, train_iters=args.steps, directory=args.out
    ) as run:
        for step in range(1, args.steps + 1):
            tokens = torch.randint(0, VOCAB_SIZE, (MICRO_BATCH_SIZE, SEQ_LENGTH + 1),
                                   generator=generator).to(device)  # fmt: skip
            # Forward and backward are marked, so that the report separates them.
            with run.phase("forward-compute"):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            with run.phase("backward-compute"):
                loss.backward()
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            run.step()  # the one call that must not be forgotten
            # run.phase("eval") and run.phase("save-checkpoint") are excluded from the step time
            if step % 20 == 0 and dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
            # The same result on all ranks; True only with attach(..., on_advice="stop").
            if run.should_stop():
                break  # save a checkpoint here
    dist.destroy_process_group()


def average_gradients(model: nn.Module) -> None:
    """Average all gradients with one all-reduce."""
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = parameters_to_vector(grads)
    dist.all_reduce(flat)
    vector_to_parameters(flat / dist.get_world_size(), grads)


class Gpt(nn.Module):
    """Decoder layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        layer = nn.TransformerEncoderLayer(
            HIDDEN_SIZE, NUM_HEADS, 4 * HIDDEN_SIZE, dropout=0.0, batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(HIDDEN_SIZE)
        self.layers = nn.TransformerEncoder(layer, NUM_LAYERS, norm, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over all tokens."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        hidden = self.layers(self.embedding(tokens), mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


if __name__ == "__main__":
    main()
