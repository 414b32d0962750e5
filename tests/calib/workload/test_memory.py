from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from forerun.calib.workload.config import Precision, Recompute, RunConfig
from forerun.calib.workload.memory import (
    Verdict,
    in_flight_microbatches,
    memory,
    memory_offset,
    stage_memory,
    verdict,
)
from forerun.calib.workload.parameters import parameters

Layout = Callable[..., RunConfig]
WIDE = {"ffn_hidden_size": 4 * 64}
S, B, H, A = 32, 2, 64, 4
SBH = S * B * H


def layers_nbytes(config: RunConfig, *, is_fused: bool) -> int:
    """Activations of the four layers of a middle stage with one micro-batch in flight."""
    last = config.parallelism.pp - 1
    assert in_flight_microbatches(config, last) == 1
    return stage_memory(config, last, is_attention_fused=is_fused).activations_nbytes


@pytest.mark.parametrize(
    ("tp", "is_sequence_parallel", "is_fused", "factor"),
    [
        (1, False, False, 34 + 5 * A * S / H),
        (1, False, True, 34),
        (2, False, False, 10 + 24 / 2 + 5 * A * S / (H * 2)),
        (2, True, False, (34 + 5 * A * S / H) / 2),
        (2, True, True, 34 / 2),
    ],
)
def test_activations_of_a_layer_are_those_of_korthikanti(
    layout: Layout, tp: int, is_sequence_parallel: bool, is_fused: bool, factor: float
) -> None:
    """Table 2 of arXiv:2205.05198, two-byte elements and ffn = 4 h."""
    config = layout(
        tp=tp,
        pp=2,
        model=WIDE,
        precision=Precision.BF16,
        par={"is_sequence_parallel": is_sequence_parallel},
    )
    assert layers_nbytes(config, is_fused=is_fused) == 2 * SBH * factor


def test_selective_recompute_drops_the_scores(layout: Layout) -> None:
    selective = layout(pp=2, model=WIDE, precision=Precision.BF16, recompute=Recompute.SELECTIVE)
    assert layers_nbytes(selective, is_fused=False) == 2 * SBH * 34


def test_full_recompute_keeps_inputs_and_one_layer_at_work(layout: Layout) -> None:
    full = layout(pp=2, model=WIDE, precision=Precision.BF16, recompute=Recompute.FULL)
    assert layers_nbytes(full, is_fused=True) == 2 * 2 * SBH + 34 * SBH


@pytest.mark.parametrize(
    ("precision", "dp", "is_distributed", "nbytes"),
    [
        (Precision.BF16, 4, False, 18),
        (Precision.BF16, 4, True, 6 + 12 / 4),
        (Precision.FP32, 4, False, 16),
        (Precision.FP32, 4, True, 8 + 8 / 4),
    ],
)
def test_state_per_parameter(
    layout: Layout, precision: Precision, dp: int, is_distributed: bool, nbytes: float
) -> None:
    config = layout(dp=dp, precision=precision, par={"is_optimizer_distributed": is_distributed})
    found = memory(config)
    state = found.weights_nbytes + found.grads_nbytes + found.optimizer_nbytes
    assert state == pytest.approx(nbytes * parameters(config, 0), rel=1e-6)


def test_stages_hold_fewer_microbatches_further_down(layout: Layout) -> None:
    config = layout(pp=4)
    assert [in_flight_microbatches(config, s) for s in range(4)] == [4, 3, 2, 1]
    assert in_flight_microbatches(layout(pp=4, samples=4), 0) == 2


def test_the_fullest_stage_is_the_answer(layout: Layout) -> None:
    config = layout(pp=4)
    totals = [stage_memory(config, s).total_nbytes for s in range(4)]
    assert memory(config).total_nbytes == max(totals)
    assert memory(config).stage == totals.index(max(totals))


def test_an_offset_makes_the_own_layout_exact(layout: Layout) -> None:
    config = layout(dp=2)
    peak = memory(config).total_nbytes + 12345
    assert memory(config, offset_nbytes=memory_offset(config, peak)).total_nbytes == peak


def test_verdicts_follow_the_share_of_the_device(layout: Layout) -> None:
    estimate = memory(layout())
    total = estimate.total_nbytes
    assert verdict(estimate, None) is Verdict.UNKNOWN
    assert verdict(estimate, 2 * total) is Verdict.FITS
    assert verdict(estimate, round(total / 0.85)) is Verdict.TIGHT
    assert verdict(estimate, round(total / 0.85), is_calibrated=True) is Verdict.FITS
    assert verdict(estimate, total - 1) is Verdict.DOES_NOT_FIT
    grown = replace(estimate, offset_nbytes=total)
    assert verdict(grown, round(1.5 * total)) is Verdict.DOES_NOT_FIT
