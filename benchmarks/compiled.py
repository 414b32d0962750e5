"""Ways to compile a training, each with our flag and without: what dynamo does, and the losses.

    python benchmarks/compiled.py [--ways model late ...] [--stances default ...]
        [--backends eager inductor] [--keep DIR]

A way is a case of ``tests/support/hands_compiled.py``, trained by two commands at the same time.
Under the stances ``fail_on_recompile`` and ``error_on_recompile`` a compilation more after the
first steps ends the run.  Status 1 where anything differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from forerun.benchmarks.markdown_text import markdown_head, markdown_row
from forerun.benchmarks.runs.hands_pairs import Compared, Outcome, compare

import hands_compiled  # isort: skip
from hands_loop import CASES  # isort: skip

WAYS = {
    name.partition(":")[2]: case
    for name, case in CASES.items()
    if name.startswith(f"{hands_compiled.__name__}:")
}
BACKENDS = ("eager", "inductor")
HEAD = (
    *("way", "backend", "stance", "frames", "with us", "compilations", "with us", "graphs"),
    *("with us", "recompiles", "with us", "exit", "with us", "losses", "what differs"),
)


def numbers(outcome: Outcome) -> tuple[str, ...]:
    """Frames compiled of those looked at, all compilations, graphs, those again; exit code."""
    ended = outcome.ended.get("ended-0.json")
    exits = " ".join(map(str, outcome.exits))
    if ended is None:
        return ("-", "-", "-", "-", exits)
    found = ended["compiled"]
    frames = f"{found['frames ok']}/{found['frames']}"
    return (frames, *(str(found[n]) for n in ("compilations", "graphs", "recompiles")), exits)


def row(way: str, backend: str, stance: str, compared: Compared) -> str:
    """A line of the table."""
    pairs = zip(numbers(compared.bare), numbers(compared.watched), strict=True)
    bare, watched = (o.ended.get("ended-0.json", {}) for o in (compared.bare, compared.watched))
    is_same = bool(bare) and bare.get("losses") == watched.get("losses")
    text = "; ".join(problem.replace("|", "/") for problem in compared.problems)
    each = [cell for pair in pairs for cell in pair]
    losses = "equal" if is_same else "differ"
    return markdown_row([way, backend, stance, *each, losses, text or "no difference"])


def table(ways: Sequence[str], stances: Sequence[str], backends: Sequence[str], home: Path) -> int:
    """Print a line for each combination as it ends; how many of them differ."""
    num_different = 0
    print(markdown_head(HEAD), flush=True)
    for backend in backends:
        for way in ways:
            for stance in stances:
                compared = compare(
                    WAYS[way],
                    home / f"{way}-{backend}-{stance}",
                    HANDS_BACKEND=backend,
                    HANDS_STANCE=stance,
                )
                num_different += bool(compared.problems)
                print(row(way, backend, stance, compared), flush=True)
    return num_different


def main() -> int:
    """Print the table; 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    stances = hands_compiled.STANCES
    parser.add_argument("--ways", nargs="+", choices=sorted(WAYS), default=[*WAYS])
    parser.add_argument("--stances", nargs="+", choices=stances, default=[*stances])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=["eager"])
    parser.add_argument("--keep", type=Path, help="an empty folder for what runs leave")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        kept = asked.keep or Path(home)
        num_different = table(asked.ways, asked.stances, asked.backends, kept)
    num = len(asked.ways) * len(asked.stances) * len(asked.backends)
    print(f"\n{num_different} of {num} differ")
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
