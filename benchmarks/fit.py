"""How fast calibrations are fitted and asked, and how well they extrapolate.

    python benchmarks/fit.py
    python benchmarks/fit.py --operators ops_ett_fwd_bwd.csv.gz

The second form scores the fit on measured operators (one row per operator, degree and shape, with
forward and backward microseconds) against a forest that learns raw time, as mean absolute
percentage error over operators, in three protocols: few random samples, more, and small to large.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.ensemble import RandomForestRegressor

from forerun.calib.fit.ceilings import fit_law
from forerun.calib.fit.efficiency import fit_efficiency
from forerun.calib.fit.laws import Ceilings, law_time_s
from forerun.calib.fit.priors import device_prior
from forerun.calib.fit.training import Measured
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

Times = dict[Operator, float]
Split = Callable[[np.random.Generator, list[Operator]], tuple[list[Operator], list[Operator]]]
TRUE = Ceilings(flop_per_s=8e10, bytes_per_s=9e9, launch_s=1.5e-5)
VOCAB = 50304
SEEDS = range(3)
MOST_TESTED = 200
KINDS = {
    "linear1": OperatorKind.LINEAR_QKV,
    "linear2": OperatorKind.LINEAR_PROJ,
    "linear3": OperatorKind.LINEAR_FC1,
    "linear4": OperatorKind.LINEAR_FC2,
    "linear_final": OperatorKind.LOGITS,
    "gelu": OperatorKind.ACTIVATION,
    "layernorm": OperatorKind.NORM,
    "res_add": OperatorKind.RESIDUAL,
    "parallel_cross_entropy_128": OperatorKind.LOSS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operators", type=Path, help="measured operators, CSV")
    arguments = parser.parse_args()
    report_speed()
    if arguments.operators:
        report_accuracy(read_operators(arguments.operators))


def report_speed() -> None:
    """Refit and query times on planted products and norms of several widths."""
    for num_widths in (1, 3, 8, 40):
        times = {o: law_time_s(o, TRUE) for o in planted(num_widths)}
        fit_s = least(lambda t=times: fit(t, "cpu"))
        model = fit(times, "cpu")
        key = (OperatorKind.LINEAR_FC1, Phase.FORWARD)
        queries = [
            Operator(kind=key[0], phase=key[1], shape=(256, 512 + i, 2048), element_nbytes=4)
            for i in range(5000)
        ]
        query_s = least(lambda m=model, q=queries: m.predict((q[0].kind, q[0].phase), q))
        print(
            f"{num_widths:3d} shapes per kind, {len(times):4d} samples: refit {fit_s * 1e3:7.1f} "
            f"ms, {len(queries) / query_s:9.0f} operators/s"
        )


def report_accuracy(groups: dict[tuple[OperatorKind, Phase], Times]) -> None:
    """Mean error over operators by protocol, of the fit and of forests on raw time."""
    protocols: dict[str, Split] = {
        "1 random sample": random_split(1),
        "8 random samples": random_split(8),
        "24 random samples": random_split(24),
        "8 small to large": size_split(8),
        "200 small to large": size_split(200),
    }
    for name, split in protocols.items():
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            chosen = {key: times for key, times in groups.items() if key[1] is phase}
            ours, raw = zip(*(score(chosen, split, seed) for seed in SEEDS), strict=True)
            print(
                f"{name:20s} {phase.value:8s}: efficiency {np.mean(ours) * 100:5.1f} %   "
                f"raw time {np.mean(raw) * 100:6.1f} %"
            )


def score(
    groups: dict[tuple[OperatorKind, Phase], Times], split: Split, seed: int
) -> tuple[float, float]:
    """Mean relative error of the fit and of one raw-time forest per operator."""
    rng = np.random.default_rng(seed)
    splits = {
        key: split(rng, sorted(times, key=lambda o: o.shape)) for key, times in groups.items()
    }
    known = {o: groups[key][o] for key, (train, _) in splits.items() for o in train}
    model = fit(known, "A100")
    ours, raw = [], []
    for key, (train, test) in splits.items():
        true = np.array([groups[key][o] for o in test])
        estimated = np.exp(model.predict(key, test).log_time)
        forest = RandomForestRegressor(random_state=seed).fit(
            [o.shape for o in train], [known[o] for o in train]
        )
        ours.append(np.mean(np.abs(estimated / true - 1)))
        raw.append(np.mean(np.abs(forest.predict([o.shape for o in test]) / true - 1)))
    return float(np.mean(ours)), float(np.mean(raw))


def fit(times: Times, device: str):
    """An efficiency model of samples that all weigh the same."""
    law = fit_law(
        list(times), np.array(list(times.values())), np.ones(len(times)), device_prior(device)
    )
    return fit_efficiency(
        {o: Measured(time_s=t, sigma_log=0.02, weight=1.0, num_rows=1) for o, t in times.items()},
        law,
    )


def random_split(number: int) -> Split:
    def split(rng: np.random.Generator, operators: list[Operator]):
        order = [operators[i] for i in rng.permutation(len(operators))]
        return order[:number], order[number : number + MOST_TESTED]

    return split


def size_split(number: int) -> Split:
    """Train on the smaller half, test on the largest fifth."""

    def split(rng: np.random.Generator, operators: list[Operator]):
        order = sorted(operators, key=lambda o: law_time_s(o, TRUE))
        small, large = order[: len(order) // 2], order[int(len(order) * 0.8) :]
        return (
            [small[i] for i in rng.permutation(len(small))[:number]],
            [large[i] for i in rng.permutation(len(large))[:MOST_TESTED]],
        )

    return split


def planted(num_widths: int) -> Iterator[Operator]:
    """Five products and three memory operators, forward and backward, of each width."""
    for width in range(256, 256 + 64 * num_widths, 64):
        shapes = {kind: (256, width, 4 * width) for kind in OperatorKind if kind.is_linear}
        shapes |= {
            OperatorKind.NORM: (256, width),
            OperatorKind.RESIDUAL: (256, width),
            OperatorKind.ACTIVATION: (256, 4 * width, 4 * width),
        }
        for kind, shape in shapes.items():
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                yield Operator(kind=kind, phase=phase, shape=shape, element_nbytes=4)


def read_operators(path: Path) -> dict[tuple[OperatorKind, Phase], Times]:
    """Median seconds of each distinct operator in the file, by kind and phase."""
    table = pd.read_csv(path)
    table = table[table["op"].isin(list(KINDS)) & table["flag"].isna()]
    found: dict[tuple[OperatorKind, Phase], dict[Operator, list[float]]] = {}
    for row in table.to_dict("records"):
        for phase, column in ((Phase.FORWARD, "fwd_time_us"), (Phase.BACKWARD, "bwd_time_us")):
            if row[column] > 0:
                kind = KINDS[row["op"]]
                operator = Operator(kind=kind, phase=phase, shape=shape_of(row), element_nbytes=2)
                found.setdefault((kind, phase), {}).setdefault(operator, []).append(
                    row[column] * 1e-6
                )
    return {key: {o: float(np.median(v)) for o, v in times.items()} for key, times in found.items()}


def shape_of(row: dict[str, object]) -> tuple[int, ...]:
    """Our canonical shape of a row."""

    def size(name: str) -> int:
        value = float(str(row[name]))
        return 1 if np.isnan(value) else int(value)

    tokens, hidden, tp = size("micro_batch") * size("seq_len"), size("hidden"), size("tp")
    kind = KINDS[str(row["op"])]
    if kind is OperatorKind.LOGITS:
        return tokens, hidden, VOCAB // tp
    if kind.is_linear:
        return size("gemm_m"), size("gemm_k"), size("gemm_n")
    if kind is OperatorKind.ACTIVATION:
        return tokens, 4 * hidden // tp, 4 * hidden // tp
    return tokens, VOCAB // tp if kind is OperatorKind.LOSS else hidden


def least(action: Callable[[], object]) -> float:
    """Processor seconds of the fastest of three runs."""
    action()
    found = []
    for _ in range(3):
        start = time.process_time()
        action()
        found.append(time.process_time() - start)
    return min(found)


if __name__ == "__main__":
    main()
