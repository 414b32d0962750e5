"""Base times from tables: planted times come back, whatever a layout calls its operators."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
import pytest

from forerun.calib.fit.priors import device_prior
from forerun.calib.network.groups import Group
from forerun.calib.steps._operator_tables import network_of, operator_tables, transfer_tables
from forerun.calib.steps.base_times import (
    FittedTimes,
    fused_nbytes,
    law_time_s,
    prior_times,
    table_times,
)
from forerun.calib.workload.collectives import Collective, CollectiveCall, GroupRole
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

DEVICE = "A100-SXM4-80GB"
RATE = 200e12
Kind = OperatorKind
Row = tuple[str, OperatorKind, Phase, str, float]


def operators(rows: Iterable[Row], **columns: object) -> pd.DataFrame:
    """A canonical table: group, kind, phase, shape and seconds of each row."""
    return pd.DataFrame(
        [
            {
                "device": DEVICE,
                "group": group,
                "kind": kind.value,
                "phase": phase.value,
                "shape": shape,
                "element_nbytes": 2,
                "time_s": time_s,
                "flag": "",
                **columns,
            }
            for group, kind, phase, shape, time_s in rows
        ]
    )


def product(m: int, k: int, n: int, phase: Phase = Phase.FORWARD) -> Row:
    return "matmul", Kind.LINEAR, phase, f"{m}x{k}x{n}", 2 * m * k * n / RATE


def products(phase: Phase) -> list[Row]:
    return [product(2048, k, n, phase) for k in (2048, 4096, 8192) for n in (2048, 4096, 8192)]


@pytest.fixture(scope="module")
def planted() -> FittedTimes:
    rows = products(Phase.FORWARD) + products(Phase.INPUT_GRADIENT)
    accumulated = [
        ("matmul (fp32 accumulation)", kind, phase, shape, 3 * time_s)
        for _, kind, phase, shape, time_s in products(Phase.WEIGHT_GRADIENT)
    ]
    attention = [
        ("attention", Kind.FLASH_ATTENTION, phase, f"1x{heads}x{heads}x1024x192x128", heads * unit)
        for heads in (8, 16)
        for phase, unit in ((Phase.FORWARD, 1e-5), (Phase.BACKWARD, 3e-5))
    ]
    table = operators([*rows, *products(Phase.WEIGHT_GRADIENT), *accumulated, *attention])
    return table_times([table], device=DEVICE, is_attention_fused=True)


def operator(kind: OperatorKind, phase: Phase, *shape: int) -> Operator:
    return Operator(kind=kind, phase=phase, shape=shape, element_nbytes=2)


def test_a_measured_product_takes_its_time_by_any_role(planted: FittedTimes) -> None:
    unit = 2 * 2048 * 4096 * 8192 / RATE
    for kind in (Kind.LINEAR_QKV, Kind.LINEAR_FC1, Kind.LOGITS, Kind.LINEAR):
        forward, recomputed, backward = planted.times_s(
            [
                operator(kind, phase, 2048, 4096, 8192)
                for phase in (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD)
            ]
        )
        assert forward == pytest.approx(unit, rel=1e-9)
        assert recomputed == pytest.approx(unit, rel=1e-9)
        # The weight gradient that is added into an fp32 buffer, three times as slow, counts.
        assert backward == pytest.approx((1 + 3) * unit, rel=1e-9)


def test_a_product_between_measured_ones_follows_their_rate(planted: FittedTimes) -> None:
    (result,) = planted.times_s([operator(Kind.LINEAR_FC2, Phase.FORWARD, 2048, 6144, 6144)])
    assert result == pytest.approx(2 * 2048 * 6144**2 / RATE, rel=0.1)


def test_what_no_table_has_moves_the_bytes_of_fused_kernels(planted: FittedTimes) -> None:
    norm = operator(Kind.NORM, Phase.FORWARD, 4096, 4096)
    (result,) = planted.times_s([norm])
    assert result == pytest.approx(law_time_s(norm, device_prior(DEVICE)), rel=1e-9)
    unfused = prior_times(DEVICE, is_attention_fused=False)
    (chained,) = unfused.times_s([norm])
    assert chained != pytest.approx(result, rel=1e-3)


def test_two_products_of_attention_are_told_by_their_sizes() -> None:
    forward = Phase.FORWARD
    rows = [
        ("baddbmm", Kind.BATCHED_PRODUCT, forward, "64x1024x128x1024", 1e-4),
        ("baddbmm", Kind.BATCHED_PRODUCT, forward, "64x2048x128x2048", 4e-4),
        ("bmm", Kind.BATCHED_PRODUCT, forward, "64x1024x1024x128", 2e-4),
        ("bmm", Kind.BATCHED_PRODUCT, forward, "64x2048x2048x128", 8e-4),
        ("softmax", Kind.FUSED_SOFTMAX, forward, "64x1024x1024", 3e-4),
        ("softmax", Kind.FUSED_SOFTMAX, forward, "64x2048x2048", 12e-4),
        ("dropout", Kind.ELEMENTWISE, forward, "65536x1024", 5e-5),
        ("dropout", Kind.ELEMENTWISE, forward, "131072x2048", 20e-5),
    ]
    times = table_times([operators(rows)], device=DEVICE, is_attention_fused=False)
    (result,) = times.times_s([operator(Kind.CORE_ATTENTION, forward, 2, 32, 32, 1024, 128)])
    assert result == pytest.approx((1 + 2 + 3 + 0.5) * 1e-4, rel=1e-9)


def test_a_layer_has_two_of_the_additions_that_tables_time() -> None:
    rows = [("res_add", Kind.RESIDUAL, Phase.FORWARD, f"{n}x1024", n * 1e-8) for n in (1000, 2000)]
    times = table_times([operators(rows)], device=DEVICE, is_attention_fused=False)
    (result,) = times.times_s([operator(Kind.RESIDUAL, Phase.FORWARD, 1000, 1024)])
    assert result == pytest.approx(2 * 1e-5, rel=1e-9)


def test_other_devices_and_flagged_rows_do_not_count() -> None:
    good, other, bad = (operators([product(2048, 2048, 2048)]) for _ in range(3))
    other = other.assign(device="H100", time_s=1.0)
    bad = bad.assign(flag="copied", time_s=2.0)
    tables = operator_tables([good, other, bad], device=DEVICE)
    (result,) = tables.times_s([operator(Kind.LINEAR, Phase.FORWARD, 2048, 2048, 2048)])
    assert result == pytest.approx(2 * 2048**3 / RATE)
    assert not tables.has(Kind.LINEAR, Phase.BACKWARD)


def transfers(**columns: object) -> pd.DataFrame:
    sizes = 2 ** np.arange(20, 31)
    return pd.DataFrame(
        {
            "device": DEVICE,
            "fabric": "one",
            "collective": "all_gather",
            "num_ranks": 4,
            "num_nodes": 1,
            "nbytes": sizes,
            "time_s": 20e-6 + sizes / 150e9,
            "flag": "",
            **columns,
        }
    )


def test_transfers_follow_the_fabric_with_most_samples() -> None:
    slow = transfers(fabric="two").iloc[:5].assign(time_s=1.0)
    flagged = transfers(time_s=1.0, flag="sockets")
    model = transfer_tables([pd.concat([transfers(), slow, flagged])], device=DEVICE)
    group = Group(collective=Collective.ALL_GATHER, num_ranks=4)
    nbytes = np.array([3e6, 2e8])
    values = np.exp(model.estimate(group, nbytes).log_time)
    assert values == pytest.approx(20e-6 + nbytes / 150e9, rel=0.05)


def test_calls_of_any_role_take_the_curve_of_their_group() -> None:
    times = table_times([], [transfers()], device=DEVICE, is_attention_fused=True)
    calls = [
        CollectiveCall(collective=Collective.ALL_GATHER, role=role, num_ranks=4, nbytes=2**26)
        for role in (GroupRole.TP, GroupRole.DP, GroupRole.EP)
    ]
    assert times.times_s(calls) == pytest.approx([20e-6 + 2**26 / 150e9] * 3, rel=0.05)


@pytest.mark.parametrize(
    ("place", "rate"),
    [("Alps (Slingshot-11)", 22.5e9), ("x NDR InfiniBand", 45e9), ("candrome", None)],
)
def test_a_network_is_told_by_the_name_of_its_cards(place: str, rate: float | None) -> None:
    links, usual = network_of(place, "H100").links, network_of("", "H100").links
    assert links is not None and usual is not None
    assert links.network_bytes_per_s == (rate or usual.network_bytes_per_s)
    assert links.node_bytes_per_s == usual.node_bytes_per_s


def test_fused_kernels_move_what_they_read_and_write() -> None:
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    # tokens 10, 4 of ffn on either side of the gate, two bytes: read 8, write 4; backwards read 8
    # and 4, write 8.
    assert fused_nbytes(operator(Kind.ACTIVATION, forward, 10, 8, 4)) == 10 * 2 * 12
    assert fused_nbytes(operator(Kind.ACTIVATION, backward, 10, 8, 4)) == 10 * 2 * 20
    # Three copies of each of 10 rows of 4 are written, one is read.
    assert fused_nbytes(operator(Kind.PERMUTE, forward, 10, 4, 3)) == 10 * 4 * 2 * 4
    # 40 bytes a logit over both phases.
    loss = [fused_nbytes(operator(Kind.LOSS, phase, 10, 100)) for phase in (forward, backward)]
    assert sum(loss) == 40 * 10 * 100
    # The dense gradient of the table: written and read in two bytes, the fp32 buffer read and
    # written.
    there = fused_nbytes(operator(Kind.EMBEDDING, backward, 1, 8, 1000))
    assert there - fused_nbytes(operator(Kind.EMBEDDING, forward, 1, 8, 1000)) == 8 * 1000 * 12
