"""Ranks agree to leave out calls for which NCCL would allocate memory that one of them lacks.

Only real ranks have to agree over gloo before any of them leaves a call out.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from launched import torchrun

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[2] / "support"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    done = torchrun(tmp_path_factory.mktemp("ranks"), str(SUPPORT / "probed_ranks.py"))
    lines = dict(re.findall(r"found (\d) (\{.*\})", done.stdout))
    return [json.loads(lines[rank]) for rank in ("0", "1")]


def test_a_group_without_a_description_carries_by_its_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["carriers"] == {
            "is_the_group": True,
            "total": 2.0,
            "of_no_layout": True,
            "of_other_ranks": True,
        }


def test_a_fresh_group_needs_what_nccl_may_take_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    """One rank has 200 MB: a connection takes up to 294 MiB for messages and 588 for the rest."""
    first, second = (rank["fresh"] for rank in ranks)
    assert first["ran"] == second["ran"] == {}
    assert first["remarks"] == second["remarks"]
    assert "not probed: send over dp: a rank lacks 294 MiB that NCCL may take" in first["remarks"]
    assert any(
        re.fullmatch(r"not probed: all_reduce over dp: a rank lacks 588 MiB .*", remark)
        for remark in first["remarks"]
    )
    for rank in (first, second):
        assert rank["is_done"] and rank["is_as_before"]


def test_what_the_run_calls_itself_is_probed(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["used"] for rank in ranks)
    assert first["ran"] == second["ran"]
    assert set(first["ran"]) == {"all_reduce"}
    assert first["remarks"] == second["remarks"]
    assert not [remark for remark in first["remarks"] if "all_reduce" in remark]
    for rank in (first, second):
        assert rank["is_done"] and rank["is_as_before"]
