"""What hypothesis draws of loops, and what is found of one with us and without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from drawn_loops import ACTS, COMPILING, Act, trained, watched
from hands_loop import CASES, DEPTH, STEPS
from hands_runs import Outcome, differences, missing_records
from hypothesis import strategies as st

FEWEST, MOST = 3, 8
_OTHERS = sorted({*ACTS} - {*COMPILING})


def acts() -> st.SearchStrategy[list[Act]]:
    """Some things that are done; half of the loops also compile, once."""

    def one(names: Sequence[str]) -> st.SearchStrategy[Act]:
        return st.builds(
            Act,
            step=st.integers(0, STEPS - 1),
            is_after=st.booleans(),
            name=st.sampled_from(names),
            layer=st.integers(0, DEPTH - 1),
        )

    compiling = st.lists(one(COMPILING), max_size=1)
    others = st.lists(one(_OTHERS), min_size=FEWEST, max_size=MOST)
    return st.tuples(compiling, others).map(lambda parts: [*parts[0], *parts[1]])


def found_in_process(drawn: Sequence[Act], home: Path) -> list[str]:
    """Train with and without a session in this process: what differs, and what is not recorded."""
    bare, own = (
        Outcome((), {"here": ended}, {})
        for ended in (
            trained(drawn, home / "bare"),
            watched(drawn, home / "watched", home / "calibrated"),
        )
    )
    return [*differences(bare, own), *unseen(drawn, home / "calibrated")]


def unseen(drawn: Sequence[Act], directory: Path) -> list[str]:
    """What the records lack; operators are seen unless somebody compiles."""
    missing = missing_records(directory, CASES["drawn_loops:drawn"])
    is_compiled = any(act.name in COMPILING for act in drawn)
    return [text for text in missing if not (is_compiled and text.endswith("no operators"))]
