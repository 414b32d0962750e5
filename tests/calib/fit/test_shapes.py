"""Features that regressors have of a shape, against counts by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_machine import batch

from forerun.calib.fit._pools import coordinates, halvings, idle_waves, trend
from forerun.calib.fit.operator_kinds import KINDS
from forerun.calib.workload.operators import OperatorKind, Phase

K = OperatorKind
P = Phase
UNITS = 108


def _idle(blocks: int) -> float:
    """Log of units over busy units, over all waves."""
    waves = -(-blocks // UNITS)
    return math.log(waves * UNITS / blocks)


@given(blocks=st.integers(1, 10**6), units=st.integers(1, 304))
def test_idle_waves_count_the_units_of_the_last_wave(blocks: int, units: int) -> None:
    (result,) = idle_waves(np.array([float(blocks)]), units)
    busy_frac = blocks / (math.ceil(blocks / units) * units)
    assert result == pytest.approx(-math.log(busy_frac), abs=1e-9)
    assert result >= -1e-9
    # A full wave and one block more leaves most idle: less than one wave in all.
    assert result <= math.log1p((units - 1) / blocks) + 1e-9


def test_whole_waves_leave_nothing_idle() -> None:
    assert idle_waves(np.array([1.0, 2.0, 7.0]) * UNITS, UNITS) == pytest.approx(np.zeros(3))


@given(sizes=st.lists(st.integers(1, 2**20), min_size=2, max_size=2))
def test_halvings_count_trailing_zeros(sizes: list[int]) -> None:
    expected = [len(f"{s:b}") - len(f"{s:b}".rstrip("0")) for s in sizes]
    values = halvings(batch(K.NORM, P.FORWARD, [sizes]))
    assert values.tolist() == [[min(e, 8) for e in expected]]


@given(sizes=st.lists(st.integers(1, 2**16), min_size=3, max_size=3))
def test_coordinates_are_octaves(sizes: list[int]) -> None:
    one = coordinates(batch(K.LINEAR, P.FORWARD, [sizes]))
    two = coordinates(batch(K.LINEAR, P.FORWARD, [[2 * s for s in sizes]], element_nbytes=4))
    assert two - one == pytest.approx(np.ones((1, 4)))
    assert one[0] == pytest.approx([*map(math.log2, sizes), 1.0])


@pytest.mark.parametrize("kind", [k for k in K if not k.value.startswith("host")])
def test_nothing_but_a_gpu_has_waves(kind: K) -> None:
    of = batch(kind, P.FORWARD, [[96] * KINDS[kind].num_sizes] * 2)
    assert trend(of, 0).shape == (2, 0)
    assert len(trend(of, UNITS)) == 2
    assert np.all(np.isfinite(trend(of, UNITS)))


def test_a_product_is_cut_into_the_tiles_of_its_result() -> None:
    # 1000 x 3000 results: 8 x 12 blocks of 128 x 256, 8 x 24 of 128 x 128.
    values = trend(batch(K.LINEAR_FC1, P.FORWARD, [(1000, 640, 3000)]), UNITS)
    assert values[0] == pytest.approx([_idle(8 * 12), _idle(8 * 24)])


def test_backward_is_the_mean_of_its_two_products() -> None:
    # Gradients of the input (1000 x 640) and of the weight (640 x 3000).
    values = trend(batch(K.LINEAR_FC1, P.BACKWARD, [(1000, 640, 3000)]), UNITS)
    wide = (_idle(8 * 3) + _idle(5 * 12)) / 2
    square = (_idle(8 * 5) + _idle(5 * 24)) / 2
    assert values[0] == pytest.approx([wide, square])


def test_batches_of_products_fill_waves_together() -> None:
    one, many = (
        trend(batch(K.BATCHED_PRODUCT, P.FORWARD, [(n, 128, 64, 128)]), UNITS) for n in (1, UNITS)
    )
    assert one[0, 1] == pytest.approx(math.log(UNITS))
    assert many[0, 1] == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("kind", "aligned", "not_aligned"),
    [
        (K.FLASH_ATTENTION, (1, 108, 108, 128, 64, 64), (1, 108, 108, 128, 80, 80)),
        (K.FLASH_ATTENTION, (1, 108, 108, 128, 64, 64), (1, 108, 108, 128, 32, 32)),
        (K.FLASH_ATTENTION, (1, 108, 108, 128, 128, 128), (1, 108, 108, 128, 160, 160)),
        (K.SOFTMAX, (4096, 2048), (4096, 2000)),
        (K.FUSED_SOFTMAX, (16, 1024, 1024), (16, 1024, 1025)),
        (K.ROTARY, (1024, 2, 16, 128), (1024, 2, 16, 80)),
    ],
)
def test_odd_widths_stand_out(
    kind: K, aligned: tuple[int, ...], not_aligned: tuple[int, ...]
) -> None:
    even, odd = trend(batch(kind, P.FORWARD, [aligned, not_aligned]), UNITS)
    assert even == pytest.approx(np.zeros_like(even))
    assert (odd > 0).sum() == 1
