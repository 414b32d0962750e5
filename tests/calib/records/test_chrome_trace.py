"""Chrome traces of old and new releases, and what they hold that is no time."""

from __future__ import annotations

import pytest

from forerun.calib.records.chrome_trace import from_chrome
from forerun.calib.records.kineto_trace import CPU_OP, KERNEL, SHAPES, work_of

TIMES = {"ts": 10, "dur": 4, "pid": 1, "tid": 2}


def event(category: str, name: str, **more: object) -> dict:
    return {"ph": "X", "cat": category, "name": name, **TIMES, **more}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Operator", "cpu_op"),
        ("Kernel", "kernel"),
        ("Memcpy", "gpu_memcpy"),
        ("Memset", "gpu_memset"),
        ("Runtime", "cuda_runtime"),
        ("User Annotation", "user_annotation"),
        ("cuda_driver", "cuda_driver"),
    ],
)
def test_old_names_of_categories_are_those_of_today(old, new):
    (trace_event,) = from_chrome([event(old, "x")])
    assert trace_event.category == new


@pytest.mark.parametrize(
    "bad",
    [
        {"dur": float("inf")},
        {"dur": float("nan")},
        {"dur": -1},
        {"dur": None},
        {"ts": "soon"},
        {"ts": 1e300},
        {"ts": 10**400},
        {"ph": "B"},
    ],
)
def test_an_event_without_a_time_is_left_out(bad):
    assert from_chrome([event("kernel", "gemm", **bad)]) == []


def test_clocks_that_count_from_1970_keep_every_nanosecond():
    whole, parts = from_chrome(
        [
            event("kernel", "a", ts=1683564902163653, dur=26216),
            event("kernel", "b", ts=4458677068265.963, dur=50.57),
        ]
    )
    assert (whole.start_ns, whole.duration_ns) == (1683564902163653_000, 26_216_000)
    assert (parts.start_ns, parts.duration_ns) == (4458677068265_963, 50_570)


def test_details_that_are_none_and_old_names_of_shapes():
    plain, shaped = from_chrome(
        [
            event(CPU_OP, "aten::mm", args=None),
            event(CPU_OP, "aten::mm", args={"Input dims": [[2, 3], [3, 4]], "external id": 5}),
        ]
    )
    assert plain.details == {} and plain.number == 0
    assert shaped.details[SHAPES] == [[2, 3], [3, 4]] and shaped.number == 5


def test_a_correlation_in_the_operations_place_is_no_link():
    # A launch with number 7 under operation 3; operation 7 is another one, earlier.
    events = [
        event(CPU_OP, "aten::add", ts=0, dur=5, args={"External id": 7}),
        event(CPU_OP, "aten::mm", ts=10, dur=9, args={"External id": 3}),
        event("cuda_runtime", "launch", ts=12, args={"External id": 7, "correlation": 7}),
        event(KERNEL, "gemm", ts=40, tid=9, args={"External id": 7, "correlation": 7}),
    ]
    (work,) = work_of(from_chrome(events))
    assert work.call == 3
