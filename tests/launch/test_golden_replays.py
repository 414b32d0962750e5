"""A companion that is told of a recorded run again logs, sends and writes what it did.

Rows, tables, alerts and summary are those that a W&B run gets; the page is ``report.html`` as text.
"""

from __future__ import annotations

import pytest

from forerun.benchmarks.golden_answers import (
    REPLAYED,
    answer_differences,
    replay,
)


@pytest.mark.parametrize("name", REPLAYED)
@pytest.mark.usefixtures("golden_home")
def test_a_companion_answers_as_it_did(name: str) -> None:
    assert not answer_differences(f"replay_{name}", replay(name))
