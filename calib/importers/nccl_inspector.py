"""Transfers from the logs of NCCL Inspector, a profiler plugin of NCCL.

Each line has one operation of one rank (NVIDIA/nccl 5067397c, plugins/profiler/inspector).  Up to
format 4.2 a line names its communicator; in 4.3 one line does for as many behind it as it counts.
The size of an all-gather or reduce-scatter is one rank's part, as its bandwidths show.

A kernel runs from the arrival of its own rank, so that its time includes waiting for the others:
the shortest over the ranks' logs is nearest to the transfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from ..errors import RecordError
from ..network.groups import bus_factor
from ..plain_json import parse_json
from ..workload.collectives import Collective
from .canonical_tables import COLLECTIVE_COLUMNS, MICROSECOND_S, RANK_COLUMNS

_VERSIONS = ("v4.0", "v4.1", "v4.2", "v4.3")
_COLLECTIVES = {
    "AllReduce": Collective.ALL_REDUCE,
    "AllGather": Collective.ALL_GATHER,
    "ReduceScatter": Collective.REDUCE_SCATTER,
    "Broadcast": Collective.BROADCAST,
    "Send": Collective.SEND,
    "Recv": Collective.RECV,
}
_PARTS = frozenset({Collective.ALL_GATHER, Collective.REDUCE_SCATTER})
"""Collectives whose recorded size is that of one rank's part."""
_COUNTS = ("coll_records", "p2p_records", "proxy_records")
_HOST_TIME = "collective_cpu"
CONTRADICTION = "its bandwidth is not its size over its time"
HOST_TIMED = "time of the host's call, not of the kernel"
SHARED = "send or receive among more than two ranks; others may share its kernel"
_LEAST_DIGITS = 2
"""Decimals of the bandwidths in the plugin's README; the plugin itself writes six."""
_GIGA = 1e9
_MOST = 2**63
"""Larger sizes do not fit a table's integers: the plugin writes them for types unknown to it."""


@dataclass(slots=True, kw_only=True)
class _Log:
    """State of a log: the communicator of the next line, and the lines that still belong to it."""

    header: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""
    num_pending: int = 0

    def operation(self, line: str) -> dict[str, Any] | None:
        """Return the operation of a line, None if it has none; raise ``ValueError`` if it cannot be
        used."""
        is_pending = self.num_pending > 0
        self.num_pending -= is_pending
        record = _record(line)
        if "header" in record:
            self._begin(record)
        elif not is_pending:
            raise ValueError("no line before it names its communicator")
        if self.version not in _VERSIONS:
            known = f"{_VERSIONS[0]} to {_VERSIONS[-1]}"
            raise ValueError(f"its format {self.version!r} is not one of {known}")
        for kind in ("coll", "p2p"):
            if (values := record.get(f"{kind}_perf")) is not None:
                prefix = f"{kind}_"
                plain = {key.removeprefix(prefix): value for key, value in _map(values).items()}
                return _operation(_map(self.header), plain, is_pair=kind == "p2p")
        return None

    def _begin(self, record: Mapping[str, Any]) -> None:
        self.num_pending = 0
        self.header = _map(record["header"])
        metadata = _map(record.get("metadata"))
        self.version = str(metadata.get("inspector_output_format_version"))
        stats = record.get("dump_stats")
        counts = [_map(stats).get(key, 0) for key in _COUNTS] if stats is not None else []
        self.num_pending = sum(count for count in counts if isinstance(count, int))


def inspector_operations(text: str, name: str) -> tuple[pd.DataFrame, list[str]]:
    """Return the operations of one rank's log, of no device yet, and why lines were left out.

    Raise ``RecordError`` if it has no operation that can be used.
    """
    log, rows = _Log(), []
    skipped: dict[str, list[int]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = log.operation(line)
        except ValueError as err:
            skipped.setdefault(str(err), []).append(number)
            continue
        rows += [row] if row is not None else []
    problems = []
    for reason, lines in skipped.items():
        more = f" and {len(lines) - 1} more are" if len(lines) > 1 else " is"
        problems.append(f"{name} line {lines[0]}{more} left out: {reason}")
    if not rows:
        why = problems[0] if problems else f"{name} has no operation"
        remedy = "give logs that NCCL's Inspector plugin writes as JSON (NCCL_INSPECTOR_DUMP_DIR)"
        raise RecordError(f"{why}; {remedy}")
    return pd.DataFrame(rows, columns=[*COLLECTIVE_COLUMNS, *RANK_COLUMNS]), problems


def _record(line: str) -> dict[str, Any]:
    try:
        return _map(parse_json(line))
    except ValueError:
        raise ValueError("it is no JSON object") from None


def _map(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a part of it is no JSON object")
    return value


def _operation(
    header: Mapping[str, Any], values: Mapping[str, Any], *, is_pair: bool
) -> dict[str, Any]:
    """Return the row of one operation; raise ``ValueError`` if a value is missing or wrong."""
    name = values.get("p2p" if is_pair else "coll")
    collective = _COLLECTIVES.get(str(name))
    if collective is None or is_pair is not (collective in (Collective.SEND, Collective.RECV)):
        raise ValueError(f"{name} is not modelled")
    num_ranks, num_nodes = _whole(header, "n_ranks"), _whole(header, "nnodes")
    rank, time_s = header.get("rank"), _positive(values, "exec_time_us") * MICROSECOND_S
    nbytes = _whole(values, "msg_size_bytes") * (num_ranks if collective in _PARTS else 1)
    if nbytes >= _MOST:
        raise ValueError("its ranks' sizes add up to 2^63 or more")
    if num_ranks == 1 or num_nodes > num_ranks or not isinstance(rank, int):
        raise ValueError(f"rank {rank} of {num_ranks} on {num_nodes} nodes sends nothing")
    flags = [SHARED] if is_pair and num_ranks > 2 else []
    flags += [HOST_TIMED] if values.get("timing_source") == _HOST_TIME else []
    number = str(values.get("sn"))
    if is_pair:
        number = f"{rank}:{number}"
        num_nodes = _pair_nodes(num_ranks, num_nodes)
    ranks = 2 if is_pair else num_ranks
    if _contradicts(values, nbytes / time_s, bus_factor(collective, ranks)):
        flags.append(CONTRADICTION)
    return {
        "communicator": str(header.get("id")),
        "collective": collective.value,
        "number": number,
        "num_ranks": ranks,
        "num_nodes": num_nodes,
        "nbytes": nbytes,
        "rank": rank,
        "world": num_ranks,
        "time_s": time_s,
        "flag": "; ".join(flags),
    }


def _pair_nodes(num_ranks: int, num_nodes: int) -> int:
    """Return the nodes of two ranks of a communicator; raise ``ValueError`` if either may be."""
    if num_nodes not in (1, num_ranks):
        raise ValueError("its two ranks may share a node or not")
    return min(num_nodes, 2)


def _contradicts(values: Mapping[str, Any], bytes_per_s: float, factor: float) -> bool:
    """True if a recorded bandwidth is not that of the size and time, as far as it was printed."""
    for key, scale in (("algobw_gbs", 1.0), ("busbw_gbs", factor)):
        recorded_gbs = values.get(key)
        if not isinstance(recorded_gbs, float):
            continue
        digits = max(_LEAST_DIGITS, len(str(recorded_gbs).partition(".")[2]))
        if abs(recorded_gbs - bytes_per_s * scale / _GIGA) > 10.0**-digits:
            return True
    return False


def _positive(values: Mapping[str, Any], key: str) -> float:
    value = values.get(key)
    if not isinstance(value, (int, float)) or not 0 < value < _MOST:
        raise ValueError(f"its {key} is not above 0 and below 2^63")
    return value


def _whole(values: Mapping[str, Any], key: str) -> int:
    value = _positive(values, key)
    if value % 1:
        raise ValueError(f"its {key} is no whole number")
    return int(value)
