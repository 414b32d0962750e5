"""The sample table: what models are fitted on, and what later commands read of a run.

Also which windows of a run it holds, and the rows of some of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from operator import attrgetter
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..errors import CalibrationError, ConfigError, RecordError
from ..plain_json import parse_json
from ..records import (
    Cluster,
    CollectiveRecord,
    CoverageRecord,
    LoopRecord,
    OperatorRecord,
    PhaseRecord,
    RankRecord,
    RunRecords,
    StatedNodes,
    StepFlag,
    StepRecord,
    TraceRecord,
    WindowRecord,
    joined_clusters,
)
from ..units import NS_PER_S
from ..workload import Parallelism, RunConfig, decode, encode_fields
from .clocks import arrival_rows, clock_rows, link_rows
from .columns import FRAMES, normalise, shape_text
from .operator_rows import (
    host_microbatch_rows,
    host_step_rows,
    operator_rows,
    probed_operator_rows,
    traced_rows,
)
from .routing import load_rows, routing_rows
from .transfers import collective_rows, match_ranks, probed_collective_rows, skew_rows

_READINGS = ("start_ns", "issue_ns")
"""Of a clock: as floats of seconds they would lose their last digits."""
_OF_HOSTS = ("host_bound_frac", "host_s", "host_spread_log")
"""Columns about the host of a device; older tables lack them."""
_OF_RUNS = ("runs", "traced")
"""Frames that stay whole: headers have no window, and only one window of a run is traced."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleTable:
    """Frames of one or several runs and windows; ``columns.FRAMES`` documents their columns."""

    samples: pd.DataFrame
    steps: pd.DataFrame
    phases: pd.DataFrame
    skew: pd.DataFrame
    arrivals: pd.DataFrame
    clocks: pd.DataFrame
    links: pd.DataFrame
    ranks: pd.DataFrame
    traced: pd.DataFrame
    routing: pd.DataFrame
    loads: pd.DataFrame
    coverage: pd.DataFrame
    windows: pd.DataFrame
    runs: pd.DataFrame

    @staticmethod
    def concat(tables: Sequence[SampleTable]) -> SampleTable:
        """All rows of the tables; where keys are equal the later table wins."""
        if not tables:
            raise CalibrationError("no sample tables to join; give at least one")
        return SampleTable(
            **{
                name: normalise(name, pd.concat([getattr(t, name) for t in tables]))
                for name in FRAMES
            }
        )

    def newest(self, name: str) -> pd.DataFrame:
        """The rows of the newest run in one of the frames."""
        frame: pd.DataFrame = getattr(self, name)
        return frame[frame["run_id"] == self.run_id]

    def equals(self, other: SampleTable) -> bool:
        """True where all frames hold the same rows."""
        return all(getattr(self, f.name).equals(getattr(other, f.name)) for f in fields(self))

    @property
    def sha256(self) -> str:
        """Hash of the samples that models are fitted on."""
        rows = self.samples
        # As tables were written before there were such columns.
        empty = [name for name in _OF_HOSTS if not rows[name].any()]
        rows = rows.drop(columns=empty)
        text = rows.to_csv(index=False, float_format="%.17g")
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def operators(self) -> pd.DataFrame:
        """The operator rows of ``samples``."""
        return self.samples[self.samples["row"] == "operator"]

    @property
    def collectives(self) -> pd.DataFrame:
        """The collective rows of ``samples``."""
        return self.samples[self.samples["row"] == "collective"]

    @property
    def run_id(self) -> str:
        """The run that started last."""
        if self.runs.empty:
            raise CalibrationError("the sample table holds no run; record with --calibrate")
        newest = self.runs.sort_values(["started_unix_s", "run_id"], kind="stable")
        return str(newest["run_id"].iloc[-1])

    def ranks_per_node(self) -> int:
        """Ranks of the newest run that share a node; 0 where the run does not say."""
        try:
            return self.config().parallelism.ranks_per_node
        except CalibrationError:
            return 0

    @property
    def is_described(self) -> bool:
        """True where the layout of the newest run is known."""
        return bool((self.newest("runs")["config"] != "").any())

    def config(self) -> RunConfig:
        """The layout of the newest run, as its first rank saw it."""
        runs = self.newest("runs")
        found = runs.loc[runs["config"] != "", "config"]
        if found.empty:
            raise CalibrationError(
                f"run {self.run_id!r} has no description of its layout; give config to "
                "forerun.attach and record it again"
            )
        try:
            described: Any = parse_json(str(found.iloc[0]))
        except ValueError as err:
            raise RecordError(
                f"run {self.run_id!r} has a damaged description ({err}); record again"
            ) from err
        return RunConfig.from_json(described)

    def loop(self) -> LoopRecord:
        """What the loop of the newest run showed of itself, as its first rank saw it."""
        texts = self.newest("runs")["loop"]
        first = next((str(text) for text in texts if text), "")
        try:
            return decode(LoopRecord, parse_json(first)) if first else LoopRecord()
        except (ConfigError, ValueError) as err:
            raise RecordError(
                f"run {self.run_id!r} has a damaged account of its loop ({err}); record again"
            ) from err

    def cluster(self) -> Cluster:
        """What is known of the nodes of the newest run."""
        texts = self.newest("runs")["cluster"]
        return joined_clusters(_cluster(str(text)) for text in texts if text)

    def with_stated(self, stated: StatedNodes) -> SampleTable:
        """The table with what is now said of the nodes of its newest run.

        Where that changes the NVLink domain, nodes of groups follow from their ranks again.
        """
        known = replace(self.cluster(), stated=stated)
        own = self.config()
        layout = known.joined(own.parallelism, own.device)
        is_first = self.runs["run_id"] == self.run_id
        is_told = is_first & (self.runs["config"] != "")
        config = replace(own, parallelism=layout)
        runs = self.runs.assign(cluster=self.runs["cluster"].mask(is_first, ""))
        first = int(np.flatnonzero(is_first)[0])
        runs.loc[first, "cluster"] = json.dumps(known.to_json(), sort_keys=True)
        runs.loc[is_told, "config"] = json.dumps(config.to_json(), sort_keys=True)
        samples = self.samples
        if layout != own.parallelism:
            samples = samples.assign(num_nodes=0)
        return replace(self, runs=runs, samples=samples)

    def step_times_s(self, *, is_hooked: bool | None = None) -> NDArray[np.float64]:
        """Time of each clean step of the newest run in step order, median over ranks."""
        steps = self.newest("steps")
        keep = steps["is_clean"]
        if is_hooked is not None:
            keep = keep & (steps["is_hooked"] == is_hooked)
        return steps[keep].groupby("step", sort=True)["time_s"].median().to_numpy(dtype=np.float64)

    def bare_step_numbers(self) -> tuple[int, ...]:
        """Iterations, from 1, of the newest run's clean bare steps; in the order of their times."""
        steps = self.newest("steps")
        bare = steps[steps["is_clean"] & ~steps["is_hooked"]]
        return tuple(int(step) + 1 for step in sorted(bare["step"].unique()))

    def skew_s(self) -> dict[int, float]:
        """Mean waiting per step of each rank for later ranks, newest window of the newest run."""
        skew = self.newest("skew")
        skew = skew[skew["window"] == skew["window"].max()]
        waits = skew.groupby("rank", sort=True)["wait_s"].sum()
        return dict(zip(waits.index.tolist(), waits.tolist(), strict=True))

    def memory_peak_nbytes(self) -> dict[int, int]:
        """Largest memory peak of each rank of the newest run; ranks that know none are left out."""
        rows = self.newest("windows")
        peaks = rows[rows["memory_peak_nbytes"] > 0].groupby("rank")["memory_peak_nbytes"].max()
        return dict(zip(peaks.index.tolist(), peaks.tolist(), strict=True))

    def device_memory_nbytes(self) -> int | None:
        """Memory of the smallest device of the newest run; None where it is not known."""
        rows = self.newest("windows")
        known = rows.loc[rows["device_memory_nbytes"] > 0, "device_memory_nbytes"]
        return None if known.empty else int(known.min())


def _cluster(text: str) -> Cluster:
    try:
        return Cluster.from_json(parse_json(text))
    except ValueError:
        return Cluster()


def build_table(run: RunRecords) -> SampleTable:
    """The sample table of one run; steps that any rank flagged give no samples."""
    return with_probes(build_live_table(run), run)


def with_probes(table: SampleTable, run: RunRecords) -> SampleTable:
    """The table with the samples of the run's probes, whose controls are in the table."""
    probed = _timed(run, OperatorRecord, is_probe=True)
    transfers = _collective_frame(run, is_probe=True)
    if probed.empty and transfers.empty:
        return table
    is_host = _is_host(run)
    live = table.operators
    own = live[(live["run_id"] == run.run_id) & ~live["is_probe"]]
    moved = table.collectives
    inside = moved[(moved["run_id"] == run.run_id) & ~moved["is_probe"]]
    layout = next((config.parallelism for config in run.configs.values()), None)
    found = [
        probed_operator_rows(probed, own, is_host=is_host).assign(row="operator"),
        probed_collective_rows(transfers, inside, layout, is_host=is_host).assign(row="collective"),
    ]
    samples = pd.concat([table.samples, _stacked(run, found)])
    return replace(table, samples=normalise("samples", samples))


def build_live_table(run: RunRecords) -> SampleTable:
    """The same without probes: each of its rows comes from the records of one window alone."""
    steps = _step_frame(run)
    marks = steps[["window", "rank", "step", "is_hooked", "is_clean"]]
    operators = _clean(_timed(run, OperatorRecord), marks)
    every_phase = _frame(run, PhaseRecord)
    phases = _clean(every_phase, marks)
    described = next(iter(run.configs.values()), None)
    layout = described.parallelism if described is not None else None
    moved = _collective_frame(run)
    transfers = _clean(moved, marks)
    matched = match_ranks(transfers, layout, is_queued=not _is_host(run))
    clocks = clock_rows(matched)
    clean_steps = steps[steps["is_clean"]]
    samples = [
        operator_rows(operators).assign(row="operator"),
        host_microbatch_rows(operators, phases).assign(row="operator"),
        host_step_rows(phases, clean_steps).assign(row="operator"),
        collective_rows(_with_traced(matched, steps, moved, layout)).assign(row="collective"),
    ]
    frames = {
        "samples": _stacked(run, samples),
        "steps": steps,
        "phases": _phase_totals(every_phase),
        "skew": skew_rows(matched[matched["rank"].isin(run.recording_plan.replica)]),
        "arrivals": arrival_rows(matched, clocks),
        "clocks": clocks,
        "links": link_rows(matched),
        "ranks": _frame(replace(run, records=run.summaries), RankRecord),
        "traced": traced_rows(_timed(run, TraceRecord)),
        "routing": routing_rows(operators, transfers, described),
        "loads": load_rows(operators, transfers, described),
        "coverage": _frame(run, CoverageRecord),
        "windows": _frame(run, WindowRecord),
        "runs": run_rows(run),
    }
    return SampleTable(
        **{name: normalise(name, frame.assign(run_id=run.run_id)) for name, frame in frames.items()}
    )


def _is_host(run: RunRecords) -> bool:
    """True where it ran on CPUs alone, whose transfers may run side by side."""
    return all(header.device == "cpu" for header in run.headers.values())


def _stacked(run: RunRecords, parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat([normalise("samples", part.assign(run_id=run.run_id)) for part in parts])


def _frame(run: RunRecords, kind: type, *, is_probe: bool = False) -> pd.DataFrame:
    """One row per record of a type, with its rank and stage; without any, columns alone.

    Enums stand by their values, tuples as text, and lengths of time also in seconds.
    """
    names = [spec.name for spec in fields(kind)]
    columns: dict[str, list[object]] = {name: [] for name in ["rank", *names]}
    for rank, records in run.records.items():
        found = [
            record
            for record in records
            if type(record) is kind and getattr(record, "is_probe", False) == is_probe
        ]
        columns["rank"] += [rank] * len(found)
        for name in names:
            columns[name] += map(attrgetter(name), found)
    frame = pd.DataFrame({name: _cells(name, values) for name, values in columns.items()})
    for name in names:
        if name.endswith("_ns") and name not in _READINGS:
            frame[f"{name[:-3]}_s"] = frame[name].astype("float64") / NS_PER_S
        elif name.startswith("is_"):
            frame[name] = frame[name].astype(bool)
    stages = {rank: header.stage for rank, header in run.headers.items()}
    return frame.assign(stage=[stages.get(rank, -1) for rank in frame["rank"]])


def _cells(name: str, values: list[Any]) -> list[Any]:
    """Values of a column, all of one type, as they stand in the table."""
    if values and isinstance(values[0], Enum):
        return [value.value for value in values]
    if not values or not isinstance(values[0], tuple):
        return values
    if name.endswith("_ns"):
        return [sum(parts) for parts in values]
    if name == "shape":
        return [shape_text(shape) for shape in values]
    return [",".join(str(getattr(part, "value", part)) for part in parts) for parts in values]


def _step_frame(run: RunRecords) -> pd.DataFrame:
    frame = _frame(run, StepRecord)
    frame["time_s"] = frame["duration_s"] + frame["gap_s"]
    flagged = frame["flags"].ne("").groupby([frame["window"], frame["step"]])
    frame["is_clean"] = ~flagged.transform("any").astype(bool)
    return frame


def _timed(run: RunRecords, kind: type, *, is_probe: bool = False) -> pd.DataFrame:
    frame = _frame(run, kind, is_probe=is_probe)
    return frame.assign(time_s=frame["duration_s"])


def _with_traced(
    matched: pd.DataFrame, steps: pd.DataFrame, transfers: pd.DataFrame, layout: Parallelism | None
) -> pd.DataFrame:
    """The transfers, and those of the traced steps, which have their kernels' times."""
    marks = steps[steps["flags"] == StepFlag.TRACED.value].assign(is_clean=True)
    marks = marks[["window", "rank", "step", "is_hooked", "is_clean"]]
    traced = _clean(transfers, marks)
    return matched if traced.empty else pd.concat([matched, match_ranks(traced, layout)])


def _collective_frame(run: RunRecords, *, is_probe: bool = False) -> pd.DataFrame:
    """Transfers between ranks: a group of one has none."""
    frame = _timed(run, CollectiveRecord, is_probe=is_probe)
    return frame[np.array(["," in ranks for ranks in frame["ranks"]], dtype=bool)].copy()


def _clean(events: pd.DataFrame, marks: pd.DataFrame) -> pd.DataFrame:
    """The events of steps that ended and that no rank flagged, with the step's marks."""
    keys = ["window", "rank", "step"]
    known = marks[marks["is_clean"]].drop_duplicates(subset=keys, keep="last")
    if events.empty:
        return events.assign(is_hooked=pd.Series(dtype=bool))
    return events.merge(known, on=keys, how="inner")


def _phase_totals(phases: pd.DataFrame) -> pd.DataFrame:
    keys = ["window", "rank", "step", "name"]
    groups = phases.sort_values([*keys, "start_ns"], kind="stable").groupby(keys, sort=True)
    return groups.agg(
        count=("duration_s", "size"),
        time_s=("duration_s", "sum"),
        wait_s=("wait_s", "sum"),
        hook_s=("hook_s", "sum"),
    ).reset_index()


def run_rows(run: RunRecords) -> pd.DataFrame:
    """The frame ``runs``: headers and run descriptions by rank."""
    rows = []
    for rank, header in run.headers.items():
        config = run.configs.get(rank)
        text = json.dumps(config.to_json(), sort_keys=True) if config else ""
        told = {f.name: getattr(header, f.name) for f in fields(header)}
        seen = json.dumps(header.cluster, sort_keys=True) if header.cluster else ""
        loop = run.loops.get(rank)
        shown = json.dumps(encode_fields(loop), sort_keys=True) if loop else ""
        rows.append({**told, "config": text, "cluster": seen, "loop": shown})
    return normalise("runs", pd.DataFrame(rows).assign(run_id=run.run_id))


def windows_of(table: SampleTable) -> list[int]:
    """Windows of the newest run that have a clean step, oldest first."""
    steps = table.newest("steps")
    windows = sorted(int(w) for w in steps[steps["is_clean"]]["window"].unique())
    if not windows:
        raise CalibrationError("no window has a clean step; record more steps")
    return windows


def only_windows(table: SampleTable, windows: Sequence[int]) -> SampleTable:
    """The newest run's rows of these windows."""
    run_id = table.run_id
    frames = {name: getattr(table, name) for name in FRAMES if name not in _OF_RUNS}
    return replace(
        table,
        **{
            name: frame[(frame["run_id"] == run_id) & frame["window"].isin(windows)]
            for name, frame in frames.items()
        },
    )
