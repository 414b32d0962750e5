"""Loops that nobody thought of: drawn acts of a user, once with a session and once without.

``FORERUN_DRAWN_LOOPS=300`` draws as many.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from drawn_loops import Act, acts, differences_in_process
from hypothesis import HealthCheck, Phase, example, given, settings

NUM_EXAMPLES = int(os.environ.get("FORERUN_DRAWN_LOOPS", "20"))


def placed(name: str) -> list[Act]:
    """Return an act in a hooked step, after it, and in a later one."""
    return [Act(7, False, name, 0), Act(7, True, name, 1), Act(11, False, name, 0)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=NUM_EXAMPLES,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)
@example([Act(7, False, "deepcopy", 0), Act(8, True, "pickle", 0), Act(9, False, "clip", 0)])
@example([Act(4, False, "copy", 0), Act(4, True, "save", 0), Act(12, True, "average", 0)])
@example([*placed("pickle"), *placed("average"), *placed("replace a child")])
@example([*placed("evaluate"), *placed("clip"), *placed("accumulate"), *placed("state_dict")])
@example([*placed("save in a process"), *placed("save in a thread"), Act(12, True, "pickle", 0)])
@given(acts())
def test_a_drawn_loop_is_what_it_was_without_us(drawn: list[Act]) -> None:
    with tempfile.TemporaryDirectory() as home:
        result = differences_in_process(drawn, Path(home))
    assert not result, "\n".join(result)
