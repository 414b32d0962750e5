"""Bytes that a rank holds of a real FSDP2 model after a step: weights, gradients, moments.

Four ranks of a fake group; writes one JSON object to stdout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM


def local_nbytes(tensors: Iterable[torch.Tensor]) -> int:
    shards = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
    return sum(shard.numel() * shard.element_size() for shard in shards)


def main() -> None:
    settings = json.loads(sys.argv[1])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=settings["num_ranks"])
    model = LlamaForCausalLM(LlamaConfig(**settings["llama"], attn_implementation="eager"))
    model = model.to(getattr(torch, settings["dtype"]))
    copies = settings["num_copies"]
    shape = (copies, settings["num_ranks"] // copies) if copies > 1 else (settings["num_ranks"],)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard")[-len(shape) :])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.zeros((2, 32), dtype=torch.int64)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    weights = list(model.parameters())
    states = (optimizer.state[weight] for weight in weights)
    moments = (state[name] for state in states for name in ("exp_avg", "exp_avg_sq"))
    grads = (weight.grad for weight in weights if weight.grad is not None)
    result = {
        "weights_nbytes": local_nbytes(weights),
        "grads_nbytes": local_nbytes(grads),
        "optimizer_nbytes": local_nbytes(moments),
    }
    print("RESULT" + json.dumps(result))


if __name__ == "__main__":
    main()
