"""Share of planted passes that lies in operators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from forerun.benchmarks.coverage import Row, kind_table, shares_of, table
from forerun.calib.records.record_kinds import OperatorRecord, PhaseRecord
from forerun.calib.workload.operators import OperatorKind, Phase

pytestmark = pytest.mark.slow


def passed(name: str, start_ns: int, duration_ns: int, **more: int) -> PhaseRecord:
    return PhaseRecord(
        step=4,
        window=0,
        name=name,
        microbatch=0,
        start_ns=start_ns,
        duration_ns=duration_ns,
        **more,
    )


def ran(phase: Phase, start_ns: int, duration_ns: int, kind: OperatorKind) -> OperatorRecord:
    return OperatorRecord(
        step=4, window=0, microbatch=0, kind=kind, phase=phase, shape=(8, 8), element_nbytes=4,
        layer=0, start_ns=start_ns, duration_ns=duration_ns,
    )  # fmt: skip


def test_a_share_is_that_of_the_pass_without_waits_and_without_our_time() -> None:
    norm, rest = OperatorKind.NORM, OperatorKind.RESIDUAL
    run: Any = SimpleNamespace(
        records={
            0: [
                passed("forward-compute", 0, 130, wait_ns=20, hook_ns=10),
                passed("backward-compute", 200, 300),
                passed("optimizer", 500, 40),
                ran(Phase.FORWARD, 10, 40, norm),
                ran(Phase.FORWARD, 50, 20, rest),
                ran(Phase.FORWARD, 140, 999, OperatorKind.LOGITS),  # between the passes
                ran(Phase.RECOMPUTE, 210, 60, norm),
                ran(Phase.BACKWARD, 300, 90, norm),
                ran(Phase.STEP, 500, 40, OperatorKind.OPTIMIZER),
            ]
        }
    )
    assert shares_of(run) == pytest.approx(
        {"forward-compute": 60 / 100, "backward-compute": 150 / 300, "residual": 20 / 400}
    )


def test_a_row_names_what_did_not_fire_and_a_launch_that_failed() -> None:
    row = Row(
        client="a", layout="b", installed={"norm": 4, "loss": 1}, fired={"norm": 3, "loss": 1}
    )
    failed = Row(client="a", layout="c", problem="no such option")
    lines = table([row, failed]).splitlines()
    assert "| 4 of 5 | 80% |" in lines[2] and "norm 3/4" in lines[2]
    assert "no such option" in lines[3]


def test_kinds_are_summed_over_the_layouts_of_a_client() -> None:
    one = Row(client="a", layout="b", installed={"norm": 4, "norm:backward": 4})
    one.fired = {"norm": 4, "norm:backward": 3}
    two = Row(client="a", layout="c", installed={"norm": 2}, fired={"norm": 2})
    other = Row(client="d", layout="b", installed={"loss": 1}, fired={"loss": 0})
    assert kind_table([one, two, other]).splitlines()[2:] == [
        "| norm | 9/10 |  |",
        "| loss |  | 0/1 |",
    ]
