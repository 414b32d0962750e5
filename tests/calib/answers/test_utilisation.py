"""MFU: against a closed form of the FLOP of a step, and silent where the device is not known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_shape import SMALL

from forerun.benchmarks.baselines.step_terms import step_flop
from forerun.calib.answers.run_measurements import mfu_frac
from forerun.calib.fit.priors import device_prior
from forerun.calib.workload.config import Batch, Parallelism, Precision, RunConfig

MODEL = replace(SMALL, num_layers=4)
H100 = "NVIDIA H100 80GB HBM3"


def layout(device: str = H100, **degrees: int) -> RunConfig:
    return RunConfig(
        model=MODEL,
        parallelism=Parallelism(**degrees),
        batch=Batch(micro_batch_size=1, global_batch_size=8),
        precision=Precision.BF16,
        device=device,
    )


@pytest.mark.parametrize("degrees", [{}, {"dp": 2}, {"pp": 2}, {"tp": 2}, {"dp": 2, "pp": 2}])
def test_it_is_the_flop_of_the_model_over_what_the_ranks_could_do(degrees: dict[str, int]) -> None:
    config, time_s = layout(**degrees), 0.01
    peak = device_prior(H100).peaks_for(2).flop_per_s * config.parallelism.num_ranks
    found = mfu_frac(config, time_s)
    assert found == pytest.approx(step_flop(config) / (peak * time_s), rel=0.1)
    assert mfu_frac(config, 2 * time_s) == pytest.approx(found / 2)


@pytest.mark.parametrize("device", ["cpu", "Accelerator 9"])
def test_without_a_data_sheet_there_is_none(device: str) -> None:
    assert mfu_frac(layout(device), 0.01) is None
