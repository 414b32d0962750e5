"""The accuracy that a removal or a simplification loses, as a sum over all sources.

    python benchmarks/removals.py DATA_DIR --json STATE.json [--jobs 1] [--draws 3] [--only TEXT]
    python benchmarks/removals.py --compare BEFORE.json AFTER.json [AFTER.json ...]

The first form scores this state of the code, a row at a time; the second compares states of a
round: each removal alone, and all of them together.  Every source counts once, however few its rows
are, and its parts have equal weight.  A change of a part is the mean of the paired changes of its
rows' absolute errors, in points, plus one point for each point that its coverage falls below 85.  A
removal stays where the mean over sources is at most +0.3 points and the upper end of its 90 %
interval, series resampled within parts, is below +1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from forerun.benchmarks.carried import LINES, scored_line
from forerun.benchmarks.generalise import SOURCES
from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.protocols.scores import LEAVE_ONE_OUT, score_folds, step_folds
from forerun.benchmarks.protocols.steps import (
    LEAVE_FAMILY,
    LEAVE_GROUP,
    LEAVE_RELEASE,
    MORE_NODES,
    named,
    series_name,
)
from forerun.benchmarks.protocols.table_steps import TableSteps
from forerun.benchmarks.published.readers import frame_of, read_published, steps_of
from forerun.benchmarks.scoring.step_coverage import LOW_FRAC

MOST_MEAN, MOST_HIGH = 0.3, 1.0
"""Points a source by which a removal may be worse: the mean, and the upper end of its interval."""
_NUM_RESAMPLES, _SEED, _TAIL = 4_000, 20261130, 0.05
_LEAST_SHOWN = 0.05
_COLLECTIVES = "collectives: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of a table that calibrate and are scored in one way."""

    source: str
    protocol: str
    table: str = ""
    """Table of step times; empty for a line of ``carried.py``, whose name is ``protocol``."""
    text: str = ""
    """Contained in the machine or the group of each row."""
    operators: tuple[str, ...] = ()
    """Tables of operators of the machine, which are then known; rates of the priors stay without
    their source."""

    @property
    def name(self) -> str:
        """A name that no other part has."""
        over = f"over {' '.join(self.operators)}" if self.operators else ""
        return ", ".join(filter(None, (self.source, self.table, self.text, over, self.protocol)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """One row, over all folds that score it."""

    unit: str
    """Rows of one unit are resampled together: a series, or a group of ranks."""
    error: float
    """Mean absolute error, in percent."""
    coverage_frac: float
    half_width: float
    """Half of the 90 % interval over the prediction, in percent."""


State = Mapping[str, Mapping[str, ScoredRow]]
"""Rows by part and name."""
_FEW, _NONE = "calibrate_3", "calibrate_0"
_SMALL: Mapping[str, Sequence[tuple[str, str]]] = {
    "e2e_vtrain_single_node": (("", _FEW),),
    "e2e_vtrain_multi_node": (("", _FEW),),
    "e2e_bigscience_v100": (("", _FEW), ("", LEAVE_FAMILY)),
    "e2e_llmfoundry_mpt_fsdp": (("", _FEW), ("", MORE_NODES)),
    "e2e_megatron_bridge": (("", _FEW), ("", LEAVE_RELEASE), ("", LEAVE_FAMILY)),
    "e2e_bridge_cards": (("Moonlight", _FEW), ("", _FEW)),
    "e2e_dgxc_scaling": (("BF16", _FEW), ("FP8", _FEW), ("FP8", LEAVE_GROUP)),
    "e2e_mlperf_llm_systems": (("v4.0", MORE_NODES), ("v4.1", MORE_NODES)),
    "e2e_sailor": (("", _FEW), ("", LEAVE_FAMILY), ("", MORE_NODES)),
    "e2e_simumax_b200_8gpu": (("", _FEW), ("", LEAVE_FAMILY)),
    "e2e_nanotron_llama1b": (("", _FEW), ("", MORE_NODES), ("", LEAVE_ONE_OUT)),
    "e2e_mcore_ci_golden": (("", _FEW),),
    "e2e_small_tables": (("Korthikanti", LEAVE_GROUP),),
}
"""Text and protocol of the parts of each table; each source has its rows from nothing as well."""
_OVER_OPERATORS: Mapping[str, tuple[tuple[str, ...], Sequence[str]]] = {
    "e2e_sailor": (
        ("ops_sailor_layer_profiles",),
        (_NONE, _FEW, LEAVE_FAMILY, LEAVE_GROUP, MORE_NODES),
    ),
}
"""Tables of operators of a table's machine, and the protocols of the parts that know them."""
_OF_COLLECTIVES = {
    "one node, ten systems": ("one node, ten systems",),
    "Vidur": ("Vidur a100_dgx", "Vidur, "),
    "Aceso": ("Aceso",),
    "vTrain, transfers": ("vTrain, two",),
    "Perlmutter": ("Perlmutter by", "Perlmutter, "),
    "Polaris": ("Polaris, 2", "Polaris, collective"),
    "H100 by ten": ("H100",),
    "DeepEP": ("DeepEP",),
}
"""Beginnings of the lines of ``carried.py`` of each source."""


def parts() -> Iterator[Part]:
    """Yield all parts, grouped by source."""
    for source in SOURCES:
        for table in source.steps:
            for text, protocol in (("", _NONE), *_SMALL.get(table, ())):
                yield Part(source=source.name, table=table, text=text, protocol=protocol)
            operators, protocols = _OVER_OPERATORS.get(table, ((), ()))
            for protocol in protocols:
                yield Part(source=source.name, table=table, operators=operators, protocol=protocol)
    for name, starts in _OF_COLLECTIVES.items():
        for line in LINES:
            if line.name.startswith(starts):
                yield Part(source=_COLLECTIVES + name, protocol=line.name)


def scored(part: Part, data: Path, draws: int) -> Mapping[str, ScoredRow]:
    """Return the rows that a part scores; none if its table is absent or does not support it."""
    with threadpool_limits(1):
        if part.table:
            return _step_rows(part, data, draws)
        return _transfer_rows(part, data)


def _step_rows(part: Part, data: Path, draws: int) -> Mapping[str, ScoredRow]:
    rows = [
        row
        for row in steps_of(data, part.table).usable
        if part.text.lower() in f"{row.machine} {row.group}".lower()
    ]
    known = part.protocol.removeprefix("calibrate_")
    folds = step_folds(rows, int(known), draws) if known.isdigit() else named(rows, part.protocol)
    without = next(source.rates for source in SOURCES if source.name == part.source)
    tables = [read_published(frame_of(data, name), name) for name in part.operators]
    frames = score_folds(rows, folds, TableSteps(tables, without=without).fit)
    if not frames:
        return {}
    frame = pd.concat(frames, ignore_index=True)
    frame["unit"] = [series_name(row) for row in frame["row"]]
    frame["row"] = [f"{row.machine} {row.row_id}" for row in frame["row"]]
    return _by_row(frame)


def _transfer_rows(part: Part, data: Path) -> Mapping[str, ScoredRow]:
    line = next(line for line in LINES if line.name == part.protocol)
    frame = scored_line(line, data)
    if not len(frame):
        return {}
    names = frame["group"] + " " + frame["nbytes"].astype(str)
    names += " #" + frame.groupby(["group", "nbytes"]).cumcount().astype(str)
    error = frame["predicted_s"] / frame["measured_s"] - 1.0
    return _by_row(frame.assign(unit=frame["group"], row=names, error_frac=error))


def _by_row(frame: pd.DataFrame) -> Mapping[str, ScoredRow]:
    """Return means over the folds that scored each row."""
    figures = pd.DataFrame(
        {
            "row": frame["row"],
            "unit": frame["unit"],
            "error": 100 * frame["error_frac"].abs(),
            "covered": frame["measured_s"].between(frame["low_s"], frame["high_s"]).astype(float),
            "half_width": 50 * (frame["high_s"] - frame["low_s"]) / frame["predicted_s"],
        }
    )
    means = figures[np.isfinite(figures["error"])].groupby(["row", "unit"], sort=False).mean()
    return {
        str(row): ScoredRow(unit=str(unit), error=error, coverage_frac=covered, half_width=half)
        for (row, unit), error, covered, half in zip(
            means.index, means["error"], means["covered"], means["half_width"], strict=True
        )
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How a part differs between two states, over the rows that both scored, in points."""

    part: str
    source: str
    before: float
    after: float
    covered: tuple[float, float]
    """Percent of rows, before and after."""
    half_width: tuple[float, float]
    lost_coverage: float
    """Points of coverage below 85 that were gained or lost."""
    units: tuple[tuple[float, int], ...]
    """Sum and number of the paired changes of each unit."""

    @property
    def points(self) -> float:
        """The change of the error, and of coverage below 85."""
        return self.after - self.before + self.lost_coverage

    def resampled(self, generator: np.random.Generator) -> np.ndarray:
        """Return ``points`` of resampled units, shape (resamples,)."""
        sums, counts = np.array(self.units, dtype=np.float64).T
        number = len(sums)
        drawn = generator.multinomial(number, np.full(number, 1 / number), _NUM_RESAMPLES)
        return (drawn @ sums) / (drawn @ counts) + self.lost_coverage


def changes(before: State, after: State) -> list[Change]:
    """Return the change of each part that both states have."""
    sources = {part.name: part.source for part in parts()}
    out = []
    for name, source in sources.items():
        rows = [row for row in before.get(name, {}) if row in after.get(name, {})]
        if rows:
            pairs = [(before[name][row], after[name][row]) for row in rows]
            out.append(_change(name, source, pairs))
    return out


def _change(name: str, source: str, pairs: Sequence[tuple[ScoredRow, ScoredRow]]) -> Change:
    by_unit: dict[str, list[float]] = {}
    for old, new in pairs:
        by_unit.setdefault(old.unit, []).append(new.error - old.error)
    if len(by_unit) == 1:  # then rows are the units
        by_unit = {str(place): [new.error - old.error] for place, (old, new) in enumerate(pairs)}
    figures = [
        [float(np.mean([getattr(one, field) for one in side])) for side in zip(*pairs, strict=True)]
        for field in ("error", "coverage_frac", "half_width")
    ]
    (old_error, new_error), shares, half_widths = figures
    below = [100 * max(0.0, LOW_FRAC - share) for share in shares]
    return Change(
        part=name,
        source=source,
        before=old_error,
        after=new_error,
        covered=(100 * shares[0], 100 * shares[1]),
        half_width=(half_widths[0], half_widths[1]),
        lost_coverage=below[1] - below[0],
        units=tuple((sum(values), len(values)) for values in by_unit.values()),
    )


def mean_over_sources(of_parts: Sequence[Change]) -> tuple[float, float, float]:
    """Return the change a source in points, and its 90 % interval."""
    generator = np.random.default_rng(_SEED)
    by_source: dict[str, list[Change]] = {}
    for one in of_parts:
        by_source.setdefault(one.source, []).append(one)
    mean = np.mean([np.mean([one.points for one in ones]) for ones in by_source.values()])
    drawn = [
        np.mean([one.resampled(generator) for one in ones], axis=0) for ones in by_source.values()
    ]
    low, high = np.quantile(np.mean(drawn, axis=0), (_TAIL, 1 - _TAIL))
    return float(mean), float(low), float(high)


_HEAD = ("source, part", "rows", "before", "after", "held", "half-width", "points")


def comparison_text(before: State, after: State, title: str) -> str:
    """Return the parts that changed as a Markdown table, and the verdict below it."""
    found = changes(before, after)
    moved = [one for one in found if abs(one.points) >= _LEAST_SHOWN]
    rows = [
        (
            one.part.replace("|", "/"),
            sum(count for _, count in one.units),
            f"{one.before:.1f}",
            f"{one.after:.1f}",
            " -> ".join(f"{value:.0f}" for value in one.covered),
            " -> ".join(f"{value:.0f}" for value in one.half_width),
            f"{one.points:+.1f}",
        )
        for one in moved
    ]
    mean, low, high = mean_over_sources(found)
    verdict = "stays" if mean <= MOST_MEAN and high < MOST_HIGH else "goes"
    number = len({one.source for one in found})
    end = (
        f"{title}: {mean:+.2f} points a source ({low:+.2f} to {high:+.2f}) over {number} sources, "
        f"{len(moved)} of {len(found)} parts differ; as a removal it {verdict}"
    )
    return f"{markdown_table(_HEAD, rows)}\n\n{end}"


def _read(path: Path) -> State:
    stored = json.loads(path.read_text(encoding="utf-8"))
    return {
        part: {row: ScoredRow(**figures) for row, figures in rows.items()}
        for part, rows in stored.items()
    }


def _measure(args: argparse.Namespace) -> None:
    chosen = [part for part in parts() if args.only.lower() in part.name.lower()]
    work = partial(_scored_with_progress, data=args.data, draws=args.draws)
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        results = list(pool.map(work, chosen))
    state = {
        part.name: {row: asdict(one) for row, one in rows.items()}
        for part, rows in zip(chosen, results, strict=True)
        if rows
    }
    args.json.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def _scored_with_progress(part: Part, *, data: Path, draws: int) -> Mapping[str, ScoredRow]:
    rows = scored(part, data, draws)
    print(f"{part.name}: {len(rows)} rows", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Score this state, or compare states."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA_DIR", help="public tables")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where this state's rows go")
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread each (1)")
    parser.add_argument("--draws", type=int, default=3, help="random calibrations (3)")
    parser.add_argument("--only", default="", metavar="TEXT", help="parts with this text")
    parser.add_argument("--compare", type=Path, nargs="+", metavar="JSON", help="states to compare")
    args = parser.parse_args()
    if args.compare and len(args.compare) > 1:
        before = _read(args.compare[0])
        for path in args.compare[1:]:
            print(comparison_text(before, _read(path), path.stem), end="\n\n")
    elif args.data and args.json:
        _measure(args)
    else:
        parser.error("give DATA_DIR and --json OUT, or --compare BEFORE.json AFTER.json")


if __name__ == "__main__":
    main()
