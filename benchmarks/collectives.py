"""How well transfers of collectives are estimated, against one latency and bandwidth a group.

    python benchmarks/collectives.py coll_nccltests_public.csv.gz coll_ett.csv.gz

One Markdown row per table, protocol and model.  Errors are mean absolute percentage errors, each
collective with equal weight, over all payloads, from 16 MiB and above 256 MB; coverage and
half-width are of the 90 % interval; the floor is how far repeats of a payload lie from their median
over the rows that have any.  ``--fabric`` keeps machines whose fabric holds the text.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from forerun.calib.fit.collectives import Transfers
from forerun.calib.fit.curves import Law, Samples, fit_law
from forerun.calib.fit.groups import Group, bus_factor, ring_steps
from forerun.calib.published.readers import read_published
from forerun.calib.validation.collectives import PROTOCOLS, fit_machine, left_out
from forerun.calib.workload.collectives import Collective

SEEDS = range(5)
LARGE_NBYTES = 16 * 2**20
HUGE_NBYTES = 256 * 10**6
BASELINE_SIGMA_LOG = 10.0
HEADER = ["table", "protocol", "model", "n", "all %", ">= 16 MiB %", "> 256 MB %"]
HEADER += ["coverage %", "half-width %", "floor %"]
CURVE = ["device", "fabric", "collective", "num_ranks", "num_nodes"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Score estimates of collectives.")
    parser.add_argument("tables", type=Path, nargs="+", help="published tables of collectives, CSV")
    parser.add_argument("--fabric", action="append", default=[], help="only fabrics with this text")
    arguments = parser.parse_args()
    print_row(HEADER)
    print_row(["---"] * len(HEADER))
    for path in arguments.tables:
        table = read_published(pd.read_csv(path, low_memory=False), path.name).collectives
        if table is None:
            raise SystemExit(f"{path} is no table of collectives; give one of collectives")
        if arguments.fabric:
            table = table[[any(t in f for t in arguments.fabric) for f in table["fabric"]]]
        report_accuracy(table, path.name.split(".")[0])
    report_speed()


def report_accuracy(table: pd.DataFrame, name: str) -> None:
    """Figures of one table in every protocol that it can carry."""
    floor = repeats_frac(table[table["flag"] == ""])
    for protocol in PROTOCOLS:
        for model, fit in (("curves", fit_machine), ("alpha-beta", fit_baseline)):
            rows = left_out(table, protocol, seeds=SEEDS, fit=fit)
            if len(rows):
                is_baseline = model != "curves"
                widths = ["", ""] if is_baseline else [coverage(rows), half_width(rows)]
                print_row(
                    [name, protocol, model, str(len(rows)), *errors(rows), *widths, percent(floor)]
                )


def errors(rows: pd.DataFrame) -> list[str]:
    """MAPE over all payloads, large and huge ones, mean over collectives."""
    error = (rows["predicted_s"] / rows["measured_s"] - 1.0).abs()
    masks = [0.0, LARGE_NBYTES, HUGE_NBYTES]
    kept = [rows["nbytes"] >= least for least in masks]
    return [percent(error[k].groupby(rows["group"][k]).mean().mean()) for k in kept]


def coverage(rows: pd.DataFrame) -> str:
    """Share of measurements inside their 90 % interval, mean over collectives."""
    inside = rows["measured_s"].between(rows["low_s"], rows["high_s"])
    return percent(inside.groupby(rows["group"]).mean().mean())


def half_width(rows: pd.DataFrame) -> str:
    """Half the interval over the estimate, mean over collectives."""
    width = (rows["high_s"] - rows["low_s"]) / 2 / rows["predicted_s"]
    return percent(width.groupby(rows["group"]).mean().mean())


def repeats_frac(table: pd.DataFrame) -> float:
    """Mean distance of repeats from their median; NaN where nothing was repeated."""
    times = table.groupby([*CURVE, "nbytes"])["time_s"]
    distance = (table["time_s"] / times.transform("median") - 1.0).abs()
    kept = distance[times.transform("size") > 1]
    return float(kept.groupby(table["collective"]).mean().mean()) if len(kept) else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AlphaBeta:
    """One latency and one bandwidth for each group; the nearest group's ring for all others."""

    laws: Mapping[Group, Law]

    def estimate(self, group: Group, nbytes: NDArray[np.float64]) -> Transfers:
        seen = min(self.laws, key=lambda g: distance(g, group))
        steps, factors = (
            np.array([count(g.collective, g.num_ranks) for g in (seen, group)])
            for count in (ring_steps, bus_factor)
        )
        law = Law(
            fixed_s=self.laws[seen].fixed_s * steps[1] / steps[0],
            byte_s=self.laws[seen].byte_s * factors[1] / factors[0],
        )
        nothing = np.zeros(len(nbytes))
        return Transfers(
            log_time=law.log_time(np.log(nbytes)),
            half_width_log=nothing,
            octaves=nothing,
            is_prior=False,
        )


def distance(group: Group, other: Group) -> tuple[bool, float, float]:
    """Other collectives are further than other sizes."""
    return (
        group.collective is not other.collective,
        abs(np.log(group.num_nodes / other.num_nodes)),
        abs(np.log(group.num_ranks / other.num_ranks)),
    )


def fit_baseline(samples: Mapping[Group, Samples], _: str) -> AlphaBeta:
    """Latency and bandwidth of each group by robust least squares in log time, without a prior."""
    start = Law(fixed_s=1e-5, byte_s=1e-11)
    return AlphaBeta(
        laws={
            group: fit_law(
                np.ones(len(s)),
                s.nbytes,
                np.log(s.time_s),
                s.weight,
                start,
                sigma_log=BASELINE_SIGMA_LOG,
            )
            for group, s in samples.items()
        }
    )


def report_speed() -> None:
    """Time of a fit of 10,000 rows in ten groups, and of 100,000 estimates."""
    rng = np.random.default_rng(0)
    sizes = np.geomspace(256, 2**30, 1000)
    kinds = [Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER]
    kinds += [Collective.ALL_TO_ALL, Collective.BROADCAST]
    samples = {
        Group(collective=kind, num_ranks=ranks): Samples(
            nbytes=sizes,
            time_s=(2e-5 + sizes / 3e11) * np.exp(0.05 * rng.normal(size=len(sizes))),
            weight=np.ones(len(sizes)),
        )
        for kind in kinds
        for ranks in (4, 8)
    }
    begin = time.perf_counter()
    model = fit_machine(samples, "NVIDIA H100")
    fitted = time.perf_counter()
    asked = np.geomspace(256, 2**32, 10_000)
    for group in samples:
        model.estimate(group, asked)
    done = time.perf_counter()
    number = sum(len(s) for s in samples.values())
    print(f"\nfit of {number} rows {fitted - begin:.3f} s; 100000 estimates {done - fitted:.3f} s")


def print_row(cells: list[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def percent(value: float) -> str:
    return "-" if np.isnan(value) else f"{100 * value:.1f}"


if __name__ == "__main__":
    main()
