"""The pipeline schedules of megatron.core as they run: what each rank computes, posts, waits for.

Reads a list of cases as JSON from the command line; runs Megatron's own forward-backward function
on every rank of each, one after another in this process, over chunks that only write down that they
ran and a point-to-point layer that sends nothing; writes the logs as JSON to stdout.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func, p2p_communication
from megatron.core.transformer import TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from forerun.recipes.stand_in_cuda import install as stand_in

HIDDEN = 2
ENDS = ("send_prev", "recv_prev", "send_next", "recv_next")
LOG: list[list[Any]] = []
POSTED: Counter[str] = Counter()


def main() -> None:
    stand_in.install()
    p2p_communication._p2p_ops = post_each
    p2p_communication._batched_p2p_ops = post_batch
    logs = [
        [log_of(case, rank) for rank in range(case["num_stages"])]
        for case in json.loads(sys.argv[1])
    ]
    print("RESULT" + json.dumps(logs))


def log_of(case: dict[str, Any], rank: int) -> list[list[Any]]:
    LOG.clear()
    POSTED.clear()
    pp, vp = case["num_stages"], case["num_virtual_stages"]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=pp)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp if vp > 1 else None,
        create_gloo_process_groups=False,
    )
    config = pipeline_config(case)
    chunks = [Chunk(config, local * pp + rank) for local in range(vp)]
    data = [itertools.count() for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data if vp > 1 else data[0],
        model=chunks if vp > 1 else chunks[0],
        num_microbatches=case["num_microbatches"],
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return list(LOG)


def pipeline_config(case: dict[str, Any]) -> TransformerConfig:
    pp, vp = case["num_stages"], case["num_virtual_stages"]
    overlaps = vp > 1 and case["overlaps_p2p"]
    return TransformerConfig(
        num_layers=pp * vp,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp if vp > 1 else None,
        microbatch_group_size_per_vp_stage=case["microbatch_group_size"] or pp,
        overlap_p2p_comm=overlaps,
        batch_p2p_comm=not overlaps,
        overlap_p2p_comm_warmup_flush=overlaps and case["overlaps_p2p_ends"],
        pipeline_dtype=torch.float32,
    )


class Chunk(torch.nn.Module):
    """A chunk of a model that computes nothing."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, config: TransformerConfig, number: int) -> None:
        super().__init__()
        self.config, self.number = config, number
        self.weight = torch.nn.Parameter(torch.zeros(1, 1, HIDDEN))
        self.input: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        self.input = tensors[0]

    def forward(self, microbatch: int) -> torch.Tensor:
        LOG.append(["forward", self.number, microbatch])
        given = self.weight if self.input is None else self.input + self.weight
        return Noted.apply(given, self.number, microbatch)


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, number: int, microbatch: int) -> torch.Tensor:
        ctx.task = number, microbatch
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        LOG.append(["backward", *ctx.task])
        return gradient, None, None


def forward_step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
    return model(next(data)), lambda output: (output.sum(), {})


class Handle:
    def __init__(self, end: str) -> None:
        self.name = [end, POSTED[end]]
        POSTED[end] += 1

    def wait(self) -> None:
        LOG.append(["wait", *self.name])


def post_each(**tensors: Any) -> dict[str, Handle]:
    """In place of separate sends and receives: which are posted, and a handle for each."""
    ends = [end for end in ENDS if tensors[f"tensor_{end}"] is not None]
    if ends:
        LOG.append(["post", *ends])
    return {end: Handle(end) for end in ends}


def post_batch(**tensors: Any) -> list[Handle]:
    return list(post_each(**tensors).values())


if __name__ == "__main__":
    main()
