"""The recipe's model with experts on two ranks, and a router that prefers those of the first.

``skewed_experts.py BIAS ...``: the recipe's arguments follow.  ``BIAS`` is added to the logits of
the first half of the experts; each rank prints the rows that its experts got in each pass.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import gpt_model
import pretrain_gpt
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter

EXPERTS, TOP_K = 4, 2


def prefer_first(bias: float) -> None:
    """Add the bias to the logits of the first half of the experts."""
    gating = TopKRouter.gating

    def gated(self: Any, *args: Any) -> Any:
        logits = gating(self, *args)
        shift = logits.new_zeros(EXPERTS)
        shift[: EXPERTS // 2] = bias
        return logits + shift

    TopKRouter.gating = gated


def with_experts() -> None:
    """Make the recipe build layers of experts over both ranks."""
    dense = gpt_model.transformer_config
    gpt_model.transformer_config = lambda args: replace(
        dense(args),
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=2,
        add_bias_linear=False,
    )
    gpt_model.get_gpt_layer_local_spec = functools.partial(
        get_gpt_layer_local_spec, num_experts=EXPERTS, moe_grouped_gemm=False
    )
    parallel_state.initialize_model_parallel = functools.partial(
        parallel_state.initialize_model_parallel, expert_model_parallel_size=2
    )


def print_rows() -> None:
    """Print what arrives at the experts of this rank, ``ROWS rank layer rows``."""
    forward = SequentialMLP.forward

    def counted(self: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
        os.write(1, f"ROWS {os.environ['RANK']} {rows.shape[0]}\n".encode())
        return forward(self, rows, *args, **kwargs)

    SequentialMLP.forward = counted


if __name__ == "__main__":
    prefer_first(float(sys.argv.pop(1)))
    with_experts()
    print_rows()
    pretrain_gpt.main()
