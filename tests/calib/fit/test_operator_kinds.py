"""FLOP, bytes and launches of every kind, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_machine import batch

from forerun.calib.fit.laws import columns
from forerun.calib.fit.operator_kinds import KINDS, WorkKind
from forerun.calib.workload.operators import OperatorKind, Phase

K = OperatorKind
P = Phase
HALF, SINGLE = 2, 4
PRODUCTS = [kind for kind in K if kind.is_linear]
NUM_UNITS = 108


def _counted(
    kind: K,
    phase: P,
    shape: tuple[int, ...],
    *,
    num_units: int | None = None,
    element_nbytes: int = HALF,
) -> tuple[float, float, float]:
    """Launches, FLOP and bytes."""
    result = columns(batch(kind, phase, [shape], element_nbytes=element_nbytes), num_units)
    launches, flop, nbytes = result.totals()[0].tolist()
    return launches, flop, nbytes


def _flop(kind: K, phase: P, shape: tuple[int, ...], **options: int) -> float:
    return _counted(kind, phase, shape, **options)[1]


def _nbytes(kind: K, phase: P, shape: tuple[int, ...], **options: int) -> float:
    return _counted(kind, phase, shape, **options)[2]


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("element_nbytes", [HALF, SINGLE])
def test_a_linear_is_one_product_forward_and_two_backward(kind: K, element_nbytes: int) -> None:
    rows, inner, cols = shape = (512, 384, 1280)
    x, w, y = (element_nbytes * n for n in (rows * inner, inner * cols, rows * cols))
    main_gradient = SINGLE * inner * cols
    expected = {
        P.FORWARD: (1, x + w + y),
        P.RECOMPUTE: (1, x + w + y),
        P.INPUT_GRADIENT: (1, y + w + x),
        # Reads both tensors, reads and writes the fp32 gradient that it adds into.
        P.WEIGHT_GRADIENT: (1, x + y + 2 * main_gradient),
        P.BACKWARD: (2, (y + w + x) + (x + y + 2 * main_gradient)),
    }
    for phase, (number, nbytes) in expected.items():
        _, flop, moved = _counted(kind, phase, shape, element_nbytes=element_nbytes)
        assert (flop, moved) == (number * 2 * rows * inner * cols, nbytes)


def test_batched_product_counts_each_matrix() -> None:
    number, rows, inner, cols = shape = (12, 64, 96, 200)
    moved = HALF * number * (rows * inner + inner * cols + rows * cols)
    assert _counted(K.BATCHED_PRODUCT, P.FORWARD, shape)[1:] == (
        2 * number * rows * inner * cols,
        moved,
    )
    assert _counted(K.BATCHED_PRODUCT, P.BACKWARD, shape)[1:] == (
        2 * 2 * number * rows * inner * cols,
        2 * moved,
    )


def test_batched_product_pads_its_results_to_tiles_on_a_gpu() -> None:
    number, inner, rows, cols = 12, 96, 100, 130
    shape = (number, rows, inner, cols)
    forward = 2 * number * 128 * 256 * inner
    # The results of the backward products are (rows, inner) and (inner, cols).
    backward = 2 * number * (128 * 128 * cols + 128 * 256 * rows)
    assert _flop(K.BATCHED_PRODUCT, P.FORWARD, shape, num_units=NUM_UNITS) == forward
    assert _flop(K.BATCHED_PRODUCT, P.BACKWARD, shape, num_units=NUM_UNITS) == backward
    assert _nbytes(K.BATCHED_PRODUCT, P.FORWARD, shape, num_units=NUM_UNITS) == _nbytes(
        K.BATCHED_PRODUCT, P.FORWARD, shape
    )


def test_grouped_product_reads_every_expert_and_launches_each() -> None:
    experts, tokens, size_in, size_out = shape = (8, 4096, 512, 1024)
    moved = HALF * (tokens * (size_in + size_out) + experts * size_in * size_out)
    flop = 2 * tokens * size_in * size_out
    for phase, number in ((P.FORWARD, 1), (P.BACKWARD, 2)):
        results = _counted(K.GROUPED_LINEAR, phase, shape)
        assert results == (number * experts, number * flop, number * moved)


def test_flash_attention_is_half_the_square_and_its_backward_two_and_a_half_times() -> None:
    number, heads, groups, seq, channels = 2, 16, 4, 1024, 128
    shape = (number, heads, groups, seq, channels, channels)
    scores = 2 * number * heads * seq * seq * channels
    outputs = 2 * number * heads * seq * seq * channels
    assert _flop(K.FLASH_ATTENTION, P.FORWARD, shape) == (scores + outputs) / 2
    assert _flop(K.FLASH_ATTENTION, P.BACKWARD, shape) == 2.5 * (scores + outputs) / 2
    query, key = number * seq * heads * channels, number * seq * groups * channels
    # Forward: q, k, v in, o out.  Backward: those and do in, dq, dk, dv out.
    assert _nbytes(K.FLASH_ATTENTION, P.FORWARD, shape) == HALF * (2 * query + 2 * key)
    assert _nbytes(K.FLASH_ATTENTION, P.BACKWARD, shape) == HALF * (4 * query + 4 * key)


def test_flash_attention_of_latent_heads_has_two_widths() -> None:
    shape = (1, 8, 8, 256, 192, 128)
    assert _flop(K.FLASH_ATTENTION, P.FORWARD, shape) == 8 * 256 * 256 * (192 + 128)
    moved = HALF * 256 * 8 * (192 + 192 + 128 + 128)
    assert _nbytes(K.FLASH_ATTENTION, P.FORWARD, shape) == moved


def test_heads_are_padded_to_32_channels_on_a_gpu() -> None:
    narrow, wide = (1, 8, 8, 256, 80, 80), (1, 8, 8, 256, 96, 96)
    padded, full = (_flop(K.FLASH_ATTENTION, P.FORWARD, s, num_units=1) for s in (narrow, wide))
    assert padded == full == _flop(K.FLASH_ATTENTION, P.FORWARD, wide)
    assert _flop(K.FLASH_ATTENTION, P.FORWARD, narrow) == full * 80 / 96


@given(number=st.integers(1, 64), heads=st.integers(1, 64), tiles=st.integers(1, 32))
def test_idle_units_of_attention_cost_at_most_a_whole_wave(
    number: int, heads: int, tiles: int
) -> None:
    shape = (number, heads, heads, 128 * tiles, 64, 64)
    blocks = number * heads * tiles
    whole = -(-blocks // NUM_UNITS) * NUM_UNITS / blocks
    bare = _flop(K.FLASH_ATTENTION, P.FORWARD, shape)
    on_gpu = _flop(K.FLASH_ATTENTION, P.FORWARD, shape, num_units=NUM_UNITS)
    assert bare * (1 - 1e-9) <= on_gpu <= bare * whole * (1 + 1e-9)


def test_unfused_attention_is_the_full_square_and_moves_its_scores() -> None:
    number, heads, groups, seq, channels = 2, 8, 2, 256, 64
    shape, twice = (number, heads, groups, seq, channels), (number, heads, groups, 2 * seq, 64)
    square = 2 * number * heads * seq * seq * channels
    assert _flop(K.CORE_ATTENTION, P.FORWARD, shape) == 2 * square
    assert _flop(K.CORE_ATTENTION, P.BACKWARD, shape) == 4 * square
    for phase, times in ((P.FORWARD, 1), (P.BACKWARD, 2)):
        # nbytes = passes * scores + tensors: quadratic and linear in the sequence.
        one, two = _nbytes(K.CORE_ATTENTION, phase, shape), _nbytes(K.CORE_ATTENTION, phase, twice)
        tensors = 2 * one - two / 2
        inputs = HALF * number * seq * channels * (2 * heads + 2 * groups)
        assert tensors == pytest.approx(times * inputs)
        passes = (one - tensors) / (HALF * number * heads * seq * seq)
        # Written, softened in place and read; masks, casts and dropout come on top.
        assert 4 * times <= passes <= 16 * times


@pytest.mark.parametrize(
    ("kind", "shape", "forward", "backward"),
    [
        # Statistics, then read and write; backward reads x and dy twice and writes dx.
        (K.NORM, (128, 512), 3, 6),
        (K.ELEMENTWISE, (128, 512), 2, 3),
        (K.SOFTMAX, (128, 512), 3, 5),
        (K.FUSED_SOFTMAX, (4, 128, 512), 2, 3),
        # x cos + rotate(x) sin: two products, negation of half, concatenation, sum; q and k.
        (K.ROTARY, (128, 2, 8, 64), 20, 40),
        (K.POSITION, (128, 1536), 20, 40),
    ],
)
def test_memory_bound_kinds_are_passes_over_their_tensor(
    kind: K, shape: tuple[int, ...], forward: int, backward: int
) -> None:
    elements = float(np.prod(shape))
    for phase, passes in ((P.FORWARD, forward), (P.BACKWARD, backward)):
        _, flop, nbytes = _counted(kind, phase, shape)
        assert (flop, nbytes) == (0, pytest.approx(HALF * passes * elements))


@pytest.mark.parametrize(("size_in", "size_out"), [(2048, 2048), (4096, 2048)])
def test_activation_reads_its_input_and_writes_its_output(size_in: int, size_out: int) -> None:
    forward = _nbytes(K.ACTIVATION, P.FORWARD, (64, size_in, size_out))
    assert forward == HALF * 64 * (size_in + size_out)
    assert _nbytes(K.ACTIVATION, P.BACKWARD, (64, size_in, size_out)) == 1.5 * forward


def test_permute_reads_tokens_once_and_writes_each_copy() -> None:
    assert _nbytes(K.PERMUTE, P.FORWARD, (1024, 512, 2)) == HALF * 1024 * 512 * 3


def test_embedding_backward_writes_the_table_too() -> None:
    tokens, hidden, vocab = shape = (1024, 512, 32000)
    gathered = _nbytes(K.EMBEDDING, P.FORWARD, shape)
    assert gathered == _nbytes(K.EMBEDDING, P.FORWARD, (tokens, hidden, 2 * vocab))
    result = columns(batch(K.EMBEDDING, P.BACKWARD, [shape]), NUM_UNITS)
    assert result.costs == (
        WorkKind.LAUNCH,
        WorkKind.FLOP,
        WorkKind.BYTES,
        WorkKind.BYTES,
        WorkKind.LAUNCH,
    )
    # A dense gradient is filled and read, and added into the fp32 buffer.
    assert result.amounts[0, 3] == vocab * hidden * (2 * HALF + 2 * SINGLE)
    assert result.amounts[0, 4] == 0


def test_embedding_backward_sorts_many_ids_on_a_gpu() -> None:
    shapes = [(tokens, 64, 1000) for tokens in (3072, 3073)]
    on_gpu = columns(batch(K.EMBEDDING, P.BACKWARD, shapes), NUM_UNITS).totals()[:, 0]
    assert on_gpu[1] > on_gpu[0]
    bare = columns(batch(K.EMBEDDING, P.BACKWARD, shapes)).totals()[:, 0]
    assert bare[1] == bare[0] == on_gpu[0]


def test_adam_is_nine_passes_in_fp32() -> None:
    # Adam: reads p, g, m, v, writes p, m, v.  Clipping reads g, zeroing writes it.
    assert _nbytes(K.OPTIMIZER, P.STEP, (1000,), element_nbytes=SINGLE) == 9 * SINGLE * 1000
    # Two-byte gradients and parameters are copied from and to.
    assert _nbytes(K.OPTIMIZER, P.STEP, (1000,)) == (9 * SINGLE + 2 * HALF) * 1000


def test_router_is_a_narrow_product() -> None:
    tokens, hidden, experts = shape = (2048, 1024, 64)
    assert _flop(K.ROUTER, P.FORWARD, shape) == 2 * tokens * hidden * experts
    assert _flop(K.ROUTER, P.BACKWARD, shape) == 4 * tokens * hidden * experts


def test_experts_that_are_all_awake_read_all_their_weights() -> None:
    tokens, hidden, ffn, top, here, overall = shape = (65536, 1024, 512, 2, 4, 8)
    routed = tokens * top * here / overall
    result = columns(batch(K.EXPERTS, P.FORWARD, [shape]))
    assert result.costs[-1] is WorkKind.BYTES
    # Gate, up and down projection of a gated network.
    assert result.totals()[0, 1] == 3 * 2 * routed * hidden * ffn
    assert result.amounts[0, -1] == pytest.approx(3 * HALF * here * hidden * ffn)
    assert result.amounts[0, 2] == HALF * routed * (hidden + ffn + ffn + ffn + ffn + hidden)


@given(tokens=st.integers(1, 64), top=st.integers(1, 4), here=st.integers(1, 16))
def test_experts_awake_are_those_that_a_token_reached(tokens: int, top: int, here: int) -> None:
    """Expected number of distinct values among independent draws (the occupancy problem)."""
    shape = (tokens, 64, 32, top, here, 16)
    awake = columns(batch(K.EXPERTS, P.FORWARD, [shape])).amounts[0, -1] / (3 * HALF * 64 * 32)
    none_reached = (15 / 16) ** (tokens * top)
    assert awake == pytest.approx(here * (1 - none_reached))
    assert awake <= min(here, tokens * top) + 1e-9


@pytest.mark.parametrize("phase", [P.FORWARD, P.BACKWARD])
def test_a_layer_is_its_products(phase: P) -> None:
    number, heads, seq, hidden, tp = 2, 16, 1024, 2048, 1
    tokens = number * seq
    parts = [
        (K.LINEAR_QKV, (tokens, hidden, 3 * hidden)),
        (K.LINEAR_PROJ, (tokens, hidden, hidden)),
        (K.LINEAR_FC1, (tokens, hidden, 4 * hidden)),
        (K.LINEAR_FC2, (tokens, 4 * hidden, hidden)),
        (K.CORE_ATTENTION, (number, heads, heads, seq, hidden // heads)),
    ]
    whole = _flop(K.LAYER, phase, (number, heads, seq, hidden, tp))
    assert whole == sum(_flop(kind, phase, shape) for kind, shape in parts)
    assert _flop(K.LAYER, phase, (number, heads, seq, hidden, 4)) == whole / 4


@pytest.mark.parametrize("kind", [K.HOST_MICROBATCH, K.HOST_STEP])
def test_the_host_does_no_work_on_the_device(kind: K) -> None:
    assert _counted(kind, P.FORWARD, (), element_nbytes=0) == (1, 0, 0)


@st.composite
def shapes(draw: st.DrawFn, *, sizes: st.SearchStrategy[int]) -> tuple[K, P, tuple[int, ...]]:
    kind = draw(st.sampled_from([k for k in K if not k.value.startswith("host")]))
    phase = P.STEP if kind is K.OPTIMIZER else draw(st.sampled_from([P.FORWARD, P.BACKWARD]))
    return kind, phase, tuple(draw(sizes) for _ in range(KINDS[kind].num_sizes))


ANY_SIZE = st.integers(1, 4096)
WHOLE_TILES = st.sampled_from([2048, 4096, 8192])


@given(drawn=shapes(sizes=ANY_SIZE))
def test_padding_only_adds(drawn: tuple[K, P, tuple[int, ...]]) -> None:
    bare, on_gpu = _counted(*drawn), _counted(*drawn, num_units=NUM_UNITS)
    assert all(more >= less for more, less in zip(on_gpu, bare, strict=True))


@given(drawn=shapes(sizes=WHOLE_TILES).filter(lambda drawn: drawn[0] is not K.EXPERTS))
def test_whole_tiles_in_whole_waves_are_not_padded(drawn: tuple[K, P, tuple[int, ...]]) -> None:
    """Experts alone: tokens that a router deals out end within a tile."""
    assert _counted(*drawn, num_units=128)[1:] == _counted(*drawn)[1:]


@given(drawn=shapes(sizes=ANY_SIZE), element_nbytes=st.sampled_from([1, HALF, SINGLE]))
def test_columns_begin_alike_and_add_up(
    drawn: tuple[K, P, tuple[int, ...]], element_nbytes: int
) -> None:
    kind, phase, shape = drawn
    result = columns(batch(kind, phase, [shape], element_nbytes=element_nbytes), NUM_UNITS)
    assert result.costs[:3] == (WorkKind.LAUNCH, WorkKind.FLOP, WorkKind.BYTES)
    assert np.all(result.amounts >= 0) and np.all(np.isfinite(result.amounts))
    assert result.totals().sum() == pytest.approx(result.amounts.sum())
    recomputed = columns(batch(kind, Phase.RECOMPUTE, [shape], element_nbytes=element_nbytes))
    if phase is Phase.FORWARD:
        bare = columns(batch(kind, phase, [shape], element_nbytes=element_nbytes))
        assert np.array_equal(recomputed.amounts, bare.amounts)
