"""Random training loops, each with us and without: user actions on the model at random steps.

    python benchmarks/hands.py [--loops 300] [--launches 30] [--seed 1] [--keep DIR]

``--loops`` are trained in this process, with a session of a plain loop and without; ``--launches``
by commands of their own, with our flag and without.  Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.runs.loop_pairs import compare

from drawn_acts import acts, differences_in_process, unrecorded  # isort: skip
from drawn_loops import ACTS, Act, to_text  # isort: skip
from hands_loop import CASES, Case  # isort: skip

Loop = list[Act]
Finds = Callable[[Loop, Path], Sequence[str]]
MOST_SHOWN = 20


def drawn_loops(number: int, start: int) -> list[Loop]:
    """Draw ``number`` loops with hypothesis from a seed."""
    loops: list[Loop] = []

    @seed(start)
    @settings(
        max_examples=max(1, number),
        phases=(Phase.generate,),
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(acts())
    def collect(drawn: Loop) -> None:
        loops.append(drawn)

    if number:
        collect()
    return loops[:number]


def differences_in_launches(drawn: Loop, home: Path) -> list[str]:
    """Return the differences between two commands."""
    known = CASES["drawn_loops:drawn"]
    bare = Case(known.train, 1, known.num_hooked, False, False, False)
    compared = compare(bare, home, fewest=1, HANDS_ACTS=to_text(drawn))
    is_there = not any(compared.watched.exits)
    missing = unrecorded(drawn, home / "watched" / "calibrated") if is_there else []
    return [*dict.fromkeys([*compared.problems, *missing])]


def train_all(loops: Sequence[Loop], find: Finds, home: Path) -> list[str]:
    """Return a line for each loop that differs: its acts, and the first difference."""
    lines = []
    for number, drawn in enumerate(loops):
        try:
            differences = find(drawn, home / str(number))
        except Exception as err:
            differences = [f"{type(err).__name__}: {err}"]
        if differences:
            lines.append(f"{to_text(drawn)}: {differences[0]}")
            print(f"differs: {lines[-1]}", file=sys.stderr, flush=True)
    return lines


def counts(loops: Sequence[Loop]) -> Counter[str]:
    """Count how often each act was drawn."""
    return Counter(act.name for drawn in loops for act in drawn)


def main() -> int:
    """Train, print the tables; return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loops", type=int, default=300)
    parser.add_argument("--launches", type=int, default=30)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--keep", type=Path, help="an empty folder for what runs leave")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    ways: dict[str, tuple[list[Loop], Finds]] = {
        "one process": (drawn_loops(args.loops, args.seed), differences_in_process),
        "launches": (drawn_loops(args.launches, args.seed + 1), differences_in_launches),
    }
    rows, lines = [], []
    with tempfile.TemporaryDirectory() as home:
        for name, (loops, find) in ways.items():
            start_s = time.perf_counter()
            differences = train_all(loops, find, (args.keep or Path(home)) / name.replace(" ", "-"))
            lines += differences
            time_s = time.perf_counter() - start_s
            rows.append([name, args.seed, len(loops), f"{time_s:.0f} s", len(differences)])
    print(markdown_table(["where", "seed", "loops", "time", "differ"], rows))
    each = [counts(loops) for loops, _ in ways.values()]
    drawn = [[name, *(count[name] for count in each)] for name in ACTS]
    print("\n" + markdown_table(["act", *ways], drawn))
    for line in lines[:MOST_SHOWN]:
        print(f"\n- {line}")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
