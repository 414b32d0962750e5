"""Ways to compile a training, each with our flag and without: dynamo's counts, and the losses.

    python benchmarks/compiled.py [--ways model late ...] [--stances default ...]
        [--backends eager inductor] [--keep DIR]

A way is a case of ``tests/support/hands_compiled.py``, trained by two commands at the same time.
Under the stances ``fail_on_recompile`` and ``error_on_recompile`` a further compilation after the
first steps ends the run.  Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from forerun.benchmarks.markdown_text import markdown_head, markdown_row
from forerun.benchmarks.runs.loop_pairs import Compared, Outcome, compare

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


def compile_counts(outcome: Outcome) -> tuple[str, ...]:
    """Return frames compiled of frames seen, compilations, graphs, recompilations; exit code."""
    ended = outcome.ended.get("ended-0.json")
    exits = " ".join(map(str, outcome.exits))
    if ended is None:
        return ("-", "-", "-", "-", exits)
    counts = ended["compiled"]
    frames = f"{counts['frames ok']}/{counts['frames']}"
    return (frames, *(str(counts[n]) for n in ("compilations", "graphs", "recompiles")), exits)


def row(way: str, backend: str, stance: str, compared: Compared) -> str:
    """Return a line of the table."""
    pairs = zip(compile_counts(compared.bare), compile_counts(compared.watched), strict=True)
    bare, watched = (o.ended.get("ended-0.json", {}) for o in (compared.bare, compared.watched))
    is_same = bool(bare) and bare.get("losses") == watched.get("losses")
    text = "; ".join(problem.replace("|", "/") for problem in compared.problems)
    each = [cell for pair in pairs for cell in pair]
    losses = "equal" if is_same else "differ"
    return markdown_row([way, backend, stance, *each, losses, text or "no difference"])


def table(ways: Sequence[str], stances: Sequence[str], backends: Sequence[str], home: Path) -> int:
    """Print a line for each combination as it ends; return how many of them differ."""
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
    """Print the table; return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    stances = hands_compiled.STANCES
    parser.add_argument("--ways", nargs="+", choices=sorted(WAYS), default=[*WAYS])
    parser.add_argument("--stances", nargs="+", choices=stances, default=[*stances])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=["eager"])
    parser.add_argument("--keep", type=Path, help="an empty folder for what runs leave")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        out_dir = args.keep or Path(home)
        num_different = table(args.ways, args.stances, args.backends, out_dir)
    num = len(args.ways) * len(args.stances) * len(args.backends)
    print(f"\n{num_different} of {num} differ")
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
