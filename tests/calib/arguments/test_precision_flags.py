"""Flags that say how wide gradients and weights are reach traffic, memory and the optimizer."""

from __future__ import annotations

import pytest

from forerun.calib.arguments.megatron_command import config_from_command
from forerun.calib.layers.stage_work import step_collectives, step_operators, updated_parameters
from forerun.calib.memory.peak import memory
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.calib.workload.config import RunConfig

SIZES = (
    "--num-layers=4 --hidden-size=256 --num-attention-heads=4 --seq-length=128 "
    "--micro-batch-size=1 --global-batch-size=8 --padded-vocab-size=512 "
    "--use-distributed-optimizer --transformer-impl=transformer_engine"
)
BUCKET_PAD = 0.02
"""Share that the distributed optimizer's padding adds here."""


def run(*flags: str) -> RunConfig:
    return config_from_command(["t.py", *SIZES.split(), *flags], num_ranks=4).config


def carried(config: RunConfig, kind: Collective) -> float:
    """Bytes of the data-parallel collectives of a step for each parameter."""
    calls = step_collectives(config, stage=0)
    results = [(c, n) for c, n in calls if c.role is GroupRole.DP and c.collective is kind]
    whole = 4 * updated_parameters(config, 0)
    return sum(call.nbytes * number for call, number in results) / whole


@pytest.mark.parametrize(
    ("flags", "nbytes"),
    [
        ("--bf16", 4),
        ("--bf16 --grad-reduce-in-bf16", 2),
        ("--bf16 --accumulate-allreduce-grads-in-fp32", 4),
        ("--fp16", 2),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", 4),
        ("", 4),
    ],
)
def test_gradients_travel_and_are_kept_as_wide_as_they_are_told(flags: str, nbytes: int) -> None:
    config = run(*flags.split())
    assert carried(config, Collective.REDUCE_SCATTER) == pytest.approx(nbytes, rel=BUCKET_PAD)
    numel = 4 * updated_parameters(config, 0)
    assert memory(config).grads_nbytes == pytest.approx(nbytes * numel, rel=BUCKET_PAD)


def test_narrow_gradients_are_less_for_the_precision_aware_optimizer_to_move() -> None:
    flags = ("--bf16", "--use-precision-aware-optimizer")
    moved = []
    for more in ((), ("--grad-reduce-in-bf16",)):
        (operator, _), _ = step_operators(run(*flags, *more), 0)
        moved.append(operator.shape[1])
    # Read for the norm, read for the update, zeroed: three passes of two bytes less.
    assert moved[0] - moved[1] == 3 * 2


@pytest.mark.parametrize(
    ("recipe", "least", "most"), [("tensorwise", 1.0, 1.3), ("mxfp8", 2.0, 2.05)]
)
def test_weights_in_8_bits_are_gathered_and_kept_so(recipe: str, least: float, most: float) -> None:
    """All but norms, embedding and head; Megatron gathers blocks of 32 elements in bf16."""
    fp8 = ("--bf16", "--fp8-format=hybrid", f"--fp8-recipe={recipe}")
    wide, narrow = run(*fp8), run(*fp8, "--fp8-param-gather")
    assert narrow.keeps_fp8_params
    assert carried(wide, Collective.ALL_GATHER) == pytest.approx(2.0, rel=BUCKET_PAD)
    assert least <= carried(narrow, Collective.ALL_GATHER) <= most
    assert memory(narrow).weights_nbytes < memory(wide).weights_nbytes
