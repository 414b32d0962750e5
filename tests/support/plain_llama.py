"""A custom loop over a small Llama, sharded or replicated: ``plain_llama.py DIRECTORY KIND ...``.

Each kind is trained in turn and watched by itself; the records lie in a folder for each, numbered
in the order of the kinds, and each run is described.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, SEQ, STEPS, WINDOW = 2, 64, 20, 12
LLAMA = LlamaConfig(
    num_hidden_layers=3,
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=256,
    max_position_embeddings=SEQ,
    attn_implementation="eager",
)


def wrapped(kind: str) -> nn.Module:
    """Return the model as DDP, FSDP2 or FSDP2 with two replicas (HSDP)."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LLAMA)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    world = dist.get_world_size()
    shape, names = (
        ((world,), ("shard",)) if kind == "fsdp2" else ((2, world // 2), ("copy", "shard"))
    )
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(kind: str, directory: Path) -> None:
    """Train enough steps for one window."""
    from forerun.hooks.adapters.torch_loop import TorchLoop
    from forerun.hooks.session.attaching import new_session

    model = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    session = new_session(directory=directory, steps=WINDOW, is_analysed=False)
    TorchLoop(session).attach()
    for _ in range(STEPS):
        tokens = torch.randint(0, LLAMA.vocab_size, (BATCH, SEQ), generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    session.finish()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for number, kind in enumerate(sys.argv[2:]):
        train(kind, Path(sys.argv[1]) / f"{number}-{kind}")
    dist.barrier()
    dist.destroy_process_group()
