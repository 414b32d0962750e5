"""Protocols keep to their word: nothing that is scored was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import pytest
from planted_operators import Method, planted_operators

from forerun.benchmarks.protocols import scores
from forerun.benchmarks.protocols.operator_samples import operator_samples, splits
from forerun.benchmarks.protocols.operators import (
    NUM_PROBES,
    OPERATOR_PROTOCOLS,
    validate_operators,
)
from forerun.benchmarks.protocols.scores import score_rows
from forerun.calib.fit._device_transfer import transfer_to_device
from forerun.calib.fit.batches import Timed

pytestmark = pytest.mark.nightly

WITHIN = [name for name in OPERATOR_PROTOCOLS if not name.startswith(("leave_gpu", "leave_device"))]


@pytest.fixture
def planted() -> pd.DataFrame:
    return planted_operators()


def method_arguments(method: Method) -> dict[str, Any]:
    return {"fit": method.fit, "transfer": method.transfer}


@pytest.mark.parametrize("protocol", WITHIN)
def test_planted_times_are_found_on_rows_that_were_not_seen(
    planted: pd.DataFrame, protocol: str
) -> None:
    method = Method()
    frame = validate_operators(
        planted, seeds=range(2), protocols=[protocol], **method_arguments(method)
    )
    rows = score_rows(frame, "t")
    assert [r["group"] for r in rows] == [
        *("all", "qkv/forward", "qkv/backward", "fc1/forward", "fc1/backward")
    ]
    assert all(r["mape_frac"] < 1e-9 and r["coverage_90_frac"] == 1 for r in rows)
    for model in method.models:
        for name, test_rows in model.predicted.items():
            seen = {tuple(row) for row in model.seen[name]}
            assert not seen & {tuple(row) for row in test_rows}


@pytest.mark.parametrize("protocol", WITHIN)
def test_phases_of_a_shape_fall_on_one_side(planted: pd.DataFrame, protocol: str) -> None:
    for samples in operator_samples(planted):
        for _, split in splits(samples, protocol, 0):
            assert not (split.train & split.test).any()
            forward, backward = (
                {tuple(row) for row in cell.where(split.test).batch.sizes.tolist()}
                for cell in samples.cells
            )
            assert forward == backward and forward


def test_large_shapes_are_left_out_of_small_to_large(planted: pd.DataFrame) -> None:
    for samples in operator_samples(planted):
        ((_, split),) = splits(samples, "small_to_large", 0)
        assert split.train.sum() == 40 and split.test.sum() == 16
        assert samples.work[split.train].max() <= samples.work[split.test].min()


@pytest.mark.parametrize(("protocol", "few"), [("few_8", 8), ("few_24", 24)])
def test_few_means_so_many_of_each_operator(planted: pd.DataFrame, protocol: str, few: int) -> None:
    for samples in operator_samples(planted):
        ((_, split),) = splits(samples, protocol, 0)
        assert split.train.sum() == few and split.test.sum() == len(samples) - few


def test_each_degree_is_left_out_once(planted: pd.DataFrame) -> None:
    for samples in operator_samples(planted):
        results = list(splits(samples, "leave_tp", 0))
        assert [label for label, _ in results] == ["tp 1", "tp 2", "tp 4"]
        assert sum(split.test for _, split in results).tolist() == [1] * len(samples)


def test_another_device_is_scored_without_its_probes(planted: pd.DataFrame) -> None:
    frame = validate_operators(
        planted, seeds=[0], protocols=["leave_gpu"], **method_arguments(Method())
    )
    assert all(r["mape_frac"] < 1e-9 for r in score_rows(frame, "t"))
    assert set(frame.groupby("group").size()) == {2 * (80 - NUM_PROBES)}


def test_one_device_cannot_carry_leave_gpu(planted: pd.DataFrame) -> None:
    one = planted[planted["device"] == "one"]
    assert validate_operators(one, protocols=["leave_gpu"], **method_arguments(Method())).empty


def test_flagged_rows_are_neither_fitted_nor_scored(planted: pd.DataFrame) -> None:
    bad = planted.assign(
        time_s=planted["time_s"].where(planted.index % 3 > 0, 1.0),
        flag=["bad" if i % 3 == 0 else "" for i in planted.index],
    )
    frame = validate_operators(bad, seeds=[0], protocols=["random"], **method_arguments(Method()))
    assert all(r["mape_frac"] < 1e-9 for r in score_rows(frame, "t"))


def test_a_split_that_no_seed_changes_runs_once(planted: pd.DataFrame) -> None:
    method = Method()
    validate_operators(
        planted, seeds=range(5), protocols=["small_to_large"], **method_arguments(method)
    )
    assert len(method.models) == planted["device"].nunique()


def test_big_groups_are_capped_by_a_seeded_draw(
    planted: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "MAX_ROWS", 10)
    (samples, *_) = operator_samples(planted)
    drawn = [next(splits(samples, "random", seed))[1] for seed in (0, 0, 1)]
    assert {int(split.train.sum()) for split in drawn} == {10}
    assert (drawn[0].train == drawn[1].train).all()
    assert (drawn[0].train != drawn[2].train).any()


def test_a_draw_does_not_depend_on_other_operators(planted: pd.DataFrame) -> None:
    alone = operator_samples(planted[planted["group"] == "fc1"])[0]
    among = next(s for s in operator_samples(planted) if s.group == "fc1")
    one, other = (next(splits(s, "random", 3))[1] for s in (alone, among))
    assert (one.test == other.test).all()


def test_few_rows_carry_only_what_fits(planted: pd.DataFrame) -> None:
    few = planted[planted["device"] == "one"].groupby(["group", "phase"]).head(14)
    drawn = [name for name in WITHIN if name != "leave_tp"]
    frame = validate_operators(few, protocols=drawn, **method_arguments(Method()))
    assert set(frame["protocol"]) == {"few_8"}


@pytest.mark.parametrize(("protocol", "number"), [("leave_device_0", 0), ("leave_device", 32)])
def test_probes_of_another_device_are_not_scored(
    planted: pd.DataFrame, protocol: str, number: int
) -> None:
    """Each operator is probed so many times at most, and each sample is probed or scored."""
    seen: list[int] = []

    def moved(model: Any, *, device: str, probes: Mapping[str, Timed]) -> Any:
        seen.extend(len(rows) for rows in probes.values())
        return transfer_to_device(model, device=device, probes=probes)

    frame = validate_operators(planted, seeds=[0], protocols=[protocol], transfer=moved)
    assert max(seen, default=0) <= number and bool(seen) is bool(number)
    usable = planted[planted["flag"] == ""]
    assert 0 < len(frame) <= len(usable) - sum(seen)
