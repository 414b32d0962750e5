"""Anything that users copy, pickle, compile, compare or call is as it was without us.

Each case trains twice in processes of its own, with our flag and without: exit codes, losses to the
last bit, random states, what the user has seen, what dynamo compiled and all files are equal.

In one process what dynamo, pickle and the exit have seen of one training would be the other's.
"""

from __future__ import annotations

from pathlib import Path

import hands_asked as hands_asked
import hands_compiled as hands_compiled
import hands_copies as hands_copies
import hands_loop
import hands_saves as hands_saves
import hands_wraps as hands_wraps
import pytest
from hands_loop import CASES, Case
from hands_runs import Pair, differences, flags, missing_records, outcome
from launched import torchrun

STRICT = {
    "fail_on_recompile": (
        *("model", "whole_model", "model_in_place", "all_layers", "forward_function", "late"),
        *("update_function", "evaluation", "backward_pass"),
    ),
    "error_on_recompile": ("all_layers", "late"),
}
"""Ways to compile that are held to compile nothing more after their first steps, and so need not be
tried without that."""
DEAR = ("hands_compiled", "hands_saves")
CHEAP = ("hands_compiled:one_layer",)
ALL = [
    pytest.param(
        case,
        id=name,
        marks=[pytest.mark.slow]
        if case.is_slow or (name.startswith(DEAR) and name not in CHEAP)
        else [],
    )
    for name, case in CASES.items()
    if name.startswith("hands_")
    and name not in [f"hands_compiled:{way}" for way in STRICT["fail_on_recompile"]]
]


def check(pair: Pair, case: Case) -> None:
    bare, watched = pair.outcomes()
    assert bare.exits == (0,) * case.num_ranks, pair.outputs[0][-3000:]
    result = differences(bare, watched)
    assert not result, "\n".join([*result, pair.outputs[1][-2500:]])
    assert "fault" not in pair.outputs[1], pair.outputs[1][-2500:]
    missing = missing_records(pair.records, case)
    assert not missing, "\n".join([*missing, pair.outputs[1][-2500:]])


@pytest.mark.parametrize("case", ALL)
def test_training_is_what_it_was_without_us(tmp_path: Path, case: Case) -> None:
    check(Pair(case, tmp_path), case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stance", "way"), [(s, way) for s, ways in STRICT.items() for way in ways]
)
def test_nothing_is_compiled_for_our_sake(tmp_path: Path, stance: str, way: str) -> None:
    case = CASES[f"hands_compiled:{way}"]
    check(Pair(case, tmp_path, HANDS_STANCE=stance), case)


@pytest.mark.slow
def test_workers_that_all_call_themselves_the_first_are_what_they_were(tmp_path: Path) -> None:
    """With a virtual local rank each worker is number 0 of its own devices."""
    case, homes = CASES["hands_copies:nothing_by_two"], (tmp_path / "bare", tmp_path / "watched")
    for home in homes:
        home.mkdir()
        forerun_flags = flags(home / "calibrated") if home is homes[1] else ()
        command = (hands_loop.__file__, case.name, home, *forerun_flags)
        torchrun(home, *command, options=("--virtual-local-rank",))
    bare, watched = (outcome(home, ()) for home in homes)
    assert len(bare.ended) == case.num_ranks
    assert not differences(bare, watched)
    assert not missing_records(homes[1] / "calibrated", case)
