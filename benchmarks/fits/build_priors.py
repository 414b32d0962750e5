"""Build ``calib/fit/priors.json``: rates of operators by device and public table.

    python benchmarks/fits/build_priors.py DATA_DIR --out calib/fit/priors.json
    python benchmarks/fits/build_priors.py DATA_DIR --out calib/fit/priors.json --check

DATA_DIR contains the tables named in ``SOURCES`` as ``NAME.csv`` or ``NAME.csv.gz``; missing tables
are skipped.  Dropped are flagged rows, rows that the gates refuse, groups most of whose rows they
would refuse, and operators with fewer than 30 rows remaining or that do not follow their law.
``--check`` rebuilds the file and reports differences.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from forerun.benchmarks.protocols.operator_samples import operator_samples
from forerun.benchmarks.published.readers import read_published
from forerun.calib.fit._outliers import refuse
from forerun.calib.fit._rates import Form, Rates, fit_rates
from forerun.calib.fit.batches import ShapeBatch, Timed
from forerun.calib.fit.laws import Ceilings, columns
from forerun.calib.fit.operator_kinds import KINDS, Columns, WorkKind
from forerun.calib.fit.priors import device_prior
from forerun.calib.fit.rate_priors import BARE_LOG, SourceRates, data_sheet, pool_name
from forerun.calib.regressors.robust import robust_sigma
from forerun.calib.workload.operators import OperatorKind
from forerun.launch.known.table_files import read_frame

SCHEMA = 1
FEWEST_ROWS = 30
WORST_SIGMA_LOG = 0.6
"""Held-out error above which a table does not follow the law of its operator."""
TOLERANCE = 0.01
"""Difference of two builds that other library versions may cause."""
DECIMALS = 3
NUM_FOLDS = 4
INDEPENDENT = 16
"""Shapes of one table have correlated errors: they constrain a factor like at most this many."""
SIGMA_LOG = {WorkKind.LAUNCH: 1.0, WorkKind.FLOP: 0.5, WorkKind.BYTES: 0.9}
"""Prior standard deviation of a log factor."""
LEAST = {WorkKind.LAUNCH: -4.6, WorkKind.FLOP: 0.0, WorkKind.BYTES: -3.0}
"""Lower bounds of log factors: no launch under 10 ns, no product above the data sheet, at most 20
times fewer bytes than counted (because of fusion and caches)."""
FIXED_SIGMA_LOG = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Origin of a table."""

    repository: str
    commit: str
    licence: str
    holds_collectives: bool = False
    """Times of products of a tensor-parallel rank include its all-reduce: only tp 1 is used."""
    holds_casts: bool = False
    """Times of products in 8 bits include the quantisation of their 16-bit input."""


_ETT = Source(
    repository="DebarghaG/estimate-train-time",
    commit="1ac4d5e441169983737f4f5c1c2c3b05b618307d",
    licence="MIT",
)
_AIC = Source(
    repository="ai-dynamo/aiconfigurator",
    commit="095f58a51c4ca8e61b66ec108d86f223f8d559ce",
    licence="Apache-2.0",
)
_NEUSIGHT = Source(
    repository="sitar-lab/NeuSight",
    commit="6945927d9afcca2b9daf021f8395e53edc5b4eef",
    licence="MIT",
)
SOURCES = {
    "ops_ett_fwd_bwd": _ETT,
    "ops_ett_optimizer": _ETT,
    "ops_aic_gemm_bf16": _AIC,
    "ops_aic_gemm_fp8": replace(_AIC, holds_casts=True),
    "ops_aic_attention_prefill_bf16": _AIC,
    "ops_aic_moe_bf16": _AIC,
    "ops_vidur_mlp": Source(
        repository="microsoft/vidur",
        commit="7d47513363ec447a741ac5e47241580b47724fbf",
        licence="MIT",
    ),
    "ops_neusight_gemm_fp32_nvidia": _NEUSIGHT,
    "ops_neusight_vector_fp32": _NEUSIGHT,
    "ops_neusight_training_traces": _NEUSIGHT,
    "ops_aceso_fwd_bwd": Source(
        repository="microsoft/SuperScaler, eth-easl/sailor",
        commit="fa80ad02c1dc855ca85b591fb689a09598d2cb7e, cf2c8e3cc53ce178fe58a4003f46b4b6b848fc33",
        licence="MIT",
        holds_collectives=True,
    ),
    "ops_sailor_layer_profiles": Source(
        repository="eth-easl/sailor",
        commit="cf2c8e3cc53ce178fe58a4003f46b4b6b848fc33",
        licence="MIT",
        holds_collectives=True,
    ),
    "ops_simumax_gemm_attention": Source(
        repository="MooreThreads/SimuMax",
        commit="4dcaae513ba7679d56c116a17cd4a691ec41e252",
        licence="Apache-2.0",
    ),
}
_SPLIT_BY_RANKS = frozenset({OperatorKind.EMBEDDING, OperatorKind.LAYER})

Vector = NDArray[np.float64]


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the priors of operator rates.")
    parser.add_argument("data_dir", type=Path, help="folder of the public tables")
    parser.add_argument("--out", type=Path, required=True, help="file to write or to check")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    built = build(read_tables(arguments.data_dir))
    if arguments.check:
        mismatches = differences(json.loads(arguments.out.read_text(encoding="utf-8")), built)
        print("\n".join(mismatches) or f"{arguments.out} is what {arguments.data_dir} gives")
        return 1 if mismatches else 0
    arguments.out.write_text(as_text(built), encoding="utf-8")
    size = arguments.out.stat().st_size
    print(f"{arguments.out}: {len(built['entries'])} entries, {size} bytes")
    return 0


def read_tables(data_dir: Path) -> dict[str, pd.DataFrame]:
    """Return canonical operator tables by name."""
    tables = {}
    for name in sorted(SOURCES):
        paths = [p for p in (data_dir / f"{name}.csv", data_dir / f"{name}.csv.gz") if p.exists()]
        if not paths:
            print(f"{name}: not in {data_dir}", file=sys.stderr)
            continue
        tables[name] = read_published(read_frame(paths[0]), name)
    return tables


def build(tables: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    """Return the file as a JSON value."""
    entries = [
        asdict(entry)
        for name, table in tables.items()
        for key, parts in groups_of(_alone(table, SOURCES[name]), SOURCES[name]).items()
        if (entry := source_rates(parts, *key, name)) is not None
    ]
    for entry in entries:
        entry["costs"] = [cost.value for cost in entry["costs"]]
    order = ("device", "pool", "element_nbytes", "table")
    return {
        "schema": SCHEMA,
        "sources": {
            name: {"repository": s.repository, "commit": s.commit, "licence": s.licence}
            for name in tables
            for s in (SOURCES[name],)
        },
        "entries": sorted(entries, key=lambda e: [e[name] for name in order]),
    }


def as_text(built: Mapping[str, Any]) -> str:
    """Return JSON with one line per entry."""
    head = json.dumps({k: v for k, v in built.items() if k != "entries"}, indent=1, sort_keys=True)
    rows = [json.dumps(e, sort_keys=True, separators=(",", ":")) for e in built["entries"]]
    return head.removesuffix("\n}") + ',\n "entries": [\n' + ",\n".join(rows) + "\n ]\n}\n"


def _alone(table: pd.DataFrame, source: Source) -> pd.DataFrame:
    return without_casts(table) if source.holds_casts else table


def without_casts(table: pd.DataFrame) -> pd.DataFrame:
    """Return forward products of one width without the time of quantising their input.

    A product of ``m`` tokens with few outputs and its mirror, few tokens with ``m`` outputs, read
    the same bytes, but only the first has a sizeable input: their difference is the quantisation,
    which a product of any width with that input also pays.  On H100 it is 2.9 ps an element, 200 us
    for 8,192 tokens of 8,192, while the product in 16 bits takes 49.  Rows that it is more than
    half of, and those without such a pair, are dropped.
    """
    sizes = table["shape"].str.split("x", expand=True).astype(float)
    rows = table.assign(_tokens=sizes[0], _in=sizes[1], _out=sizes[2])
    least = max(rows["_tokens"].min(), rows["_out"].min())
    keys = ["device", "group", "_tokens", "_in"]
    thin = rows[rows["_out"] == least].drop_duplicates(keys)
    mirror = rows[rows["_tokens"] == least].assign(_tokens=rows["_out"]).drop_duplicates(keys)
    both = thin.merge(mirror[[*keys, "time_s"]], on=keys, suffixes=("", "_mirror"))
    both["_cast_s"] = (both["time_s"] - both["time_s_mirror"]).clip(lower=0.0)
    merged = rows.merge(both[[*keys, "_cast_s"]], on=keys)
    is_product = merged["_cast_s"] < 0.5 * merged["time_s"]
    merged["time_s"] -= merged["_cast_s"]
    return merged.loc[is_product, table.columns].reset_index(drop=True)


def groups_of(table: pd.DataFrame, source: Source) -> dict[tuple[str, str, int], list[Timed]]:
    """Return usable rows by device, pool and element size; one part for each group of the table."""
    usable = table[table["flag"] == ""]
    if source.holds_collectives:
        kinds = usable["kind"].map(OperatorKind)
        is_split = kinds.map(lambda k: k.is_linear or k in _SPLIT_BY_RANKS).astype(bool)
        usable = usable[~(is_split & (pd.to_numeric(usable["tp"]).fillna(1) > 1))]
    timed_by_group: defaultdict[tuple[str, str, int], list[Timed]] = defaultdict(list)
    for (device, nbytes), rows in usable.groupby(["device", "element_nbytes"], sort=True):
        prior = device_prior(str(device))
        if not prior.num_units:
            continue
        size = int(str(nbytes))
        groups = {c.name: c.timed for s in operator_samples(rows) for c in s.cells}
        passed, refusals = refuse(groups, prior.peaks_for)
        doubtful = {refusal.name for refusal in refusals if refusal.is_doubtful}
        for name in sorted(set(passed) - doubtful):
            batch = passed[name].batch
            timed_by_group[prior.name, pool_name(batch.kind, batch.phase), size].append(
                passed[name]
            )
    return dict(timed_by_group)


def source_rates(
    parts: Sequence[Timed], device: str, pool: str, element_nbytes: int, table: str
) -> SourceRates | None:
    """Return rates of one operator, parts weighted equally; None if too few or too scattered."""
    timed = _together(parts)
    if len(timed) < FEWEST_ROWS:
        return None
    prior = device_prior(device)
    done = columns(timed.batch, prior.num_units)
    ceilings = data_sheet(prior, element_nbytes)
    form = Form.CHAIN if KINDS[timed.batch.kind].is_chain else Form.SUM
    log_time = np.log(timed.time_s)
    residuals = np.empty(len(timed))
    widths = _widths(timed.batch)
    for fold in range(NUM_FOLDS):
        rest, rows = widths % NUM_FOLDS != fold, widths % NUM_FOLDS == fold
        if rows.any():
            train_rows = rest if rest.any() else rows
            rates = _fit(
                _take(done, train_rows),
                log_time[train_rows],
                timed.weight[train_rows],
                ceilings,
                form,
            )
            residuals[rows] = log_time[rows] - rates.log_time(_take(done, rows))
    sigma = robust_sigma(residuals - np.median(residuals))
    if sigma > WORST_SIGMA_LOG:
        return None
    rates = _fit(done, log_time, timed.weight, ceilings, form)
    factors = rates.log_unit_s - _units(done.costs, ceilings)
    doubt = _doubt(rates.shares(done), timed.weight, done.costs, sigma, int(widths.max()) + 1)
    return SourceRates(
        device=device,
        pool=pool,
        element_nbytes=element_nbytes,
        table=table,
        costs=done.costs,
        log_factor=tuple(np.round(factors, DECIMALS).tolist()),
        sigma_log=tuple(np.round(doubt, DECIMALS).tolist()),
        log_power=round(rates.log_power, DECIMALS),
        lead_frac=round(rates.lead_frac, DECIMALS),
        shape_sigma_log=round(sigma, DECIMALS),
        median_residual=round(float(np.median(log_time - rates.log_time(done))), DECIMALS),
        num_rows=len(timed),
    )


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line for each place where two files differ by more than rounding."""
    sides = [dict(_leaves(side)) for side in (old, new)]
    return [
        f"{name}: {sides[0].get(name)} in the file, {sides[1].get(name)} built"
        for name in sorted(set(sides[0]) | set(sides[1]))
        if not _same(sides[0].get(name), sides[1].get(name))
    ]


def _same(one: object, other: object) -> bool:
    if isinstance(one, float | int) and isinstance(other, float | int):
        return abs(one - other) <= TOLERANCE
    return one == other


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, f"{path}/{name}")
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            is_entry = isinstance(part, dict)
            keys = ("device", "pool", "element_nbytes", "table")
            name = " ".join(str(part[k]) for k in keys) if is_entry else str(i)
            yield from _leaves(part, f"{path}/{name}")
    else:
        yield path, value


def _together(parts: Sequence[Timed]) -> Timed:
    """Concatenate all rows; weights of each part have equal sums, and their mean is 1."""
    numbers = [len(part) for part in parts]
    mean = sum(numbers) / len(parts)
    return Timed(
        batch=replace(
            parts[0].batch,
            sizes=np.concatenate([p.batch.sizes for p in parts]),
            element_nbytes=np.concatenate([p.batch.element_nbytes for p in parts]),
        ),
        time_s=np.concatenate([p.time_s for p in parts]),
        weight=np.concatenate([np.full(n, mean / n) for n in numbers]),
    )


def _widths(batch: ShapeBatch) -> NDArray[np.int64]:
    """Number each row's shape without its leading size, which is not a width of the model."""
    sizes = batch.sizes[:, 1:] if batch.sizes.shape[1] > 1 else batch.sizes
    return np.unique(sizes, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _take(done: Columns, rows: NDArray[np.bool_]) -> Columns:
    return Columns(costs=done.costs, amounts=done.amounts[rows])


def _units(costs: Sequence[WorkKind], ceilings: Ceilings) -> Vector:
    return np.log([ceilings.unit_s(cost) for cost in costs])


def _fit(done: Columns, log_time: Vector, weight: Vector, ceilings: Ceilings, form: Form) -> Rates:
    """Fit rates within physical bounds: factors beyond one are fixed there, the others refitted."""
    units = _units(done.costs, ceilings)
    start = np.array([BARE_LOG[cost] for cost in done.costs])
    sigma = np.array([SIGMA_LOG[cost] for cost in done.costs])
    least = np.array([LEAST[cost] for cost in done.costs])
    while True:
        rates = fit_rates(done, log_time, weight, start=units + start, sigma=sigma, form=form)
        factors = rates.log_unit_s - units
        below = (factors < least) & (sigma > FIXED_SIGMA_LOG)
        if not below.any():
            break
        start, sigma = np.where(below, least, start), np.where(below, FIXED_SIGMA_LOG, sigma)
    return Rates(
        log_unit_s=units + np.maximum(factors, least),
        log_power=rates.log_power,
        lead_frac=rates.lead_frac,
    )


def _doubt(
    shares: Vector, weight: Vector, costs: Sequence[WorkKind], sigma: float, num_widths: int
) -> Vector:
    """Return each factor's standard deviation, large for columns with a small share of the time."""
    information = (shares * weight[:, None]).T @ shares / weight.sum()
    number = min(num_widths, INDEPENDENT)
    before = np.diag([SIGMA_LOG[cost] ** -2 for cost in costs])
    return np.sqrt(np.diag(np.linalg.inv(before + number * information / sigma**2)))


if __name__ == "__main__":
    sys.exit(main())
