"""Throughput: against Megatron's unit, published rates and closed forms; silent where the device is
not known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny_shape import SMALL

from forerun.benchmarks.published.model_shapes import public_shape
from forerun.calib.errors import ConfigError
from forerun.calib.forecast.forecast_record import Forecast
from forerun.calib.forecast.rates import (
    RemainingRun,
    peak_flop_per_s,
    recomputed_frac,
    throughput,
)
from forerun.calib.layers.model_size import model_flop_per_token
from forerun.calib.workload.config import (
    Batch,
    Fp8Recipe,
    ModelShape,
    Parallelism,
    Precision,
    Recompute,
    RunConfig,
)

H100 = "NVIDIA H100 80GB HBM3"
LLAMA_70B = public_shape("Llama3.1 70b", seq_length=8192)
DGXC_FULL_SQUARE = 1 + 6 * 80 * 8192 * 8192 / model_flop_per_token(LLAMA_70B)
"""NVIDIA's DGX Cloud tables count the whole square of scores: for a token as much more as the half
that a mask hides, 7 %."""


def layout(
    device: str = H100, model: ModelShape = SMALL, samples: int = 8, **given: Any
) -> RunConfig:
    degrees = {name: given.pop(name) for name in ("tp", "pp", "dp") if name in given}
    return RunConfig(
        model=model,
        parallelism=Parallelism(**degrees),
        batch=Batch(micro_batch_size=1, global_batch_size=samples),
        precision=Precision.BF16,
        device=device,
        **given,
    )


@pytest.mark.parametrize(
    ("fp8", "tokens_per_s", "step_time_s", "published_mfu"),
    [(Fp8Recipe.NONE, 71235, 14.72, 0.5410), (Fp8Recipe.TENSORWISE, 95239, 11.01, 0.3617)],
)
def test_a_published_run_has_the_mfu_that_it_states(
    fp8: Fp8Recipe, tokens_per_s: int, step_time_s: float, published_mfu: float
) -> None:
    """DGX Cloud benchmarks of Llama 3.1 70B on 64 H100 (llama3.1/README, v25.02)."""
    result = throughput(
        layout(model=LLAMA_70B, samples=128, tp=4, pp=4, dp=4, fp8=fp8), step_time_s
    )
    assert result.tokens_per_s == pytest.approx(tokens_per_s, rel=1e-3)
    assert result.mfu_frac is not None
    assert DGXC_FULL_SQUARE * result.mfu_frac == pytest.approx(published_mfu, rel=5e-3)


@pytest.mark.parametrize("degrees", [{}, {"dp": 2}, {"pp": 2}, {"tp": 2}, {"dp": 2, "pp": 2}])
def test_the_split_of_a_model_changes_nothing_but_the_number_of_gpus(
    degrees: dict[str, Any],
) -> None:
    whole, config = throughput(layout(), 0.01), layout(**degrees)
    result, num_ranks = throughput(config, 0.01), config.parallelism.num_ranks
    assert result.tokens_per_s == whole.tokens_per_s == 8 * SMALL.seq_length / 0.01
    assert result.tokens_per_s_per_gpu == pytest.approx(whole.tokens_per_s / num_ranks)
    assert result.mfu_frac == pytest.approx((whole.mfu_frac or 0.0) / num_ranks)
    slower = throughput(config, 0.02)
    assert slower.flop_per_s_per_gpu == pytest.approx(result.flop_per_s_per_gpu / 2)


def test_what_runs_again_is_in_hfu_alone() -> None:
    plain = throughput(layout(), 0.01)
    full = throughput(layout(recompute=Recompute.FULL), 0.01)
    assert plain.mfu_frac is not None
    assert full.mfu_frac == plain.mfu_frac == plain.hfu_frac
    assert full.hfu_frac is not None
    # A third of the layers; the head is not computed again.
    assert 1.0 < full.hfu_frac / plain.mfu_frac < 4 / 3
    deep = replace(SMALL, num_layers=400)
    full = throughput(layout(model=deep, recompute=Recompute.FULL), 0.01)
    assert full.hfu_frac is not None
    assert full.hfu_frac / (full.mfu_frac or 0.0) == pytest.approx(4 / 3, rel=5e-3)


def test_half_of_the_layers_again_is_half_of_it_however_it_is_split() -> None:
    every = recomputed_frac(layout(recompute=Recompute.FULL))
    half = recomputed_frac(layout(recompute=Recompute.FULL, recompute_num_layers=2))
    assert half == pytest.approx(every / 2)
    split = layout(tp=2, pp=2, recompute=Recompute.FULL, recompute_num_layers=1)
    assert recomputed_frac(split) == pytest.approx(half)


# Data sheets, dense: H100 SXM 989 and 1,979; A100 312; B200 2,250 and 4,500; MI300X 1,307.
@pytest.mark.parametrize(
    ("device", "fp8", "tera"),
    [
        (H100, Fp8Recipe.NONE, 989),
        (H100, Fp8Recipe.MXFP8, 1978),
        ("NVIDIA A100-SXM4-80GB", Fp8Recipe.NONE, 312),
        ("NVIDIA B200", Fp8Recipe.MXFP8, 4500),
        ("AMD Instinct MI300X", Fp8Recipe.NONE, 1307),
    ],
)
def test_the_peak_is_the_dense_one(device: str, fp8: Fp8Recipe, tera: int) -> None:
    assert peak_flop_per_s(layout(device, fp8=fp8)) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize("device", ["cpu", "Accelerator 9"])
def test_without_a_data_sheet_there_is_no_mfu(device: str) -> None:
    result = throughput(layout(device), 0.01)
    assert result.mfu_frac is None
    assert result.hfu_frac is None
    assert result.tokens_per_s > 0
    assert "MFU" not in result.text


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_gpu_hours_of_tokens_are_those_of_all_gpus(num_gpus: int) -> None:
    """1e9 tokens at 1e6 tokens/s take 1,000 s, on each of the GPUs."""
    config = layout(dp=num_gpus)
    result = throughput(config, 8 * config.model.seq_length / 1e6)
    assert result.gpu_hours_per_giga_token == pytest.approx(num_gpus * 1000 / 3600)


@pytest.mark.parametrize("time_s", [0.0, -1.0, float("nan")])
def test_a_step_without_a_length_has_none(time_s: float) -> None:
    with pytest.raises(ConfigError, match="no throughput"):
        throughput(layout(), time_s)


def test_the_rest_of_a_run_is_as_many_samples_in_any_layout() -> None:
    running = layout(dp=2)
    run = RemainingRun(
        config=running,
        step_time_s=1.0,
        remaining_s=7200.0,
        now_unix_s=1000.0,
        price_per_gpu_hour=3.0,
        restart_s=60.0,
    )
    unchanged = run.in_layout(running, 1.0)
    assert (unchanged.remaining_s, unchanged.gpu_hours, unchanged.cost) == (7200.0, 4.0, 12.0)
    assert unchanged.finish_unix_s == 8200.0
    # Twice the ranks at 0.6 of the step, after a restart.
    other = run.in_layout(layout(dp=4), 0.6)
    assert other.remaining_s == pytest.approx(0.6 * 7200 + 60)
    assert other.gpu_hours == pytest.approx(4 * other.remaining_s / 3600)
    # Twice the batch in twice the time is the same rest.
    double = run.in_layout(layout(dp=2, samples=16), 2.0)
    assert double.remaining_s == pytest.approx(unchanged.remaining_s + 60)


def test_a_forecast_says_what_is_left() -> None:
    forecast = Forecast(
        remaining_s=50.0,
        remaining_high_s=50.0,
        now_unix_s=7.0,
        step_time_s=1.0,
        step_high_s=1.0,
        single_high_s=1.0,
    )
    run = RemainingRun.of(forecast, layout(), 0.5)
    assert run is not None
    assert (run.remaining_s, run.step_time_s, run.config) == (50.0, 0.5, layout())
    as_forecast = RemainingRun.of(forecast, layout())
    assert as_forecast is not None
    assert as_forecast.step_time_s == 1.0
    assert RemainingRun.of(Forecast(), layout(), 0.5) is None
