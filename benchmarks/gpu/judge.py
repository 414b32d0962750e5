"""A page that compares the results of ``collect.py`` with their bars; runs anywhere, later.

    python benchmarks/gpu/judge.py FOLDER|ARCHIVE... [--out FILE]

Several archives are merged, as each part has one; for a measurement in both, the later one counts.
Exit codes: 0 all bars met, 1 some missed, failed, or not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from forerun.benchmarks.gpu.collect import MEASUREMENTS
from forerun.benchmarks.gpu.scores import scores, sections
from forerun.benchmarks.markdown_text import markdown_table

UNSEEN = (
    "Several ranks on NVLink or InfiniBand, DeepEP, NVLS and userbuffers were not measured, "
    "whatever stands above; Transformer Engine only where the first table has its version."
)
_MOST_BYTES = 4 << 20
"""Largest size of one file of an archive, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Upper or lower limit of a figure."""

    measurement: str
    figure: str
    words: str
    most: float | None = None
    least: float | None = None

    def is_met(self, value: float) -> bool:
        """Return True if the value passes neither limit."""
        return (self.most is None or value <= self.most) and (
            self.least is None or value >= self.least
        )

    @property
    def text(self) -> str:
        """The bar in a table.

        >>> Bar(measurement="", figure="", words="", most=2e-06).text
        'at most 2e-06'
        """
        ends = (("at most", self.most), ("at least", self.least))
        return ", ".join(f"{word} {end:g}" for word, end in ends if end is not None)


def _bar(place: str, words: str, *, most: float | None = None, least: float | None = None) -> Bar:
    measurement, _, figure = place.partition(".")
    return Bar(measurement=measurement, figure=figure, words=words, most=most, least=least)


def _run_bars() -> Iterator[Bar]:
    for name in ("base", "moe"):
        yield _bar(f"{name}.num_zero_durations", "records of 0 ns", most=0)
        yield _bar(f"{name}.num_faults", "faults of hooks", most=0)
        yield _bar(f"{name}.num_silent", "hooks that never fired", most=0)
        yield _bar(f"{name}.hooked_frac", "hooked steps against bare ones", most=0.03)
        yield _bar(f"{name}.first_answer_after", "steps from the window to its answer", most=6)


BARS = (
    *_run_bars(),
    _bar("scores.is_first", "predictions were written before the sweep", least=1),
    _bar("scores.base_drift", "slowest run of the base against its fastest", most=0.05),
    _bar("scores.gain_error", "mean error of gains, in log", most=0.04),
    _bar("scores.num_wrong_signs", "wrong signs of gains beyond 5 %", most=0),
    _bar("scores.gain_coverage", "gains inside their interval", least=0.85),
    _bar("scores.gain_half_width", "mean half-width of a gain", most=0.08),
    _bar("scores.cannot_tell", "no answer where 10 % or more are true", most=0.25),
    _bar("scores.regret", "the plan's first row against the best", most=0.05),
    _bar("scores.memory_error", "largest error of the peak memory", most=0.05),
    _bar("scores.shard_error", "mean error of TP and PP shards' passes", most=0.05),
    _bar("scores.hooked_frac", "a hooked step, launch-bound", most=0.03),
    _bar("two_ranks.num_other_losses", "layouts with losses that hooks have changed", most=0),
    _bar("two_ranks.num_zero_durations", "records of 0 ns", most=0),
    _bar("two_ranks.num_exposed_too_long", "transfers exposed for longer than they took", most=0),
    _bar("two_ranks.num_unsteady_ranks", "ranks whose steps differ in collectives", most=0),
    _bar("two_ranks.num_answered", "layouts that were answered in time", least=4),
)


def main() -> int:
    """Read, judge, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("found", type=Path, nargs="+", help="folders or archives of collect.py")
    parser.add_argument("--out", type=Path, help="default: printed")
    args = parser.parse_args()
    known: dict[str, dict] = {}
    for place in args.found:
        known |= dict(read(place))
    text, is_met = page(known)
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0 if is_met else 1


def read(place: Path) -> Iterator[tuple[str, dict]]:
    """Yield the measurements of a folder or an archive by name; other files are skipped."""
    known = {each.name for each in MEASUREMENTS} | {bar.measurement for bar in BARS}
    names = {f"{name}.json": name for name in known}
    for file, text in _archived(place) if place.is_file() else _laid(place):
        if file in names:
            yield names[file], json.loads(text)


def _laid(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*.json")):
        yield path.name, path.read_text(encoding="utf-8")


def _archived(place: Path) -> Iterator[tuple[str, str]]:
    with tarfile.open(place) as packed:
        for member in packed:
            file = packed.extractfile(member) if member.isfile() else None
            if file is not None and member.name.endswith(".json"):
                yield PurePosixPath(member.name).name, file.read(_MOST_BYTES).decode()


def page(known: Mapping[str, dict]) -> tuple[str, bool]:
    """Return Markdown, and whether all bars are met, of what was measured and of all there is."""
    lines = ["# GPU report", "", *_machine(known.get("preflight", {}).get("figures", {}))]
    if any(outcome.get("is_cpu") for outcome in known.values()):
        lines += ["", "**A rehearsal on a CPU: its times mean nothing.**"]
    lines += ["", markdown_table(["measurement", "state", "s", "why"], [*_states(known)])]
    scored = {**known, "scores": {"figures": scores(known)}}
    rows, is_met = [], all(each.name in known for each in MEASUREMENTS)
    for bar in BARS:
        if bar.measurement in known or (bar.measurement == "scores" and "sweep" in known):
            value = value_of(scored[bar.measurement], bar.figure)
            verdict = "unseen" if value is None else "met" if bar.is_met(value) else "MISSED"
            is_met = is_met and verdict == "met"
            shown = "" if value is None else f"{value:.4g}"
            rows.append([bar.measurement, bar.words, shown, bar.text, verdict])
    heads = ["measurement", "figure", "measured", "bar", ""]
    lines += ["", "## Bars", "", markdown_table(heads, rows), *sections(known)]
    lines += [*_shown(scored), "", UNSEEN]
    return "\n".join(lines) + "\n", is_met


def value_of(outcome: Mapping[str, Any], figure: str) -> float | None:
    """Return a recorded figure; None if not known."""
    value = outcome.get("figures", {}).get(figure)
    return float(value) if isinstance(value, int | float) else None


def _machine(figures: Mapping[str, Any]) -> list[str]:
    names = ("device", "driver", "torch", "cuda", "nccl", "python", "packages")
    return [f"- {name}: {figures[name]}" for name in names if name in figures]


def _states(known: Mapping[str, dict]) -> Iterable[list[str]]:
    for name in dict.fromkeys([*(each.name for each in MEASUREMENTS), *known]):
        outcome = known.get(name, {"state": "not run"})
        spent = f"{outcome['wall_s']:.1f}" if "wall_s" in outcome else ""
        yield [name, outcome["state"], spent, outcome.get("why", "").replace("\n", " ")]


def _shown(known: Mapping[str, dict]) -> Iterator[str]:
    """Yield all figures that are one number or one word, judged or not."""
    for name, outcome in known.items():
        rows = [
            [figure, f"{value:.4g}" if isinstance(value, float) else str(value)]
            for figure, value in outcome.get("figures", {}).items()
            if isinstance(value, int | float | str) and len(str(value)) < 200
        ]
        if rows:
            yield from ("", f"## {name}", "", markdown_table(["figure", "found"], rows))


if __name__ == "__main__":
    sys.exit(main())
