"""Attention as it runs: what the backend does to time and memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forerun.calib.arguments.megatron_command import config_from_command
from forerun.calib.memory.devices import known_device
from forerun.calib.memory.peak import memory
from forerun.calib.workload.config import Attention, Fp8Recipe, Precision, RunConfig
from forerun.launch.known.machine_fits import device_machine

LINE = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 "
    "--num-attention-heads 32 --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size "
    "1 --global-batch-size 64 --vocab-size 32000 --tensor-model-parallel-size 4 "
    "--sequence-parallel --use-distributed-optimizer --bf16"
)


def config_on(device: str, *more: str) -> RunConfig:
    config = config_from_command([*LINE.split(), *more]).config
    return replace(config, device=known_device(device).driver_name)


def test_an_unfused_matrix_costs_what_it_moves_whoever_stands_beside() -> None:
    """Scores of 8,192 x 8,192 for each head are written and read several times: about half of the
    step on an H100 (its memory's 3.35 TB/s and the products' 990 TFLOP/s by the data sheet)."""
    fused = config_on("H100")
    unfused = replace(fused, attention=Attention.UNFUSED)
    steps = device_machine(unfused).steps
    both = [one.time_s for one in steps.estimates([fused, unfused])]
    assert both == [one.time_s for one in reversed(steps.estimates([unfused, fused]))]
    assert both == pytest.approx([steps.estimates([one])[0].time_s for one in (fused, unfused)])
    assert 1.4 < both[1] / both[0] < 3.0


@pytest.mark.parametrize(
    ("device", "other"),
    [("V100", {"precision": Precision.FP16}), ("H100", {"fp8": Fp8Recipe.DELAYED})],
)
def test_products_of_another_precision_have_their_own_time(
    device: str, other: dict[str, Any]
) -> None:
    config = config_on(device)
    configs = [config, replace(config, **other)]
    steps = device_machine(config).steps
    alone = [steps.estimates([one])[0].time_s for one in configs]
    assert [one.time_s for one in steps.estimates(configs)] == pytest.approx(alone)
    assert alone[1] < 0.9 * alone[0]


@pytest.mark.parametrize(
    ("device", "is_fused"),
    [
        ("H100", True),
        ("A100", True),
        ("V100", False),
        ("T4", False),
        ("GeForce RTX 2080 Ti", False),
        ("NVIDIA RTX 2000 Ada Generation", True),
    ],
)
def test_no_kernel_for_it_runs_before_ampere(device: str, is_fused: bool) -> None:
    config = config_on(device, "--attention-backend", "auto")
    assert config.is_attention_fused is is_fused
    stated = replace(config, attention=Attention.FUSED)
    more = memory(config).total_nbytes - memory(stated).total_nbytes
    assert (more > 0) is not is_fused


def test_core_computes_softmax_in_fp32_where_it_is_told() -> None:
    """Unfused and without its kernel, 8 layers of the recipe used 18.9 GiB on an H200."""
    narrow = config_on("H200", "--transformer-impl", "local", "--no-masked-softmax-fusion")
    wide = replace(narrow, is_softmax_wide=True)
    fused = replace(wide, is_softmax_fused=True)
    assert (narrow.softmax_nbytes, wide.softmax_nbytes, fused.softmax_nbytes) == (2, 4, 2)
    assert memory(wide).total_nbytes > memory(narrow).total_nbytes == memory(fused).total_nbytes
