"""Attention as it runs: what the backend does to time and memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forerun.calib.arguments.megatron_command import config_from_command
from forerun.calib.memory.devices import known_device
from forerun.calib.memory.peak import memory
from forerun.calib.steps._priced_items import base_estimates
from forerun.calib.steps.base_times import BaseTimes, prior_times
from forerun.calib.steps.step_tables import machine_times
from forerun.calib.timeline.compiled import compile_layouts
from forerun.calib.workload.config import Attention, Fp8Recipe, Precision, RunConfig
from forerun.calib.workload.operators import Operator, OperatorKind, Phase
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


def attention_tera(config: RunConfig, base: BaseTimes | None = None) -> dict[Phase, float]:
    """Return TFLOP/s of causal attention, forward and backward, before any measurement."""
    compiled = compile_layouts([config])
    base = base or prior_times(config.device, is_attention_fused=True)
    times = base_estimates(compiled, base).time_s
    out = {}
    for item, time_s in zip(compiled.items, times, strict=True):
        if isinstance(item, Operator) and item.kind is OperatorKind.CORE_ATTENTION:
            batch, heads, _, seq, channels = item.shape
            passes = 2.5 if item.phase is Phase.BACKWARD else 1.0
            out[item.phase] = 2 * passes * batch * heads * seq**2 * channels / time_s / 1e12
    return out


@pytest.mark.parametrize("framework", ["", "megatron-core 0.16", "transformers 5.0"])
def test_ampere_runs_the_second_flash_attention_whoever_calls_it(framework: str) -> None:
    """73 and 63 % of 312 TFLOP/s at most, half for short sequences (Dao 2023, abstract and section
    1)."""
    config = replace(config_on("A100", "--seq-length", "262144"), framework=framework)
    long = attention_tera(config)
    words = ("--seq-length", "1024", "--micro-batch-size", "16")
    short = attention_tera(replace(config_on("A100", *words), framework=framework))
    for phase, most in ((Phase.FORWARD, 0.73 * 312), (Phase.BACKWARD, 0.63 * 312)):
        assert 0.95 * most < long[phase] < most
        assert 0.45 * most < short[phase] < 0.9 * most


def test_a_step_older_than_that_kernel_runs_the_first() -> None:
    """25 to 40 % of 312 TFLOP/s (Dao 2023, abstract)."""
    config = config_on("A100", "--seq-length", "4096")
    older = attention_tera(config, machine_times(config, has_first_flash=True))
    assert 0.25 * 312 < older[Phase.FORWARD] < 0.4 * 312
    # A name of a stack does not say when it ran.
    today = attention_tera(replace(config, framework="llm-foundry"))
    assert today == attention_tera(config)
    assert today[Phase.FORWARD] > 1.3 * older[Phase.FORWARD]


def test_newer_devices_run_it_slowly_unless_a_stack_has_another() -> None:
    """379 and 334 TFLOP/s on B200 (flash-attention issue 1589); torchtitan calls cuDNN's there."""
    config = config_on("B200", "--seq-length", "16384")
    by_stack = {
        name: attention_tera(replace(config, framework=name, fuses_norms=False))[Phase.FORWARD]
        for name in ("nanotron", "torchtitan", "")
    }
    assert by_stack["nanotron"] == pytest.approx(379, rel=0.1)
    assert by_stack["torchtitan"] == pytest.approx(attention_tera(config)[Phase.FORWARD])
    assert by_stack["nanotron"] < by_stack[""] < by_stack["torchtitan"]


def test_products_on_amd_reach_what_its_best_reached() -> None:
    """668 TFLOP/s on MI300X and 1,565 on MI355X for the best of many shapes (Bekman, Machine
    Learning Engineering, maximum achievable FLOPS)."""
    for device, best in (("MI300X", 668), ("MI355X", 1565)):
        times = prior_times(known_device(device).driver_name, is_attention_fused=True)
        product = Operator(
            kind=OperatorKind.LINEAR, phase=Phase.FORWARD, shape=(8192,) * 3, element_nbytes=2
        )
        assert 0.5 * best < 2 * 8192**3 / times.times_s([product])[0] / 1e12 < 1.1 * best
