"""Times since 1970 are told again as the calendar has them."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.records.iso_times import iso_time, with_iso_times


@given(st.datetimes(datetime(1970, 1, 1), datetime(9000, 1, 1), timezones=st.just(timezone.utc)))
def test_a_time_is_read_back_to_the_second(moment: datetime) -> None:
    reread = datetime.fromisoformat(iso_time(moment.timestamp()).replace("Z", "+00:00"))
    assert abs((reread - moment).total_seconds()) <= 1


def test_every_object_inside_is_looked_through_and_nothing_else_changes() -> None:
    value = {"a_unix_s": 0, "in": ({"b_unix_s": 60.0},), "c_unix_s": [0.0, 1.0], "n": 5}
    result = with_iso_times(value)
    assert result["a_iso"] == "1970-01-01T00:00:00Z"
    assert result["in"] == [{"b_unix_s": 60.0, "b_iso": "1970-01-01T00:01:00Z"}]
    assert result["c_iso"] == ["1970-01-01T00:00:00Z", "1970-01-01T00:00:01Z"]
    assert {name: result[name] for name in ("a_unix_s", "c_unix_s", "n")} == {
        "a_unix_s": 0,
        "c_unix_s": [0.0, 1.0],
        "n": 5,
    }
    assert with_iso_times(result) == result


@pytest.mark.parametrize("no_time", [None, True, "now", float("inf"), 1e300])
def test_what_is_no_time_has_no_iso(no_time: object) -> None:
    assert iso_time(no_time) == "" and "a_iso" not in with_iso_times({"a_unix_s": no_time})
