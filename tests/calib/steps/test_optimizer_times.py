"""Optimizers by closed forms: bytes of their states, and copies to a host and back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.layers.stage_work import step_operators, updated_parameters
from forerun.calib.steps._scales import optimizer_s
from forerun.calib.steps.base_times import prior_times
from forerun.calib.steps.model import fit_steps
from forerun.calib.workload.config import Precision, RunConfig
from forerun.calib.workload.operators import OperatorKind, optimizer_operator

Layout = Callable[..., RunConfig]
H100, GB200 = "NVIDIA H100 80GB HBM3", "NVIDIA GB200"
RATE = 2e12
NUM = 10**9


def seconds(device: str = H100, **settings: int) -> float:
    return optimizer_s(optimizer_operator(NUM, **settings), device=device, bytes_per_s=RATE)


def test_widths_that_are_the_usual_ones_take_the_usual_time(layout: Layout) -> None:
    usual = layout(precision=Precision.BF16, device=H100)
    stated = layout(precision=Precision.BF16, device=H100, optimizer_state_nbytes=12)
    assert usual.optimizer_moved_nbytes == 0 and stated.optimizer_moved_nbytes == 40
    assert seconds(moved_nbytes=40) == seconds()


def test_the_precision_aware_optimizer_moves_what_its_dtypes_say(layout: Layout) -> None:
    """Moments and gradients in bf16 beside remainders: 2 x 6 of states, 3 x 2, and 4 of weights."""
    narrow = layout(
        precision=Precision.BF16,
        device=H100,
        optimizer_state_nbytes=6,
        reduces_grads_in_bf16=True,
    )
    assert narrow.optimizer_moved_nbytes == 22
    (operator, _), _ = step_operators(narrow, 0)
    assert operator.kind is OperatorKind.STATED_OPTIMIZER
    assert operator.shape == (updated_parameters(narrow, 0), 22, 0, 0)
    assert seconds(moved_nbytes=22) == pytest.approx(22 / 40 * seconds())


def test_a_host_gets_gradients_updates_and_sends_weights() -> None:
    """A billion parameters of one of eight GPUs: 28 GB at half of 76.8, 4 GB each way at 54.4."""
    alone = seconds(moved_nbytes=40, host_parameters=NUM)
    assert alone == pytest.approx(28 / 38.4 + 2 * 4 / 54.4, rel=1e-3)
    overlapped = seconds(moved_nbytes=40, host_parameters=NUM, is_overlapped=True)
    assert overlapped == pytest.approx(28 / 38.4, rel=1e-3)
    # ZeRO-Offload, table 4: 0.22 s on all of a host of V100, here a rank has an eighth of it.
    v100 = seconds("Tesla V100-SXM3-32GB", moved_nbytes=40, host_parameters=NUM, is_overlapped=True)
    assert v100 == pytest.approx(8 * 0.22, rel=0.01)


def test_a_host_on_the_same_package_is_nearer() -> None:
    offloaded = {"moved_nbytes": 40, "host_parameters": NUM}
    assert seconds(GB200, **offloaded) < 0.4 * seconds(H100, **offloaded)


@given(share=st.floats(0.0, 1.0), more=st.floats(0.0, 1.0))
def test_more_on_the_host_is_never_faster_than_its_own_part(share: float, more: float) -> None:
    one, other = sorted((round(share * NUM), round(more * NUM)))
    first, second = (seconds(moved_nbytes=40, host_parameters=n) for n in (one, other))
    # The device's own part shrinks while the host's grows: beyond the first that is the longer.
    assert second >= first or first <= seconds(moved_nbytes=40)


def test_a_step_pays_for_its_offloaded_optimizer(layout: Layout) -> None:
    base = prior_times(H100, is_attention_fused=True)
    steps = fit_steps(base)
    usual = layout(precision=Precision.BF16, device=H100, optimizer_state_nbytes=10)
    half = layout(
        precision=Precision.BF16,
        device=H100,
        optimizer_state_nbytes=10,
        optimizer_offload_frac=0.5,
    )
    here, there = steps.estimates([usual, half])
    (operator, _), _ = step_operators(half, 0)
    expected = optimizer_s(operator, device=H100, bytes_per_s=base.conditions.bytes_per_s)
    assert there.time_s > here.time_s
    gained = there.time_s - here.time_s
    assert 0.2 * expected < gained < 2 * expected
