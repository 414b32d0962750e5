"""Host memory of what is offloaded, against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.calib.arguments.megatron_command import config_from_command
from forerun.calib.layers.stage_work import updated_parameters
from forerun.calib.memory.peak import host_nbytes, memory

_LINE = (
    "torchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py --bf16 --num-layers 24 "
    "--hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings "
    "2048 --micro-batch-size 2 --global-batch-size 64 --vocab-size 50304 "
    "--use-distributed-optimizer"
)
PLAIN = replace(config_from_command(_LINE.split()).config, device="NVIDIA H100 80GB HBM3")


def test_nothing_is_held_where_nothing_is_offloaded() -> None:
    assert host_nbytes(PLAIN) == 0


@pytest.mark.parametrize("frac", [0.25, 1.0])
def test_states_and_gradients_of_a_share_are_held(frac: float) -> None:
    config = replace(PLAIN, optimizer_offload_frac=frac)
    expected = 8 * frac * (12 + 4) * updated_parameters(config, 0)
    assert host_nbytes(config) == pytest.approx(expected, rel=1e-3)


def test_activations_leave_the_device_for_the_host() -> None:
    config = replace(PLAIN, offload_modules=("core_attn", "attn_proj"))
    saved = memory(PLAIN).activations_nbytes - memory(config).activations_nbytes
    assert host_nbytes(config) == 8 * saved > 0
