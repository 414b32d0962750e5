"""Scores of a sweep: predictions that were written first against the layouts trained after them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.benchmarks.gpu.layouts import BASE, OF_ENGINE, digest
from forerun.benchmarks.markdown_text import markdown_table

Known = Mapping[str, Mapping[str, Any]]
"""Outcomes of measurements by name."""
_SIGN_FRAC, _CLEAR_FRAC = 0.05, 0.10
"""Gains whose sign is judged, and gains that an answer should be able to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Step of a layout over the base's minus 1, predicted and measured."""

    name: str
    predicted: float
    low: float
    high: float
    measured: float
    scatter_log: float
    """Half the distance of both rounds, in log."""
    memory_frac: float | None

    @property
    def error_log(self) -> float:
        """Predicted over measured, in log."""
        return math.log1p(self.predicted) - math.log1p(self.measured)

    @property
    def is_covered(self) -> bool:
        """True if the measured gain is in the interval."""
        return self.low <= self.measured <= self.high

    @property
    def has_sign(self) -> bool:
        """True unless the sign of a gain worth having is wrong."""
        return abs(self.measured) < _SIGN_FRAC or (self.predicted < 0) == (self.measured < 0)

    @property
    def is_decided(self) -> bool:
        """True if the interval excludes no gain."""
        return not self.low <= 0 <= self.high


def figures_of(known: Known, name: str) -> Mapping[str, Any]:
    """Return the figures of a measurement; none if it has not run."""
    return known.get(name, {}).get("figures", {})


def ratios(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the log of each run's step over the base's at that time, by layout.

    >>> base = [{"name": "base", "begun_unix_s": t, "step_s": s} for t, s in ((0, 1.0), (2, 1.2))]
    >>> ratios([*base, {"name": "a", "begun_unix_s": 1, "step_s": 1.1}])["a"]
    [0.0]
    """
    bases = [(r["begun_unix_s"], r["step_s"]) for r in runs if r["name"] == BASE and "step_s" in r]
    logs: dict[str, list[float]] = {}
    if bases:
        times_s, steps_s = zip(*bases, strict=True)
        for run in runs:
            if "step_s" in run and run["name"] != BASE:
                base_s = float(np.interp(run["begun_unix_s"], times_s, steps_s))
                logs.setdefault(run["name"], []).append(math.log(run["step_s"] / base_s))
    return logs


def gains(known: Known) -> list[Gain]:
    """Return the gains of all layouts that were predicted and trained."""
    answers = figures_of(known, "predictions").get("layouts", {})
    runs = figures_of(known, "sweep").get("runs", [])
    peaks = {run["name"]: run["peak_nbytes"] for run in runs if run.get("peak_nbytes")}
    return [
        Gain(
            name=name,
            predicted=answers[name]["time_frac"],
            low=answers[name]["time_frac_low"],
            high=answers[name]["time_frac_high"],
            measured=math.expm1(float(np.mean(logs))),
            scatter_log=float(np.ptp(logs)) / 2,
            memory_frac=_allocated(answers[name]) / peaks[name] - 1 if name in peaks else None,
        )
        for name, logs in ratios(runs).items()
        if answers.get(name, {}).get("time_frac_low") is not None
    ]


def _allocated(answer: Mapping[str, Any]) -> float:
    """Return the predicted peak of the allocator, without the context and libraries' buffers."""
    return answer["memory"]["total_nbytes"] - answer["memory"]["overhead_nbytes"]


def scores(known: Known) -> dict[str, float]:
    """Return the figures that have bars; those that cannot be computed are left out."""
    figures: dict[str, float] = {}
    sweep, written = figures_of(known, "sweep"), figures_of(known, "predictions")
    if sweep and written:
        is_same = sweep.get("predictions_sha256") == digest(written)
        figures["is_first"] = float(is_same and written["made_unix_s"] < sweep["begun_unix_s"])
    if scored := gains(known):
        clear = [one for one in scored if abs(one.measured) >= _CLEAR_FRAC]
        figures |= {
            "num_gains": len(scored),
            "gain_error": float(np.mean([abs(one.error_log) for one in scored])),
            "gain_bias": float(np.mean([one.error_log for one in scored])),
            "num_wrong_signs": sum(not one.has_sign for one in scored),
            "gain_coverage": float(np.mean([one.is_covered for one in scored])),
            "gain_half_width": float(np.mean([(one.high - one.low) / 2 for one in scored])),
        }
        if clear:
            figures["cannot_tell"] = float(np.mean([not one.is_decided for one in clear]))
        if memory := [abs(one.memory_frac) for one in scored if one.memory_frac is not None]:
            figures["memory_error"] = max(memory)
    figures |= _of_choice(sweep, written)
    errors = [a / b - 1 for _, (a, b, _) in _shards(known)]
    if errors := [error for error in errors if not math.isnan(error)]:
        figures["shard_error"] = float(np.mean(np.abs(errors)))
    if "hooked" in (costs := turn_costs(figures_of(known, "turns").get("steps_s", {}))):
        figures["hooked_frac"] = costs["hooked"][0]
    return figures


def _of_choice(sweep: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, float]:
    """Return the base's drift, and the time of what the plan offers first over the best's, less
    1, over layouts of its own precision and kernels."""
    runs = sweep.get("runs", [])
    steps_s = [run["step_s"] for run in runs if run["name"] == BASE and "step_s" in run]
    if not steps_s:
        return {}
    mean = {name: float(np.mean(logs)) for name, logs in ratios(runs).items()} | {BASE: 0.0}
    of_plan = {k: v for k, v in mean.items() if not k.startswith(OF_ENGINE)}
    found = {"base_drift": max(steps_s) / min(steps_s) - 1}
    offers = [name for name in written.get("offers", ()) if name in mean]
    if offers:
        found["regret"] = math.expm1(mean[offers[0]] - min(of_plan.values()))
        found["regret_of_three"] = math.expm1(
            min(mean[name] for name in offers[:3]) - min(of_plan.values())
        )
    return found


def turn_costs(steps_s: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float, float]]:
    """Return the time beyond a bare step by variant, as a share of it: median of the turns'
    differences with its 90 % bootstrap interval."""
    if not steps_s.get("bare"):
        return {}
    costs: dict[str, tuple[float, float, float]] = {}
    bare = np.array(steps_s["bare"])
    for name, values in steps_s.items():
        count = min(len(bare), len(values))
        differences = (np.array(values[:count]) - bare[:count]) / np.median(bare)
        drawn = np.random.default_rng(0).choice(differences, (1000, count))
        low, high = np.quantile(np.median(drawn, axis=1), (0.05, 0.95))
        costs[name] = (float(np.median(differences)), float(low), float(high))
    return costs


def _shards(known: Known) -> Iterator[tuple[str, tuple[float, float, float]]]:
    """Yield the seconds of one micro-batch's passes by shard: predicted and measured on the device,
    and launching them."""
    answers = figures_of(known, "predictions").get("shards", {})
    for name, run in figures_of(known, "shards").get("shards", {}).items():
        device_s, host_s = (
            sum(float(np.median(run.get(f"{phase}_{key}", math.nan))) for phase in _PHASES)
            for key in ("device_s", "host_s")
        )
        predicted_s = sum(answers.get(name, {}).get(f"{phase}_s", math.nan) for phase in _PHASES)
        yield name, (predicted_s, device_s, host_s)


_PHASES = ("forward", "backward")


def sections(known: Known) -> Iterator[str]:
    """Yield the page's tables."""
    yield from _section("Gains over the base", *_gain_table(known))
    runs = figures_of(known, "sweep").get("runs", [])
    failed = [[run["name"], run["problem"]] for run in runs if "problem" in run]
    answers = figures_of(known, "predictions").get("layouts", {})
    failed += [[name, one["refused"]] for name, one in answers.items() if "refused" in one]
    yield from _section("Not trained, or not predicted", ["layout", "why"], failed)
    offers = figures_of(known, "predictions").get("offers", ())
    mean = {name: float(np.mean(logs)) for name, logs in ratios(runs).items()} | {BASE: 0.0}
    rows = [[name, f"{math.expm1(mean[name]):+.1%}"] for name in offers if name in mean]
    yield from _section("Offered by the plan, first three and last", ["layout", "measured"], rows)
    head = ["rank of", "passes predicted", "on the device", "launching them", "error"]
    rows = [
        [
            name,
            *(f"{each_s * 1e3:.2f} ms" for each_s in times_s),
            f"{times_s[0] / times_s[1] - 1:+.1%}",
        ]
        for name, times_s in _shards(known)
    ]
    yield from _section("Shards: one micro-batch, nothing transferred", head, rows)
    head = ["hooks", "beyond a bare step", "90 %", "turns"]
    steps_s = figures_of(known, "turns").get("steps_s", {})
    rows = [
        [name, f"{cost:+.2%}", f"{low:+.2%} to {high:+.2%}", str(len(steps_s[name]))]
        for name, (cost, low, high) in turn_costs(steps_s).items()
    ]
    yield from _section("Hooks on a launch-bound step", head, rows)
    head = ["layout", "losses", "collectives of a step", "0 ns", "problem"]
    rows = [
        [
            name,
            "equal" if row.get("is_equal") else "DIFFERENT",
            str(row.get("collectives_by_rank", "")),
            str(row.get("num_zero_durations", "")),
            " ".join(str(row.get(f"{kind}_problem", "")) for kind in ("hooked", "bare")).strip(),
        ]
        for name, row in figures_of(known, "two_ranks").get("pairs", {}).items()
    ]
    yield from _section("Two ranks on one device", head, rows)


def _section(title: str, head: list[str], rows: list[list[str]]) -> Iterator[str]:
    if rows:
        yield from ("", f"## {title}", "", markdown_table(head, rows))


def _gain_table(known: Known) -> tuple[list[str], list[list[str]]]:
    head = ["layout", "predicted", "90 %", "measured", "rounds apart", "error", "", "memory"]
    return head, [
        [
            *(one.name, f"{one.predicted:+.1%}", f"{one.low:+.1%} to {one.high:+.1%}"),
            *(f"{one.measured:+.1%}", f"{2 * one.scatter_log:.1%}"),
            *(f"{math.expm1(one.error_log):+.1%}", _verdict(one)),
            "" if one.memory_frac is None else f"{one.memory_frac:+.1%}",
        ]
        for one in gains(known)
    ]


def _verdict(one: Gain) -> str:
    words = ["inside" if one.is_covered else "OUTSIDE"]
    words += [] if one.has_sign else ["WRONG SIGN"]
    return ", ".join([*words, *([] if one.is_decided else ["cannot tell"])])
