"""Coverage of 90 % intervals of sums: the operators of one layer, from a few samples of each.

    python benchmarks/fits/layer_sums.py ops_ett_fwd_bwd.csv.gz [--seeds 5]

For every shape (micro-batch, sequence, hidden size; one rank) at which all operators were measured
and none was trained, the sum of their estimates is compared with the sum of their measured times.
Three rules of adding errors are compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from forerun.benchmarks.markdown_text import markdown_head, markdown_row
from forerun.benchmarks.protocols.operator_samples import OperatorSamples, operator_samples
from forerun.benchmarks.published.readers import read_published
from forerun.calib.fit import Estimates, ShapeBatch, Source, Timed, family, fit_machine
from forerun.calib.importers import table_kind
from forerun.calib.regressors import Z_90
from forerun.launch.known import read_frame

LAYER = ("linear1", "linear2", "linear3", "linear4", "gelu", "layernorm", "res_add")
HEADER = ("samples of each", "rule", "n", "MAPE", "coverage of 90 %", "half-width")
SHAPE = ["tokens", "hidden"]
_HIDDEN = {"linear_fc2": (2, 1.0), "activation": (1, 4.0)}
"""Index of the size that is the hidden size, and its multiple; by default the second, once."""
_WIDE = {"linear_qkv": (2, 3.0), "linear_fc1": (2, 4.0), "linear_fc2": (1, 4.0)}
"""Index and multiple of the side of a product that tensor parallelism splits."""
Key = tuple[float, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    table = read_published(read_frame(arguments.file), arguments.file.name)
    if table_kind(table) != "operators":
        raise SystemExit(f"{arguments.file} holds no operators")
    chosen = [s for s in operator_samples(table) if s.group in LAYER]
    print(markdown_head(HEADER))
    for number in (8, 24):
        rules: dict[str, list[tuple[float, bool, float]]] = {}
        for seed in range(arguments.seeds):
            for rule, rows in score(chosen, number, seed).items():
                rules.setdefault(rule, []).extend(rows)
        for rule, rows in rules.items():
            error, coverage, width = np.array(rows, dtype=np.float64).T
            means = (f"{values.mean():.1%}" for values in (error, coverage, width))
            print(markdown_row([number, rule, len(rows), *means]))


def score(
    samples: list[OperatorSamples], number: int, seed: int
) -> dict[str, list[tuple[float, bool, float]]]:
    """Return absolute error, whether the interval held, and its half-width, by rule of adding."""
    rng = np.random.default_rng(seed)
    groups: dict[str, Timed] = {}
    trained: set[Key] = set()
    for one in samples:
        rows = rng.permutation(len(one))[:number]
        for cell in one.cells:
            mask = np.isin(cell.sample, rows)
            groups[cell.name] = cell.timed.take(mask)
            trained |= set(layer_rows(groups[cell.name]).groupby(SHAPE).groups)
    model = fit_machine(groups, device=samples[0].device)
    cells = [cell for one in samples for cell in one.cells]
    tables = {cell.name: medians(cell.timed) for cell in cells}
    common = sorted(set.intersection(*[set(t) for t in tables.values()]) - trained)
    rows_by_rule: dict[str, list[tuple[float, bool, float]]] = {}
    kinds = {cell.name: family(cell.timed.batch.kind) for cell in cells}
    rules: Mapping[str, list[object]] = {
        "independent": list(tables),
        "by family": [kinds[n] for n in tables],
        "all together": ["" for _ in tables],
    }
    estimates = {
        cell.name: model.predict(cell.name, representatives(cell.timed, common)) for cell in cells
    }
    for i, key in enumerate(common):
        times = np.array([np.exp(estimates[n].log_time[i]) for n in tables])
        sigma = np.array([(estimates[n].high - estimates[n].log_time)[i] / Z_90 for n in tables])
        row = Estimates(time_s=times, sigma_log=sigma, sources=(Source.FITTED,) * len(times))
        measured = sum(tables[n][key] for n in tables)
        for rule, names in rules.items():
            time_s, low_s, high_s = total(row, [str(n) for n in names])
            rows_by_rule.setdefault(rule, []).append(
                (
                    abs(time_s / measured - 1),
                    low_s <= measured <= high_s,
                    (high_s - low_s) / 2 / time_s,
                )
            )
    return rows_by_rule


def total(estimates: Estimates, families: Sequence[str]) -> tuple[float, float, float]:
    """Return the sum of estimates, in seconds, and the ends of its 90 % interval.

    Errors of one family are fully correlated and add linearly: a law or ceiling that is wrong for
    one of its operators is wrong for all.  Families are independent and add in quadrature.
    """
    shares: dict[str, float] = {}
    for name, error_s in zip(families, estimates.time_s * estimates.sigma_log, strict=True):
        shares[name] = shares.get(name, 0.0) + float(error_s)
    time_s = float(estimates.time_s.sum())
    half_log = Z_90 * float(np.sqrt(sum(s**2 for s in shares.values()))) / time_s
    return time_s, time_s * float(np.exp(-half_log)), time_s * float(np.exp(half_log))


def layer_rows(timed: Timed) -> pd.DataFrame:
    """Return tokens and hidden size of every row, shared by all operators of a layer at one rank;
    its time, and whether it belongs to an unsplit layer on one rank."""
    sizes, kind = timed.batch.sizes, timed.batch.kind.value
    place, factor = _HIDDEN.get(kind, (1, 1.0))
    hidden = sizes[:, place] / factor
    other, ratio = _WIDE.get(kind, (place, factor))
    return pd.DataFrame(
        {
            "tokens": sizes[:, 0],
            "hidden": hidden,
            "time_s": timed.time_s,
            "is_whole": sizes[:, other] == ratio * hidden,
        }
    )


def medians(timed: Timed) -> dict[Key, float]:
    """Return the median time of each shape of the whole layer."""
    rows = layer_rows(timed)
    return rows[rows["is_whole"]].groupby(SHAPE)["time_s"].median().to_dict()


def representatives(timed: Timed, chosen: list[Key]) -> ShapeBatch:
    """Return one row of each chosen shape."""
    rows = layer_rows(timed)
    last = rows[rows["is_whole"]].reset_index().groupby(SHAPE)["index"].last()
    return timed.batch.take(last.loc[chosen].to_numpy())


if __name__ == "__main__":
    main()
