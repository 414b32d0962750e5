"""torchtitan's program on CPU ranks: ``titan_run.py`` and the options of ``torchtitan.train``.

Under torchrun, with ``--calibrate-device=cpu``.  Only what a CPU lacks is replaced: FSDP2 divides
gradients inside the reduction, gloo sums; a barrier names NCCL's device; a histogram of integers;
the order of tokens by expert (a Triton kernel, replaced by torchtitan's function for CPUs); and
flex attention with gradients (which torch implements in eager mode, but refuses).  A timeout that
torch 2.13 cannot set is not set.
"""

from __future__ import annotations

import functools
import runpy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


def _over_gloo() -> None:
    divide: Any = FSDPModule.set_gradient_divide_factor
    barrier: Any = dist.barrier

    def divide_after(self: Any, factor: float) -> None:
        self.set_force_sum_reduction_for_comms(True)
        divide(self, factor)

    @functools.wraps(barrier)
    def barrier_anywhere(group: Any = None, *_: Any, **__: Any) -> Any:
        return barrier(group)

    FSDPModule.set_gradient_divide_factor = divide_after  # type: ignore[method-assign]
    dist.barrier = barrier_anywhere


def _on_cpus() -> None:
    from torch.nn.attention import flex_attention

    count: Any = torch.histc

    def count_whole(values: Any, *args: Any, **kwargs: Any) -> Any:
        return count(values.float(), *args, **kwargs).to(values.dtype)

    torch.histc = count_whole
    flex_attention._validate_device = lambda *_: None
    if not hasattr(dist, "set_timeout"):  # torch after 2.13
        dist.set_timeout = lambda *_, **__: None
    try:
        from torchtitan.models.moe import utils
    except ImportError:
        return  # later releases have no such kernel
    order = utils.generate_permute_indices
    utils.generate_permute_indices = functools.partial(order, use_cpu=True)


if __name__ == "__main__":
    _over_gloo()
    _on_cpus()
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
