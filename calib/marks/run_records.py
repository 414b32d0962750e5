"""Records of one run, parsed from the lines of its files; damaged lines are named and skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ..errors import RecordError
from ..records.cluster import Cluster, SeenNode, joined_clusters
from ..records.packed import UNREAD, unpacked
from ..records.record_kinds import (
    Header,
    LoopRecord,
    RankRecord,
    Record,
    RunRecord,
    checked,
    from_dict,
    parse_header,
    parse_line,
)
from ..workload.config import RunConfig
from ..workload.recording import RecordingDetail, RecordingPlan, recording_plan
from ._traced_records import traced_records
from .marked_window import DAMAGED, TYPE, MarkedWindow
from .traced_step import TracedStep
from .window_records import records_of

_T = TypeVar("_T")
_F = TypeVar("_F", bound="_Lines")
_NO_LINKS = SeenNode()
# Thousands of ranks may be missing; a line names the first.
_NUM_NAMED = 8
MAX_MARKS = 1 << 24
"""Most marks of a file, which a small one could unpack to."""
MOST_TRACES = 64
"""Most traces of a file that are read: a run has one, and seconds are spent on each."""
# A file of noise has a problem in each line, and reports list them all.
MOST_PROBLEMS = 200
"""Most damaged lines that are named per file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """Records that the ranks of one run wrote; each mapping is by rank and in rank order."""

    run_id: str
    headers: Mapping[int, Header]
    configs: Mapping[int, RunConfig]
    records: Mapping[int, tuple[Record, ...]]
    """Steps, phases, operators, collectives, coverage and windows, in the order of the file."""
    problems: tuple[str, ...] = ()
    """Skipped parts and the reasons, one line each."""
    summaries: Mapping[int, tuple[RankRecord, ...]] = field(default_factory=dict)
    """One per window of each rank, ranks without a file included."""
    loops: Mapping[int, LoopRecord] = field(default_factory=dict)
    """Loop records of the ranks whose loop was recognized."""

    @property
    def recording_plan(self) -> RecordingPlan:
        """Ranks that were to record, by world size and the layout if one is known."""
        if any(header.is_of_all for header in self.headers.values()):
            parts = dict.fromkeys(self.headers, RecordingDetail.WATCH)
            return RecordingPlan(world_size=self.world_size, parts=parts)
        config = next(iter(self.configs.values()), None)
        return recording_plan(self.world_size, config.parallelism if config else None)

    @property
    def world_size(self) -> int:
        """Number of ranks of the run, with or without a file here."""
        return max((header.world_size for header in self.headers.values()), default=0)

    @property
    def device(self) -> str:
        """Driver's name of the accelerators, or ``cpu``: a header of before may say so although
        there are some, as it was written before the model was seen."""
        names = [one.device for one in (*self.configs.values(), *self.headers.values())]
        return next((name for name in names if name != "cpu"), "cpu")

    @property
    def cluster(self) -> Cluster:
        """Nodes as their ranks saw them, and the values stated for them."""
        return joined_clusters(Cluster.from_json(h.cluster) for h in self.headers.values())


@dataclass(slots=True)
class _Lines:
    """A file whose lines arrive in parts."""

    name: str
    """Prefix of each of the ``problems``."""
    problems: list[str] = field(default_factory=list)
    """Skipped lines and the reasons; only the first ``MOST_PROBLEMS``."""
    num_lines: int = 0

    def unread(self: _F, err: OSError) -> _F:
        """Return a file of this name whose only problem is that it cannot be read."""
        return type(self)(self.name, problems=[f"{self.name}: cannot be read ({err})"])

    def _note(self, problem: str) -> None:
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(f"{self.name}:{self.num_lines}: {problem}")


def no_trace(name: str) -> RecordError:
    """Return the error that the file of a trace is not beside the rank's."""
    return RecordError(f"{name} is not here; copy it beside the rank's file")


@dataclass(slots=True)
class RankFile(_Lines):
    """A rank's file; ``header`` and ``config`` are None until their lines were taken.

    ``read_trace`` returns the events of the file of a trace, which lies beside it.
    """

    read_trace: Callable[[str], Iterable[object]] | None = None
    header: Header | None = None
    config: RunConfig | None = None
    loop: LoopRecord | None = None
    records: tuple[Record, ...] = ()
    """Records of the lines taken last."""
    is_over: bool = False
    num_marks: int = 0
    """Marks read so far."""
    num_traces: int = 0

    def take(self, lines: Iterable[str]) -> None:
        """Parse these lines, which follow those taken before."""
        records: list[Record] = []
        for line in unpacked(lines):
            if self.is_over:
                break
            self.num_lines += 1
            if line == UNREAD:
                self._note(UNREAD)
                self.is_over = True
                break
            if not line.strip():
                continue
            try:
                records += self._taken(line)
            except DAMAGED as err:
                self._note(str(err))
                self.is_over = self.header is None
        self.records = tuple(records)

    def reported_problems(self) -> list[str]:
        """Return the problems; for an empty file, one that says so."""
        if self.header is None and not self.problems:
            return [f"{self.name}:1: file is empty; its rank recorded nothing"]
        return self.problems

    def _taken(self, line: str) -> list[Record]:
        if self.header is None:
            self.header = parse_header(line)
            return []
        value = parse_line(line)
        if value.get("type") == TYPE:
            return self._of_window(MarkedWindow.from_json(value, self._note))
        if value.get("type") == TracedStep.TYPE:
            return self._of_trace(TracedStep.from_json(value))
        record = from_dict(value)
        if isinstance(record, RunRecord):
            self.config = RunConfig.from_json(record.config)
        elif isinstance(record, LoopRecord):
            self.loop = record
        elif not isinstance(record, Header):
            return [record]
        elif (record.run_id, record.rank) != (self.header.run_id, self.header.rank):
            self._note(f"rest belongs to run {record.run_id}; skipped")
            self.is_over = True
        return []

    def _of_trace(self, step: TracedStep) -> list[Record]:
        self.num_traces += 1
        if self.num_traces > MOST_TRACES:
            raise RecordError(f"more than {MOST_TRACES} traces; skipped")
        if self.read_trace is None:
            raise no_trace(step.trace)
        return [*map(checked, traced_records(step, self.read_trace(step.trace)))]

    def _of_window(self, window: MarkedWindow) -> list[Record]:
        self.num_marks += sum(len(step.what) for step in window.steps)
        if self.num_marks > MAX_MARKS:
            self._note(f"more than {MAX_MARKS} marks; the rest is not read")
            self.is_over = True
            return []
        return [*records_of(window, self._note)]


@dataclass(slots=True)
class SummaryFile(_Lines):
    """File with the summaries of the ranks that have no file of their own."""

    summaries: dict[int, tuple[RankRecord, ...]] = field(default_factory=dict)
    """Summaries by rank, of the lines taken last."""

    def take(self, lines: Iterable[str]) -> None:
        """Parse these lines, which follow those taken before."""
        rank_summaries: dict[int, tuple[RankRecord, ...]] = {}
        for line in unpacked(lines):
            self.num_lines += 1
            try:
                value = parse_line(line)
                record = from_dict(value)
                rank = value.get("rank")
                if not isinstance(record, RankRecord) or type(rank) is not int:
                    raise RecordError("line is not a summary of a rank; skipped")
                rank_summaries[rank] = (*rank_summaries.get(rank, ()), record)
            except DAMAGED as err:
                self._note(str(err))
        self.summaries = rank_summaries


def join_ranks(
    run_id: str,
    files: Iterable[RankFile],
    summaries: SummaryFile | None = None,
    links: SeenNode = _NO_LINKS,
) -> RunRecords:
    """Combine the files of a run; a file of another run is named and skipped.

    ``links`` are those of the companion's node, which is that of the last rank.
    """
    ordered = sorted(files, key=lambda file: file.name)
    problems = [problem for file in ordered for problem in file.reported_problems()]
    world_size = _usual_world_size(run_id, ordered)
    headers: dict[int, Header] = {}
    configs: dict[int, RunConfig] = {}
    loops: dict[int, LoopRecord] = {}
    records: dict[int, tuple[Record, ...]] = {}
    for file in ordered:
        if file.header is None:
            continue
        reason = _mismatch_reason(file.header, run_id, world_size, headers)
        if reason:
            problems.append(f"{file.name}: {reason}; skipped")
            continue
        rank = file.header.rank
        headers[rank], records[rank] = file.header, file.records
        if file.config is not None:
            configs[rank] = file.config
        if file.loop is not None:
            loops[rank] = file.loop
    known = {
        rank: tuple(r for r in rank_records if type(r) is RankRecord)
        for rank, rank_records in records.items()
    }
    if summaries is not None:
        known |= {
            r: rank_records for r, rank_records in summaries.summaries.items() if r not in known
        }
        problems += summaries.problems
    run = RunRecords(
        run_id=run_id,
        headers=_with_links(_by_rank(headers), links),
        configs=_by_rank(configs),
        loops=_by_rank(loops),
        records=_by_rank(records),
        summaries=_by_rank(known),
    )
    return replace(
        run, problems=(*problems, *_missing_rank_problems(run)), configs=_on_domains(run)
    )


def _with_links(headers: dict[int, Header], links: SeenNode) -> dict[int, Header]:
    """Return headers whose nodes have these links: all nodes are alike, but each may be in an
    NVLink domain of its own, which is known of the last alone."""
    firsts = [rank for rank, header in headers.items() if header.cluster]
    if links == _NO_LINKS or not firsts:
        return headers
    of_others = replace(links, fabric="")
    for rank in firsts:
        cluster = Cluster.from_json(headers[rank].cluster)
        cluster = cluster.with_links(links if rank == firsts[-1] else of_others)
        headers[rank] = replace(headers[rank], cluster=cluster.to_json())
    return headers


def _on_domains(run: RunRecords) -> dict[int, RunConfig]:
    """Return the ranks' configs, with the hosts of one NVLink domain counted as one node."""
    cluster = run.cluster
    return {
        rank: replace(
            config, parallelism=cluster.with_domain_nodes(config.parallelism, config.device)
        )
        for rank, config in run.configs.items()
    }


def _missing_rank_problems(run: RunRecords) -> list[str]:
    """Return a line on the ranks that should have recorded and did not; empty if there are none."""
    if not run.headers:
        return []
    wanted = run.recording_plan.recorders
    missing = [rank for rank in wanted if rank not in run.headers]
    if not missing:
        return []
    if len(wanted) == run.world_size:
        return [f"records of {len(run.headers)} of {run.world_size} ranks"]
    named = ", ".join(map(str, missing[:_NUM_NAMED]))
    more = ", ..." if len(missing) > _NUM_NAMED else ""
    return [
        f"records of {len(wanted) - len(missing)} of {len(wanted)} ranks that record, of "
        f"{run.world_size}; missing: {named}{more}; if other nodes have them, copy their "
        f"records/{run.run_id} here and ask `forerun report`"
    ]


def _by_rank(mapping: dict[int, _T]) -> dict[int, _T]:
    return dict(sorted(mapping.items()))


def _usual_world_size(run_id: str, files: list[RankFile]) -> int:
    sizes = [f.header.world_size for f in files if f.header and f.header.run_id == run_id]
    return Counter(sizes).most_common(1)[0][0] if sizes else 0


def _mismatch_reason(
    header: Header, run_id: str, world_size: int, seen: Mapping[int, Header]
) -> str:
    if header.run_id != run_id:
        return f"belongs to run {header.run_id}"
    if header.world_size != world_size:
        return f"world_size {header.world_size} differs from {world_size} of its peers"
    if not 0 <= header.rank < world_size:
        return f"rank {header.rank} is not below world_size {world_size}"
    return f"rank {header.rank} has a file already" if header.rank in seen else ""
