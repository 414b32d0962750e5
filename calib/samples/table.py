"""The sample table, the input of model fits and of later commands on a run.

It also lists the windows of a run, and selects the rows of some of them.
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

from ..errors import CalibrationError, ConfigError, RecordError
from ..marks.run_records import RunRecords
from ..plain_json import parse_json
from ..records.cluster import Cluster, StatedNodes, joined_clusters
from ..records.record_kinds import (
    CollectiveRecord,
    CoverageRecord,
    LoopRecord,
    OperatorRecord,
    PhaseRecord,
    RankRecord,
    StepFlag,
    StepRecord,
    TraceRecord,
    WindowRecord,
)
from ..units import NS_PER_S
from ..workload.config import RunConfig
from ..workload.config_json import decode, encode_fields
from ..workload.parallelism import Parallelism
from ._clocks import arrival_rows, clock_rows, link_rows
from ._operator_rows import (
    host_microbatch_rows,
    host_step_rows,
    operator_rows,
    probed_operator_rows,
    traced_rows,
    with_added,
)
from ._routing import load_rows, routing_rows
from ._transfers import collective_rows, match_ranks, probed_collective_rows, skew_rows
from .columns import FRAMES, normalise, shape_text

_READINGS = ("start_ns", "issue_ns")
"""Clock readings, which would lose their last digits as floats of seconds."""
_OF_HOSTS = ("host_bound_frac", "host_s", "host_spread_log")
"""Columns about the host of a device; older tables lack them."""
_OF_RUNS = ("runs", "traced")
"""Frames that are not split by window: headers have none, and only one window of a run is
traced."""


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
        """Return all rows of the tables; for equal keys the later table wins."""
        if not tables:
            raise CalibrationError("no sample tables to join; give at least one")
        return SampleTable(
            **{
                name: normalise(name, pd.concat([getattr(t, name) for t in tables]))
                for name in FRAMES
            }
        )

    def newest(self, name: str) -> pd.DataFrame:
        """Return the rows of the newest run in one of the frames."""
        frame: pd.DataFrame = getattr(self, name)
        return frame[frame["run_id"] == self.run_id]

    def equals(self, other: SampleTable) -> bool:
        """Return True if all frames have the same rows."""
        return all(getattr(self, f.name).equals(getattr(other, f.name)) for f in fields(self))

    @property
    def sha256(self) -> str:
        """Hash of the samples that models are fitted on."""
        rows = self.samples
        # Leave out empty columns, so that tables from before these columns have the same hash.
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
        """Return the ranks per node of the newest run; 0 if the run does not state it."""
        try:
            return self.config().parallelism.ranks_per_node
        except CalibrationError:
            return 0

    @property
    def is_described(self) -> bool:
        """True if the layout of the newest run is known."""
        return bool((self.newest("runs")["config"] != "").any())

    def config(self) -> RunConfig:
        """Return the layout of the newest run, as recorded by its first rank."""
        runs = self.newest("runs")
        texts = runs.loc[runs["config"] != "", "config"]
        if texts.empty:
            raise CalibrationError(
                f"run {self.run_id!r} has no description of its layout; give a launch line in its "
                "place, or config to forerun.attach and record it again"
            )
        try:
            described: Any = parse_json(str(texts.iloc[0]))
        except ValueError as err:
            raise RecordError(
                f"run {self.run_id!r} has a damaged description ({err}); record again"
            ) from err
        return RunConfig.from_json(described)

    @property
    def device(self) -> str:
        """Driver's name of the newest run's accelerators, or ``cpu``."""
        runs = self.newest("runs")
        return self.config().device if self.is_described else str(runs["device"].iloc[0])

    def loop(self) -> LoopRecord:
        """Return the recorded properties of the newest run's loop, from its first rank."""
        texts = self.newest("runs")["loop"]
        first = next((str(text) for text in texts if text), "")
        try:
            return decode(LoopRecord, parse_json(first)) if first else LoopRecord()
        except (ConfigError, ValueError) as err:
            raise RecordError(
                f"run {self.run_id!r} has a damaged account of its loop ({err}); record again"
            ) from err

    def cluster(self) -> Cluster:
        """Return the known properties of the nodes of the newest run."""
        texts = self.newest("runs")["cluster"]
        return joined_clusters(_cluster(str(text)) for text in texts if text)

    def with_stated(self, stated: StatedNodes) -> SampleTable:
        """Return the table with new statements about the nodes of its newest run.

        If they change the NVLink domain, nodes of groups are derived from their ranks anew.
        """
        known = replace(self.cluster(), stated=stated)
        current_config = self.config()
        layout = known.with_domain_nodes(current_config.parallelism, current_config.device)
        is_first = self.runs["run_id"] == self.run_id
        has_config = is_first & (self.runs["config"] != "")
        config = replace(current_config, parallelism=layout)
        runs = self.runs.assign(cluster=self.runs["cluster"].mask(is_first, ""))
        first = int(np.flatnonzero(is_first)[0])
        runs.loc[first, "cluster"] = json.dumps(known.to_json(), sort_keys=True)
        runs.loc[has_config, "config"] = json.dumps(config.to_json(), sort_keys=True)
        samples = self.samples
        if layout != current_config.parallelism:
            samples = samples.assign(num_nodes=0)
        return replace(self, runs=runs, samples=samples)


def _cluster(text: str) -> Cluster:
    try:
        return Cluster.from_json(parse_json(text))
    except ValueError:
        return Cluster()


def build_table(run: RunRecords) -> SampleTable:
    """Build the sample table of one run; steps that any rank flagged contribute no samples."""
    return with_probes(build_live_table(run), run)


def with_probes(table: SampleTable, run: RunRecords) -> SampleTable:
    """Add the samples of the run's probes to the table, which has their controls."""
    probed = _timed(run, OperatorRecord, is_probe=True)
    transfers = _collective_frame(run, is_probe=True)
    if probed.empty and transfers.empty:
        return table
    is_host = run.device == "cpu"
    live = table.operators
    run_operators = live[(live["run_id"] == run.run_id) & ~live["is_probe"]]
    moved = table.collectives
    inside = moved[(moved["run_id"] == run.run_id) & ~moved["is_probe"]]
    layout = next((config.parallelism for config in run.configs.values()), None)
    probe_frames = [
        probed_operator_rows(probed, run_operators, is_host=is_host).assign(row="operator"),
        probed_collective_rows(transfers, inside, layout, is_host=is_host).assign(row="collective"),
    ]
    samples = pd.concat([table.samples, _stacked(run, probe_frames)])
    return replace(table, samples=normalise("samples", samples))


def build_live_table(run: RunRecords) -> SampleTable:
    """Build the table without probes: each of its rows comes from the records of one window
    alone."""
    steps = _step_frame(run)
    marks = steps[["window", "rank", "step", "is_hooked", "is_clean"]]
    operators = _clean(_timed(run, OperatorRecord), marks)
    every_phase = _frame(run, PhaseRecord)
    phases = _clean(every_phase, marks)
    described = next(iter(run.configs.values()), None)
    layout = described.parallelism if described is not None else None
    moved = _collective_frame(run)
    transfers = _clean(moved, marks)
    matched = match_ranks(transfers, layout, is_queued=run.device != "cpu")
    clocks = clock_rows(matched)
    if run.device != "cpu":
        steps = with_added(steps, operators, phases)
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


def _stacked(run: RunRecords, parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat([normalise("samples", part.assign(run_id=run.run_id)) for part in parts])


def _frame(run: RunRecords, kind: type, *, is_probe: bool = False) -> pd.DataFrame:
    """Return one row per record of a type, with its rank and stage; without any, only the columns.

    Enums are given by their values, tuples as text, and durations also in seconds.
    """
    names = [spec.name for spec in fields(kind)]
    columns: dict[str, list[object]] = {name: [] for name in ["rank", *names]}
    for rank, records in run.records.items():
        selected = [
            record
            for record in records
            if type(record) is kind and getattr(record, "is_probe", False) == is_probe
        ]
        columns["rank"] += [rank] * len(selected)
        for name in names:
            columns[name] += map(attrgetter(name), selected)
    frame = pd.DataFrame({name: _cells(name, values) for name, values in columns.items()})
    for name in names:
        if name.endswith("_ns") and name not in _READINGS:
            frame[f"{name[:-3]}_s"] = frame[name].astype("float64") / NS_PER_S
        elif name.startswith("is_"):
            frame[name] = frame[name].astype(bool)
    stages = {rank: header.stage for rank, header in run.headers.items()}
    return frame.assign(stage=[stages.get(rank, -1) for rank in frame["rank"]])


def _cells(name: str, values: list[Any]) -> list[Any]:
    """Return the values of a column, all of one type, as they are in the table."""
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
    """Add the transfers of the traced steps, which have their kernels' times."""
    marks = steps[steps["flags"] == StepFlag.TRACED.value].assign(is_clean=True)
    marks = marks[["window", "rank", "step", "is_hooked", "is_clean"]]
    traced = _clean(transfers, marks)
    return matched if traced.empty else pd.concat([matched, match_ranks(traced, layout)])


def _collective_frame(run: RunRecords, *, is_probe: bool = False) -> pd.DataFrame:
    """Return transfers between ranks: a group of one has none."""
    frame = _timed(run, CollectiveRecord, is_probe=is_probe)
    return frame[np.array(["," in ranks for ranks in frame["ranks"]], dtype=bool)].copy()


def _clean(events: pd.DataFrame, marks: pd.DataFrame) -> pd.DataFrame:
    """Return the events of steps that ended and that no rank flagged, with the step's marks."""
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
    """Return the frame ``runs``: headers and run descriptions by rank."""
    rows = []
    for rank, header in run.headers.items():
        config = run.configs.get(rank)
        text = json.dumps(config.to_json(), sort_keys=True) if config else ""
        header_values = {f.name: getattr(header, f.name) for f in fields(header)}
        header_values["device"] = run.device
        seen = json.dumps(header.cluster, sort_keys=True) if header.cluster else ""
        loop = run.loops.get(rank)
        shown = json.dumps(encode_fields(loop), sort_keys=True) if loop else ""
        rows.append({**header_values, "config": text, "cluster": seen, "loop": shown})
    return normalise("runs", pd.DataFrame(rows).assign(run_id=run.run_id))


def newest_window(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the newest window."""
    return rows[rows["window"] == rows["window"].max()]


def windows_of(table: SampleTable) -> list[int]:
    """Return the windows of the newest run that have a clean step, oldest first."""
    steps = table.newest("steps")
    windows = sorted(int(w) for w in steps[steps["is_clean"]]["window"].unique())
    if not windows:
        raise CalibrationError("no window has a clean step; record more steps")
    return windows


def only_windows(table: SampleTable, windows: Sequence[int]) -> SampleTable:
    """Return the newest run's rows of these windows."""
    run_id = table.run_id
    frames = {name: getattr(table, name) for name in FRAMES if name not in _OF_RUNS}
    return replace(
        table,
        **{
            name: frame[(frame["run_id"] == run_id) & frame["window"].isin(windows)]
            for name, frame in frames.items()
        },
    )
