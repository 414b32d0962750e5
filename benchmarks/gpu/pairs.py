"""Steps of archived layouts, each predicted from the calibration of each other one.

    python benchmarks/gpu/pairs.py [--alone]

Six layouts of one program that ran on one H200 (``measured/``): 30 ordered pairs, of which twelve
are of one model.  A busy device shows its host's launches rarely, so that a run takes them from the
other runs of its machine, here all of the archives but the two of the pair; with ``--alone`` it
knows its own samples only.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

from forerun.benchmarks.markdown_text import markdown_table
from forerun.calib.advice.planning import Candidate, compare
from forerun.calib.answers.measured_steps import fit_run, known_elsewhere
from forerun.calib.answers.run_measurements import Measurements
from forerun.calib.samples.store import read_table
from forerun.calib.samples.table import SampleTable
from forerun.calib.steps.known_steps import KnownStep
from forerun.calib.steps.live import live_times
from forerun.calib.steps.model import FittedSteps

MEASURED = Path(__file__).parent / "measured"
ARCHIVES = ("h200-2026-11-27", "h200-2026-11-28")
LAYOUTS = (
    "base", "micro-batch-halved", "micro-batch-doubled", "full-recompute", "half-the-layers",
    "half-the-sequence",
)  # fmt: skip
CLEAR_FRAC, SMALL_FRAC, FLAGGED_FRAC = 0.1, 0.05, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One layout predicted from the run of another, and what was measured."""

    running: str
    other: str
    candidate: Candidate
    true_s: float
    true_frac: float
    """Change of the step against the running layout."""

    @property
    def off_frac(self) -> float:
        """Error of the step."""
        return self.candidate.step_time_s / self.true_s - 1

    @property
    def is_inside(self) -> bool:
        """True if the step lies inside its interval."""
        return self.candidate.low_s <= self.true_s <= self.candidate.high_s

    @property
    def is_flagged(self) -> bool:
        """True if the layout is named as one that would or may wait for its host."""
        return self.candidate.host_wait_high_frac >= FLAGGED_FRAC


def main() -> int:
    """Print a row for each pair, and the sums."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--alone", action="store_true", help="without the other runs' host times")
    found = [*pairs(read_tables(), is_alone=parser.parse_args().alone)]
    heads = ("running", "other", "error", "held", "gain said", "90 %", "true", "waits for the host")
    figures = [f"- {name}: {value:.1f}" for name, value in sums(found).items()]
    print(markdown_table(heads, [_row(one) for one in found]), "", *figures, sep="\n")
    return 0


def read_tables() -> Mapping[str, SampleTable]:
    """Return the archived sample tables by the name of their run."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ARCHIVES:
            with tarfile.open(MEASURED / f"{name}.tar.gz") as packed:
                packed.extractall(folder, filter="data")
        paths = sorted(Path(folder).rglob("*.parquet"))
        return {
            path.parent.name if path.stem == "samples" else path.stem: read_table(path)
            for path in paths
            if path.stem != "steps"
        }


def pairs(tables: Mapping[str, SampleTable], *, is_alone: bool = False) -> Iterator[Pair]:
    """Yield the ordered pairs of the layouts."""
    runs = {name: Measurements(table=table) for name, table in tables.items()}
    configs = {name: run.config for name, run in runs.items()}
    known = {name: known_elsewhere(run, configs[name]) for name, run in runs.items()}
    for running, other in permutations(LAYOUTS, 2):
        others = [] if is_alone else [known[n] for n in tables if n not in (running, other)]
        steps = steps_of(runs[running], others)
        (candidate,) = compare(configs[running], [configs[other]], steps)
        true_s = known[other].time_s
        yield Pair(
            running=running,
            other=other,
            candidate=candidate,
            true_s=true_s,
            true_frac=true_s / known[running].time_s - 1,
        )


def steps_of(measured: Measurements, others: list[KnownStep]) -> FittedSteps:
    """Return the step model of a run, with nothing of the others but their launch times."""
    base = live_times(measured.calibration, measured.config, others)
    return fit_run(measured, base, (), measured.config).steps


def sums(found: Sequence[Pair]) -> Mapping[str, float]:
    """Return the sums over all pairs, then over those of one model; shares in percent."""
    steps = [p.candidate for p in found]
    far = [p for p in found if abs(p.off_frac) > CLEAR_FRAC]
    gains = [p for p in found if p.candidate.is_comparable]
    halves = [(p.candidate.ratio.high - p.candidate.ratio.low) / 2 for p in gains]
    busy = [
        half
        for p, half in zip(gains, halves, strict=True)
        if p.candidate.host_wait_high_frac < FLAGGED_FRAC
    ]
    clear = [p for p in gains if abs(p.true_frac) >= CLEAR_FRAC]
    large = [p for p in gains if abs(p.true_frac) >= SMALL_FRAC]
    return {
        "mean error of the step": _mean(abs(p.off_frac) for p in found),
        "intervals that hold": sum(p.is_inside for p in found),
        "pairs": len(found),
        "median half-width of the step": 100
        * statistics.median(math.log(one.high_s / one.low_s) / 2 for one in steps),
        "off by more than 10 %": len(far),
        "of these named as waiting": sum(p.is_flagged for p in far),
        "gains of one model": len(gains),
        "their mean error": _mean(abs(p.candidate.time_frac - p.true_frac) for p in gains),
        "their intervals that hold": sum(
            p.candidate.ratio.low <= 1 + p.true_frac <= p.candidate.ratio.high for p in gains
        ),
        "their half-width": _mean(halves),
        "half-width where no host is waited for": _mean(busy),
        "cannot tell": sum(p.candidate.is_unsure for p in clear),
        "of those that differ by 10 %": len(clear),
        "sign right": sum(p.candidate.time_frac * p.true_frac > 0 for p in large),
        "of those that differ by 5 %": len(large),
    }


def _mean(fracs: Iterable[float]) -> float:
    """Return the mean of shares, in percent; 0 without any."""
    return 100 * statistics.fmean([*fracs] or [0.0])


def _row(pair: Pair) -> list[str]:
    one = pair.candidate
    is_gain = one.is_comparable
    return [
        pair.running,
        pair.other,
        f"{pair.off_frac:+.1%}",
        "yes" if pair.is_inside else "no",
        f"{one.time_frac:+.1%}" if is_gain else "",
        f"{one.ratio.low - 1:+.0%} to {one.ratio.high - 1:+.0%}" if is_gain else "",
        f"{pair.true_frac:+.1%}",
        f"{one.host_wait_frac:.0%} (up to {one.host_wait_high_frac:.0%})",
    ]


if __name__ == "__main__":
    sys.exit(main())
