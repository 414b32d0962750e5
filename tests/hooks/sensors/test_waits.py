"""Who is to blame for the time in which the step's stream waited for another."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.marks._waits import TransferTimes, exposures

MOMENTS = st.integers(0, 1_000_000)


def transfer(issue_ns: int, end_ns: int, *, is_known: bool = True) -> TransferTimes:
    return TransferTimes(
        issue_ns=issue_ns, end_ns=end_ns, exposed_ns=0, is_sync=True, is_known=is_known,
        is_broken=False, is_aside=True,
    )  # fmt: skip


def test_a_stall_is_of_the_transfer_that_ends_it_and_of_those_before_it() -> None:
    times = {1: transfer(0, 50_000), 2: transfer(50_000, 90_000), 3: transfer(60_000, 200_000)}
    assert exposures([(20_000, 90_000)], times) == {2: 40_000, 1: 30_000}


def test_what_computes_on_the_other_stream_is_no_transfers() -> None:
    assert exposures([(60_000, 90_000)], {1: transfer(0, 50_000)}) == {}
    assert exposures([(40_000, 90_000)], {1: transfer(0, 50_000)}) == {1: 10_000}
    assert exposures([(0, 50_000)], {1: transfer(0, 50_000, is_known=False)}) == {}


@given(
    st.lists(MOMENTS, unique=True, max_size=20),
    st.lists(st.tuples(MOMENTS, MOMENTS), max_size=20),
)
def test_no_moment_counts_twice_and_none_without_a_transfer(
    moments: list[int], spans: list[tuple[int, int]]
) -> None:
    ordered = sorted(moments)
    stalls = [pair for place, pair in enumerate(pairwise(ordered)) if place % 2 == 0]
    times = {n: transfer(min(span), max(span)) for n, span in enumerate(spans)}
    result = exposures(stalls, times)
    for number, exposed_ns in result.items():
        inside = sum(
            max(0, min(end, times[number].end_ns) - max(begin, times[number].issue_ns))
            for begin, end in stalls
        )
        assert 0 < exposed_ns <= inside
    assert sum(result.values()) <= sum(end - begin for begin, end in stalls)
