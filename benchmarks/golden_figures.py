"""Predictions of all models on small public tables, to hold them against stored ones.

Steps of each source of ``generalise.py``, from no row and from one, with the rows of
``tests/golden/steps`` and ``recipes/published``; operators and collectives of
``tests/golden/published`` by the protocols that a table supports; transfers and copies that nobody
measured, or one group of ranks alone, on devices and nodes of each kind; drawn curves that scatter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from forerun.benchmarks.generalise import SOURCES, Task, scored
from forerun.benchmarks.protocols.collectives import COLLECTIVE_PROTOCOLS, validate_collectives
from forerun.benchmarks.protocols.operator_samples import OperatorSamples, operator_samples
from forerun.benchmarks.protocols.operators import (
    OPERATOR_PROTOCOLS,
    scored_cells,
    validate_operators,
)
from forerun.benchmarks.protocols.scores import Split, concat_scored
from forerun.benchmarks.published.readers import RECIPES, read_published
from forerun.calib.fit._device_transfer import transfer_to_device
from forerun.calib.fit.batches import ShapeBatch, Timed
from forerun.calib.fit.laws import columns, least_s
from forerun.calib.fit.machine import Prediction, fit_machine
from forerun.calib.fit.priors import device_prior
from forerun.calib.network.cluster import host_copy_s, known_network
from forerun.calib.network.collective_times import CollectiveModel, fit_transfers
from forerun.calib.network.curves import Samples
from forerun.calib.network.groups import Group
from forerun.calib.records.cluster import Cluster, SeenNode, StatedNodes
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
ABSENT = "huggingface/nanotron"
"""Source without rows among those of this repository."""
STEPS = tuple(source.name for source in SOURCES if source.name != ABSENT)
COLLECTIVES = tuple(sorted((GOLDEN / "published").glob("coll_*.csv")))
OPERATORS = tuple(sorted((GOLDEN / "published").glob("ops_*.csv")))
TABLES = (
    *COLLECTIVES, *OPERATORS,
    RECIPES / "example_collectives.csv", RECIPES / "example_operators.csv",
)  # fmt: skip
DEVICES = (
    *("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "NVIDIA GB200"),
    *("NVIDIA GH200 96GB", "Tesla V100-SXM2-32GB", "NVIDIA L40S", "AMD Instinct MI300X", "cpu"),
)
CLUSTERS = {
    "usual": Cluster(),
    "pcie": Cluster(stated=StatedNodes(joint="pcie", num_gpus=4, num_cards=1)),
    "sockets": Cluster(
        seen=(SeenNode(num_gpus=4, num_cards=1, card_bytes_per_s=25e9, wire="socket"),)
    ),
    "cards": Cluster(stated=StatedNodes(num_cards=2, card_bytes_per_s=12.5e9)),
    "slots": Cluster(
        seen=(SeenNode(num_gpus=8, num_cards=4, card_bytes_per_s=50e9, wire="infiniband"),)
    ),
    "channels": Cluster(
        seen=(SeenNode(joint="pcie", variables=("NCCL_MAX_NCHANNELS=2",)),),
    ),
}
_PAYLOADS = np.array([1e3, 1e6, 1e9])
_SPANS = ((2, 1), (8, 1), (16, 2), (8, 8), (1024, 128))
"""Ranks and nodes."""
MEASURED = {
    (Collective.ALL_REDUCE, 8, 1): 120,
    (Collective.ALL_GATHER, 4, 1): 40,
    (Collective.ALL_REDUCE, 16, 2): 20,
    (Collective.REDUCE_SCATTER, 16, 2): 6,
}
"""Drawn payloads of collectives on ranks and nodes."""
EXTREME = (
    *(
        (Collective.ALL_REDUCE, 8, 1, 2e-6, 3e11, "usual"),
        (Collective.ALL_REDUCE, 16, 2, 3e-6, 4e10, "usual"),
    ),
    *(
        (Collective.ALL_REDUCE, 16, 2, 5e-4, 4e10, "usual"),
        (Collective.ALL_TO_ALL, 16, 2, 1e-6, 1e11, "usual"),
    ),
    *(
        (Collective.ALL_GATHER, 16, 2, 3e-5, 1e10, "usual"),
        (Collective.ALL_GATHER, 16, 2, 3e-5, 1e11, "sockets"),
    ),
    *(
        (Collective.ALL_GATHER, 16, 2, 3e-5, 1e11, "slots"),
        (Collective.ALL_GATHER, 4, 1, 1e-4, 1e10, "usual"),
    ),
)
"""Collective, ranks, nodes, latency (s), bytes/s and cluster of curves far from what is usual."""
ROUGH = (
    *((120, 0, 0.05, 4.0), (120, 0, 0.05, 2.0), (120, 0, 0.05, 1.0), (120, 0, 0.05, 0.0)),
    *((120, 1, 0.2, 0.5), (40, 0, 0.05, 0.0), (40, 0, 0.05, 0.5), (40, 1, 0.05, 0.5)),
    *((40, 1, 0.05, 0.0), (20, 0, 0.05, 0.0), (20, 0, 0.05, 4.0)),
)
"""Payloads, seed, noise and waves of curves for which each window of a running median is best."""
DRAWN: dict[OperatorKind, tuple[int, tuple[int, ...]]] = {
    OperatorKind.LINEAR_FC1: (150, (4096, 14336)),
    OperatorKind.LOGITS: (6, (4096, 32000)),
    OperatorKind.FUSED_NORM: (24, (4096,)),
    OperatorKind.MAMBA: (5, (10**8,)),
    OperatorKind.ELEMENTWISE: (7, (65536,)),
    OperatorKind.ROTARY: (9, (2, 32, 128)),
    OperatorKind.OPTIMIZER: (6, ()),
}
"""Number of shapes of drawn operators, and their sizes after the tokens."""
UNMEASURED = {
    OperatorKind.EXPERTS: (4096, 4096, 1024, 2, 8, 8),
    OperatorKind.SOFTMAX: (65536, 2048),
    OperatorKind.NORM: (4096, 4096),
    OperatorKind.ROUTER: (4096, 4096, 64),
    OperatorKind.BATCHED_PRODUCT: (32, 2048, 128, 2048),
    OperatorKind.FLASH_ATTENTION: (2, 32, 8, 2048, 128, 128),
    OperatorKind.OPTIMIZER: (10**8,),
}
"""Shapes of operators that nobody measured."""
FIGURES = {
    **{f"steps_{place}": name for place, name in enumerate(STEPS)},
    **{path.stem: path for path in TABLES},
    **{f"links_{place}": device for place, device in enumerate(DEVICES)},
    "curves": DEVICES[1],
    "drawn_operators": DEVICES[0],
}
"""Source, table or device of each set of figures, by name."""


def figures(name: str) -> dict[str, Any]:
    """Return predictions with their intervals, in seconds, by row and what was known."""
    with threadpool_limits(1):
        if name.startswith("steps_"):
            return {"steps": list(_steps(FIGURES[name]))}
        if name.startswith("links_"):
            return {"links": list(_links(str(FIGURES[name])))}
        if name == "drawn_operators":
            return {"operators": list(_drawn_operators(str(FIGURES[name])))}
        if name == "curves":
            return {"curves": list(_curves(str(FIGURES[name])))}
        return {"rows": list(_rows(FIGURES[name]))}


def _steps(source: Any) -> Iterator[list[Any]]:
    place = [one.name for one in SOURCES].index(source)
    tasks = [Task(data=GOLDEN / "steps", place=place, num_known=known, draws=1) for known in (0, 1)]
    for line in scored(tasks, 1):
        for frame in line.ours:
            for row in frame.to_dict("records"):
                times = [row["predicted_s"], row["low_s"], row["high_s"]]
                yield [line.num_known, row["row"].row_id, *map(float, times)]


def _rows(path: Any) -> Iterator[list[Any]]:
    table = read_published(pd.read_csv(path), path.stem)
    if "collective" in table:
        parts = [validate_collectives(table, seeds=(0,), protocols=tuple(COLLECTIVE_PROTOCOLS))]
    else:
        alone = validate_operators(table, seeds=(0,), protocols=tuple(OPERATOR_PROTOCOLS))
        parts = [alone, concat_scored(_every_second(operator_samples(table)))]
    for rows in parts:
        for row in rows.to_dict("records"):
            yield [value for value in row.values() if isinstance(value, str | int | float)]


def _every_second(samples: Sequence[OperatorSamples]) -> Iterator[pd.DataFrame]:
    """Yield scored rows of each device with every second sample known, on top of its prior."""
    for device in dict.fromkeys(one.device for one in samples):
        members = [one for one in samples if one.device == device]
        yield from scored_cells(
            members, "every_second", (0,), partial(fit_machine, use_prior=True), draw=_split
        )


def _split(samples: OperatorSamples, protocol: str, seed: int) -> Iterator[tuple[str, Split]]:
    is_known = np.arange(len(samples)) % 2 == seed
    yield protocol, Split(train=is_known, test=~is_known)


def _links(device: str) -> Iterator[list[Any]]:
    """Yield time and deviation of transfers: with nothing measured, and with one group alone."""
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        shape: dict[str, Any] = {"shape": (10**9,), "element_nbytes": 1}
        copy = Operator(kind=OperatorKind.HOST_COPY, phase=phase, **shape)
        yield ["copy", phase.value, host_copy_s(copy, device)]
    one = Group(collective=Collective.ALL_REDUCE, num_ranks=4, role=GroupRole.DP)
    samples = Samples(nbytes=_PAYLOADS, time_s=2e-5 + _PAYLOADS / 1e11, weight=np.ones(3))
    clusters = CLUSTERS if device == DEVICES[0] else {"usual": CLUSTERS["usual"]}
    for title, cluster in clusters.items():
        prior = known_network(device, cluster)
        for measured in ({}, {one: samples}):
            model = fit_transfers(measured, prior)
            for group in _groups():
                transfers = model.estimate(group, _PAYLOADS)
                spread = map(float, transfers.half_width_log)
                key = [title, len(measured), group.name, group.num_nodes, group.num_chosen]
                yield [*key, *map(float, np.exp(transfers.log_time)), *spread]


def _curves(device: str) -> Iterator[list[Any]]:
    """Yield time and deviation after curves that scatter, on a device and carried to another."""
    prior, models = known_network(device, Cluster()), {}
    samples = {
        Group(collective=collective, num_ranks=ranks, num_nodes=nodes, role=GroupRole.DP): (
            _drawn(number, place, 0.2, 0.0, base_s=2e-5 * nodes)
        )
        for place, ((collective, ranks, nodes), number) in enumerate(MEASURED.items())
    }
    models["measured"] = fit_transfers(samples, prior)
    moved = fit_transfers({}, known_network(DEVICES[0], Cluster()))
    models["moved"] = replace(moved, like=models["measured"])
    for title, model in models.items():
        for group in (*samples, *_groups()):
            yield [title, *_estimated(model, group, np.geomspace(1e2, 1e10, 5))]
    payloads = np.geomspace(1e2, 1e9, 3)
    for collective, ranks, nodes, base_s, bytes_per_s, title in EXTREME:
        group = Group(collective=collective, num_ranks=ranks, num_nodes=nodes, role=GroupRole.DP)
        law = Samples(nbytes=_PAYLOADS, time_s=base_s + _PAYLOADS / bytes_per_s, weight=np.ones(3))
        model = fit_transfers({group: law}, known_network(DEVICES[0], CLUSTERS[title]))
        for wanted in _groups():
            yield [title, group.name, base_s, *_estimated(model, wanted, payloads)]
    one = next(iter(samples))
    for drawn in ROUGH:
        model = fit_transfers({one: _drawn(*drawn)}, prior)
        yield [str(drawn), *_estimated(model, one, np.geomspace(2e3, 5e7, 5))]


def _drawn(number: int, seed: int, noise: float, waves: float, *, base_s: float = 2e-5) -> Samples:
    nbytes = np.geomspace(1e3, 1e8, number)
    scatter = noise * np.random.default_rng(seed).normal(size=number)
    log = scatter + 0.3 * np.sin(waves * np.log(nbytes))
    return Samples(
        nbytes=nbytes, time_s=(base_s + nbytes / 1e11) * np.exp(log), weight=np.ones(number)
    )


def _estimated(model: CollectiveModel, group: Group, payloads: Any) -> list[Any]:
    transfers = model.estimate(group, payloads)
    far = np.nan_to_num(transfers.octaves, posinf=-1.0)
    numbers = [*transfers.log_time, *transfers.half_width_log, *far]
    return [group.name, group.num_ranks, group.num_nodes, *(round(float(n), 9) for n in numbers)]


def _drawn_operators(device: str) -> Iterator[list[Any]]:
    """Yield times of drawn operators on a device, those that are refused, and both on another."""
    draw = np.random.default_rng(1)
    groups = {
        f"{kind.value}/{phase.value}": _timed(kind, phase, draw)
        for kind in DRAWN
        for phase in _phases(kind)
    }
    _plant_faults(groups)
    model = fit_machine(groups, device=device, use_prior=True)
    for one in model.refusals:
        yield [one.name, one.reason.value, one.num_refused, one.is_doubtful]
    few = {name: timed.take(np.arange(2)) for name, timed in groups.items() if "fc1" in name}
    other = transfer_to_device(model, device=DEVICES[3])
    probed = transfer_to_device(model, device=DEVICES[3], probes=few)
    for title, machine in {"measured": model, "moved": other, "probed": probed}.items():
        for name, timed in groups.items():
            batch = timed.batch.take(np.arange(0, len(timed), 1 + len(timed) // 4))
            batch = replace(batch, sizes=batch.sizes * 1.7 // 1)
            yield [title, name, *_rounded(machine.predict(name, batch))]
    for place in (*DEVICES[:7], DEVICES[8]):
        bare = fit_machine({}, device=place, use_prior=True)
        for kind, sizes in UNMEASURED.items():
            batch = _batch(kind, _phases(kind)[-1], np.array([sizes], dtype=np.float64))
            yield [place, kind.value, *_rounded(bare.predict_unmeasured(batch))]


def _timed(kind: OperatorKind, phase: Phase, draw: np.random.Generator) -> Timed:
    """Return times of a kind by its law at half of an H100's rates, with scatter and waves."""
    number, rest = DRAWN[kind]
    tokens = np.round(np.geomspace(300, 60000, number)) * (1 if rest else 10**5)
    batch = _batch(kind, phase, np.column_stack([tokens, *(np.full(number, n) for n in rest)]))
    launches, flop, nbytes = columns(batch).totals().T
    time_s = 4e-6 * launches + flop / 4e14 + nbytes / 1.5e12
    log = 0.05 * draw.normal(size=number) + 0.1 * np.sin(3 * np.log(tokens))
    return Timed(batch=batch, time_s=time_s * np.exp(log), weight=np.ones(number))


def _phases(kind: OperatorKind) -> tuple[Phase, ...]:
    if kind is OperatorKind.OPTIMIZER:
        return (Phase.STEP,)
    return Phase.FORWARD, Phase.BACKWARD


def _batch(kind: OperatorKind, phase: Phase, sizes: Any) -> ShapeBatch:
    return ShapeBatch(kind=kind, phase=phase, sizes=sizes, element_nbytes=np.full(len(sizes), 2.0))


def _plant_faults(groups: Mapping[str, Timed]) -> None:
    """Write forward times twice, backwards that are too short and rates above the data sheet."""
    norm, copied = (groups[f"fused_norm/{phase}"].time_s for phase in ("forward", "backward"))
    copied[:8] = norm[:8] * np.exp([0.002, 0.004, 0.006, 0.008, -0.0095, 0.003, -0.001, 0.012])
    product, short = (groups[f"linear_fc1/{phase}"].time_s for phase in ("forward", "backward"))
    short[:4] = product[:4] * [0.5, 0.58, 0.7, 0.8]
    for name, rows, factors in (
        ("logits/forward", slice(3), [1 / 1.01, 1 / 1.2, 1 / 1.3]),
        ("elementwise/forward", slice(3, None), 0.5),
        ("optimizer/step", slice(4, None), 1.2),
    ):
        timed = groups[name]
        timed.time_s[rows] = (least_s(timed.batch, device_prior(DEVICES[0]).peaks_for))[rows]
        timed.time_s[rows] *= factors


def _rounded(prediction: Prediction) -> list[float]:
    rows = (prediction.log_time, prediction.low, prediction.high, prediction.octaves)
    return [round(float(n), 6) for row in rows for n in np.nan_to_num(row, posinf=-1.0)]


def _groups() -> Iterator[Group]:
    for collective in Collective:
        for ranks, nodes in _SPANS:
            role = (
                GroupRole.PP if collective in (Collective.SEND, Collective.RECV) else GroupRole.DP
            )
            yield Group(collective=collective, num_ranks=ranks, num_nodes=nodes, role=role)
    for chosen in (2, 8):
        yield Group(
            collective=Collective.ALL_TO_ALL, num_ranks=16, num_nodes=2, role=GroupRole.EP,
            num_chosen=chosen,
        )  # fmt: skip
