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
from itertools import product
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


def _capture_bars() -> Iterator[Bar]:
    ways = (("ours", "asked in our way"), ("dump", "dumped"))
    for (way, way_text), mode in product(ways, ("thread_local", "global")):
        place, words = f"capture.{way}_{mode}", f"{way_text}, mode {mode}: "
        yield _bar(f"{place}.num_problems", f"{words}captures that ended", most=0)
        yield _bar(f"{place}.is_equal", f"{words}the replay computes the same", least=1)
        yield _bar(f"{place}.num_faults", f"{words}faults", most=0)


def _run_bars() -> Iterator[Bar]:
    for name in ("base", "moe"):
        yield _bar(f"{name}.num_zero_durations", "records of 0 ns", most=0)
        yield _bar(f"{name}.num_faults", "faults of hooks", most=0)
        yield _bar(f"{name}.num_silent", "hooks that never fired", most=0)
        yield _bar(f"{name}.hooked_frac", "hooked steps against bare ones", most=0.03)
        yield _bar(f"{name}.first_answer_after", "steps from the window to its answer", most=6)


BARS = (
    _bar("events.record_given_stream_s", "host seconds to record an event", most=3e-6),
    _bar("events.read_s", "host seconds to read one", most=4e-6),
    _bar("events.mark_s", "host seconds of a mark", most=5e-6),
    _bar("events.record_of_stream_s", "stream seconds for one between kernels", most=2e-6),
    _bar(
        "events.error_after_0.1_s_p90_frac", "error of 20 us, 0.1 s after the reference", most=0.01
    ),
    _bar("streams.hidden_num_operators", "layers found, gathers hidden", least=8),
    _bar("streams.hidden_operators_largest_excess", "of 3 % + 2 us, layers", most=1),
    _bar("streams.hidden_transfers_largest_excess", "of 3 % + 2 us, gathers", most=1),
    _bar("streams.exposed_operators_largest_excess", "of 3 % + 2 us, waited for", most=1),
    _bar("streams.exposed_transfers_largest_excess", "of 3 % + 2 us, waited for", most=1),
    _bar("streams.hidden_exposed_frac", "exposed of gathers that layers hide", most=0.02),
    _bar("streams.exposed_exposed_frac", "of gathers that are waited for", least=0.95, most=1.05),
    _bar("recipe.num_losses", "losses compared", least=35),
    _bar("recipe.num_other_losses", "losses that hooks have changed", most=0),
    _bar("recipe.num_faults", "faults of hooks", most=0),
    _bar("recipe.num_zero_durations", "operators of 0 ns", most=0),
    _bar("recipe.num_backward", "operators of backward passes", least=1),
    _bar("recipe.num_silent", "hooks that never fired", most=0),
    _bar("groups.num_zero_durations", "records of 0 ns", most=0),
    _bar("groups.num_faults", "faults of hooks", most=0),
    _bar("groups.steps_to_answer", "steps from the window's end to its records", most=6),
    _bar("groups.num_steps_with_records", "hooked steps that have records", least=1),
    _bar("groups.dump_ours_stops_python_s", "seconds that a dump stops Python", most=0.2),
    _bar("trace.num_traced", "traced operators", least=1),
    _bar("trace.start_s", "seconds to start the profiler", most=5.0),
    _bar("trace.stop_s", "seconds to stop it", most=5.0),
    _bar("trace.taken_mib", "MiB that it takes outside the allocator", most=1536),
    _bar("trace.after_frac", "the steps after it against those before", most=0.01),
    _bar("trace.users_kernels", "kernels in the user's own profile afterwards", least=1),
    _bar("pace.beside_frac", "steps beside the making of records", most=0.05),
    *_capture_bars(),
    _bar("fsdp.all_frac", "all operators, sharded against not", most=0.03),
    _bar("fsdp.median_frac", "the median operator", most=0.05),
    _bar("probes.num_other_losses", "losses that probes have changed", most=0),
    _bar("probes.num_losses", "losses compared", least=20),
    _bar("probes.num_probed", "operators probed", least=1),
    _bar("probes.last_frac", "the last steps against a run without probes", most=0.02),
    _bar("overhead.launch_bound: in the window", "overhead, launch-bound", most=0.03),
    _bar("overhead.launch_bound: after the window", "steps after, launch-bound", most=0.01),
    _bar("overhead.compute_bound: in the window", "overhead, compute-bound", most=0.03),
    _bar("overhead.compute_bound: after the window", "steps after, compute-bound", most=0.01),
    _bar("overhead.launch_bound_waiting_frac", "of operators, device waits", least=0.1),
    _bar("overhead.compute_bound_waiting_frac", "of operators, device waits", most=0.1),
    _bar("shapes.kineto: operators of a step", "events against kernels", most=0.03),
    _bar("shapes.layouts: mean error of the step", "other shapes predicted", most=0.05),
    _bar("shapes.layouts: largest error of the peak memory", "their memory", most=0.05),
    _bar("shapes.fake: mean error of the work", "TP and PP shapes predicted", most=0.05),
    _bar("shapes.two_ranks: layouts with other losses or counts", "two ranks", most=0),
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
    """Return a recorded figure, or one derived from several; None if not known."""
    figures = outcome.get("figures", {})
    value: Any = figures.get(figure)
    if figure == "taken_mib":
        return _taken_mib(figures)
    if value is None and figure == "record_given_stream_s" and "record_s" in figures:
        # Archives until 2026-11-28 timed the look-up of the current stream as well.
        return figures["record_s"] - figures["current_stream_s"]
    if value is None and "." in figure:
        outer, _, inner = figure.rpartition(".")
        capture = figures.get(outer)
        value = capture.get(inner) if isinstance(capture, dict) else None
        if isinstance(capture, dict) and inner == "num_problems":
            refused = any(answer.startswith("refused") for answer in capture["asked"])
            value = int(bool(capture["problem"]) or refused)
    return float(value) if isinstance(value, int | float) else None


def _taken_mib(figures: Mapping[str, Any]) -> float | None:
    """Return free memory before the profiler was prepared, less the minimum while it ran."""
    begin, rest = figures.get("begin_free_mib"), ("start_free_mib", "end_free_mib")
    lows = [low for name in rest for low in figures.get(name, ())]
    return float(begin[0] - min(lows)) if begin and lows else None


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
