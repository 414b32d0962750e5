"""Copies to the host's memory, against published rates of links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from forerun.calib.network.cluster import host_copy_s
from forerun.calib.steps.base_times import prior_times
from forerun.calib.steps.model import fit_steps
from forerun.calib.workload.config import Precision, RunConfig
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

GIGA = 10**9


def copy(phase: Phase) -> Operator:
    return Operator(kind=OperatorKind.HOST_COPY, phase=phase, shape=(GIGA,), element_nbytes=1)


@pytest.mark.parametrize(
    ("device", "giga_per_s"),
    [
        ("NVIDIA H100 80GB HBM3", 64),
        ("NVIDIA A100-SXM4-80GB", 32),
        ("Tesla V100-SXM2-32GB", 16),
        ("NVIDIA GH200 480GB", 450),
        ("NVIDIA GB200", 450),
    ],
)
def test_a_copy_never_beats_the_sheet_and_reaches_half_of_it(
    device: str, giga_per_s: float
) -> None:
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert 1 / giga_per_s < host_copy_s(copy(phase), device) < 2 / giga_per_s


def test_offloading_on_pcie_costs_time_and_on_a_superchip_hardly_any(
    layout: Callable[..., RunConfig],
) -> None:
    """By hand: a forward pass of a layer makes 6.6 TFLOP, 9 ms on an H100, and keeps six tensors of
    134 MB, which take 15 ms over PCIe and 3 over NVLink-C2C."""
    model = {
        **{"hidden_size": 4096, "ffn_hidden_size": 16384, "num_attention_heads": 32},
        **{"num_query_groups": 32, "kv_channels": 128, "seq_length": 4096},
    }
    gained = []
    for device in ("NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"):
        plain = layout(device=device, model=model, micro=4, precision=Precision.BF16)
        away = replace(plain, offload_modules=("attn_norm", "core_attn", "attn_proj", "mlp_norm"))
        steps = fit_steps(prior_times(device, is_attention_fused=True))
        one, other = steps.estimate(plain), steps.estimate(away)
        gained.append(other.time_s / one.time_s - 1.0)
        assert other.time_s >= one.time_s * (1 - 1e-9)
    assert gained[0] > 0.02 and gained[1] < gained[0] / 4
