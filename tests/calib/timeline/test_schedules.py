from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.errors import ConfigError
from forerun.calib.timeline.schedules import Task, TaskKind, num_warmup, stage_program

STAGES, MICROBATCHES = st.integers(1, 9), st.integers(1, 20)


def computed(program: tuple[Task, ...]) -> list[tuple[TaskKind, int]]:
    return [(t.kind, t.microbatch) for t in program if t.kind is not TaskKind.EXCHANGE]


def test_the_last_stage_alternates() -> None:
    found = computed(stage_program(4, 3, 3))
    pairs = [(kind, i) for i in range(3) for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)]
    assert found == pairs


def test_the_first_stage_warms_up_and_cools_down() -> None:
    names = "".join(kind.value[0] for kind, _ in computed(stage_program(4, 6, 0)))
    assert names == "fff" + "fb" * 3 + "bbb"


@given(stages=STAGES, microbatches=MICROBATCHES, data=st.data())
def test_every_pass_runs_once_and_in_order(
    stages: int, microbatches: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    found = computed(stage_program(stages, microbatches, stage))
    for kind in (TaskKind.FORWARD, TaskKind.BACKWARD):
        assert [i for k, i in found if k is kind] == list(range(microbatches))
    in_flight = peak = 0
    for kind, _ in found:
        in_flight += 1 if kind is TaskKind.FORWARD else -1
        peak = max(peak, in_flight)
    assert peak == min(microbatches, stages - stage)
    assert num_warmup(stages, microbatches, stage) == min(microbatches, stages - stage - 1)


@given(stages=st.integers(2, 9), microbatches=MICROBATCHES, data=st.data())
def test_both_sides_of_a_boundary_exchange_the_same_in_the_same_order(
    stages: int, microbatches: int, data: st.DataObject
) -> None:
    upper = data.draw(st.integers(0, stages - 2))
    above, below = (
        [t for t in stage_program(stages, microbatches, s) if t.boundary == upper]
        for s in (upper, upper + 1)
    )
    assert above == below
    assert sum(t.activation >= 0 for t in above) == microbatches
    assert sum(t.gradient >= 0 for t in above) == microbatches


def test_interleaving_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="vp 2: interleaved schedules are not modelled yet"):
        stage_program(4, 8, 0, num_virtual_stages=2)
