"""Loops drawn by hypothesis, and differences of one with us and without."""

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
    """Draw different acts, each at one step or two; half of the loops also compile."""
    compiling = st.lists(st.sampled_from(COMPILING), max_size=1)
    others = st.lists(st.sampled_from(_OTHERS), min_size=FEWEST, max_size=MOST, unique=True)
    return st.builds(lambda one, more: [*one, *more], compiling, others).flatmap(_placed)


def _placed(names: Sequence[str]) -> st.SearchStrategy[list[Act]]:
    place = st.tuples(st.integers(0, STEPS - 1), st.booleans(), st.integers(0, DEPTH - 1))
    places = st.lists(place, min_size=1, max_size=2, unique=True)
    return st.tuples(*(places for _ in names)).map(
        lambda drawn: [
            Act(step, is_after, name, layer)
            for name, at in zip(names, drawn, strict=True)
            for step, is_after, layer in (at[:1] if name in COMPILING else at)
        ]
    )


def differences_in_process(drawn: Sequence[Act], home: Path) -> list[str]:
    """Train with and without a session in this process; return differences and lost records."""
    bare, watched_outcome = (
        Outcome((), {"here": ended}, {})
        for ended in (
            trained(drawn, home / "without"),
            watched(drawn, home / "watched", home / "calibrated"),
        )
    )
    return [*differences(bare, watched_outcome), *unrecorded(drawn, home / "calibrated")]


def unrecorded(drawn: Sequence[Act], directory: Path) -> list[str]:
    """Return what the records lack; some may be missing if an act compiles in a hooked step."""
    is_compiled = any(act.name in COMPILING for act in drawn)
    case = CASES["drawn_loops:drawn"]
    missing = missing_records(directory, case, fewest=1 if is_compiled else None)
    return [text for text in missing if not (is_compiled and text.endswith("no operators"))]
