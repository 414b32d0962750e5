"""Distinct groups among chosen members, against every choice counted out."""

from __future__ import annotations

from itertools import combinations

import pytest

from forerun.calib.workload.routing import expected_distinct


@pytest.mark.parametrize("num_groups", [1, 2, 3, 5])
@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_the_mean_is_that_of_all_choices(num_groups: int, group_size: int) -> None:
    members = num_groups * group_size
    for num_chosen in range(1, members + 1):
        choices = list(combinations(range(members), num_chosen))
        groups = sum(len({member // group_size for member in choice}) for choice in choices)
        found = expected_distinct(
            num_groups=num_groups, num_chosen=num_chosen, group_size=group_size
        )
        assert found == pytest.approx(groups / len(choices))


def test_nothing_chosen_goes_nowhere() -> None:
    assert expected_distinct(num_groups=4, num_chosen=0) == 0.0
