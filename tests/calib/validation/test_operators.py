"""Protocols of operators keep to their word: nothing that is scored was trained on."""

from __future__ import annotations

import pandas as pd
import pytest
from planted_operators import Method, planted_operators

from forerun.calib import validation
from forerun.calib.validation import PROTOCOLS, score_operators, score_rows


@pytest.fixture
def planted() -> pd.DataFrame:
    return planted_operators()


@pytest.mark.parametrize("protocol", PROTOCOLS["operators"])
def test_planted_times_are_found_on_rows_that_were_not_seen(
    planted: pd.DataFrame, protocol: str
) -> None:
    method = Method()
    rows = score_rows(score_operators(planted, protocol, range(2), fit=method.fit), "t")
    assert [r["group"] for r in rows] == [
        *("all", "qkv/forward", "qkv/backward", "fc1/forward", "fc1/backward")
    ]
    assert all(r["mape_frac"] < 1e-9 and r["coverage_90_frac"] == 1 for r in rows)
    for model in method.models:
        seen, predicted = (
            {name.split("/")[0]: set(map(tuple, sizes)) for name, sizes in side.items()}
            for side in (model.seen, model.predicted)
        )
        assert predicted and not any(seen[name] & predicted[name] for name in predicted)


def test_phases_of_a_shape_fall_on_one_side_whatever_their_order(planted: pd.DataFrame) -> None:
    mixed = planted.sample(frac=1, random_state=1)
    for frame in (planted, mixed):
        method = Method()
        score_operators(frame, "random", [0], fit=method.fit)
        for model in method.models:
            for side in (model.seen, model.predicted):
                for name in ("qkv", "fc1"):
                    sizes = [sorted(side[f"{name}/{phase}"]) for phase in ("forward", "backward")]
                    assert sizes[0] == sizes[1]


def test_each_degree_is_left_out_once_and_no_seed_changes_that(planted: pd.DataFrame) -> None:
    method = Method()
    frame = score_operators(planted, "leave_tp", range(5), fit=method.fit)
    assert len(frame) == len(planted)
    assert len(method.models) == planted["device"].nunique() * planted["tp"].nunique()


def test_draws_pool_and_do_not_depend_on_other_operators(planted: pd.DataFrame) -> None:
    alone = planted[planted["group"] == "fc1"]
    one, other = (
        score_operators(frame, "random", [0, 3], fit=Method().fit) for frame in (alone, planted)
    )
    among = other[other["group"].str.startswith("fc1")]
    pd.testing.assert_frame_equal(one, among.reset_index(drop=True))
    assert len(one) == 2 * len(alone) / 5


def test_flagged_rows_are_neither_fitted_nor_scored(planted: pd.DataFrame) -> None:
    bad = planted.assign(
        time_s=planted["time_s"].where(planted.index % 3 > 0, 1.0),
        flag=["bad" if i % 3 == 0 else "" for i in planted.index],
    )
    frame = score_operators(bad, "random", [0], fit=Method().fit)
    assert all(r["mape_frac"] < 1e-9 for r in score_rows(frame, "t"))


def test_big_groups_are_capped(planted: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MAX_ROWS", 10)
    method = Method()
    frame = score_operators(planted, "random", [0], fit=method.fit)
    assert {len(sizes) for model in method.models for sizes in model.seen.values()} == {10}
    assert set(frame.groupby("group").size()) == {10 * planted["device"].nunique()}


def test_few_rows_carry_no_protocol(planted: pd.DataFrame) -> None:
    few = planted.groupby(["device", "group", "phase"]).head(14)
    assert score_operators(few, "random", [0], fit=Method().fit).empty
    one = planted[planted["tp"] == 1]
    assert score_operators(one, "leave_tp", [0], fit=Method().fit).empty
