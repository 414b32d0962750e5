"""Train a small Llama under FSDP2 in a plain loop; Forerun needs no change to it.

    torchrun --standalone --nproc-per-node 2 fsdp2_loop.py --calibrate --calibrate-total-steps=60

The optimizer's steps are the run's, and the decoder's shape is read from the model.  Such a loop
does not show its length: without ``--calibrate-total-steps`` there is no end to forecast.
Needs Forerun's extra ``analysis`` and transformers.
"""

from __future__ import annotations

import argparse
import os

# Before the arguments are parsed: this import removes --calibrate and its options from them.
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import forerun

BATCH_SIZE, SEQ_LENGTH, VOCAB_SIZE = 4, 64, 256


def main() -> None:
    """Train to the last step, or until an advised and requested stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    torch.manual_seed(1)
    model = sharded_llama(device)
    # After fully_shard: the optimizer must get the shards.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, args.steps + 1):
        tokens = torch.randint(0, VOCAB_SIZE, (BATCH_SIZE, SEQ_LENGTH), generator=generator)
        tokens = tokens.to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
        # The same result on all ranks; True only with --calibrate-on-advice=stop.
        if forerun.should_stop():
            break  # save a checkpoint here
    dist.destroy_process_group()


def sharded_llama(device: str) -> torch.nn.Module:
    """Return a decoder of four layers, each its own FSDP unit, so that one is gathered at a
    time."""
    model = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=4,
            hidden_size=128,
            intermediate_size=256,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=SEQ_LENGTH,
        )
    ).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    main()
