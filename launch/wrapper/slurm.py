"""Allocation granted by a scheduler: begin, end, and the source of these."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from ..known.scheduler import Ask, ask_slurm

# Slurm reports the absence of a limit as a time far in the future.
_YEAR_S = 365 * 86400.0
GIVEN = "--time-limit"
"""Source of a limit given by the user, for which no scheduler is queried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Allocation of a job; None if the scheduler does not report it or sets no limit."""

    job_id: str = ""
    start_unix_s: float | None = None
    end_unix_s: float | None = None
    source: str = ""
    """Source of the values, in words; empty if there is none."""
    remaining_s: float | None = field(default=None, compare=False)
    """Seconds to the limit when Slurm was queried, by its clock and not this node's; None if
    unknown."""

    @property
    def length_s(self) -> float | None:
        """Seconds from start to limit."""
        if self.start_unix_s is None or self.end_unix_s is None:
            return None
        return self.end_unix_s - self.start_unix_s


def allocation(
    environ: Mapping[str, str], now_unix_s: float, ask: Ask | None = None, *, is_anew: bool = False
) -> Allocation:
    """Return this job's allocation; without a source if Slurm cannot be queried, as in a container.

    The variables (Slurm 23.02 and later) hold the times granted at the start and cost no call;
    ``is_anew`` queries Slurm first, since a limit can be changed while a job runs.
    """
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or ""
    if not job_id:
        return Allocation()
    ask = ask or ask_slurm
    stated = from_environment(environ, job_id)
    if stated is not None and not is_anew:
        return stated
    shown = ask(["scontrol", "show", "job", "-o", job_id])
    queried = None if shown is None else from_scontrol(shown, job_id)
    if queried is None and stated is None:
        remaining_text = ask(["squeue", "-h", "-j", job_id, "-o", "%L"])
        queried = (
            None if remaining_text is None else from_squeue(remaining_text, job_id, now_unix_s)
        )
    return queried or stated or Allocation(job_id=job_id)


def from_environment(environ: Mapping[str, str], job_id: str) -> Allocation | None:
    """Read ``SLURM_JOB_START_TIME`` and ``SLURM_JOB_END_TIME``, in Unix seconds.

    There the end of a job without a limit is a year after its start.
    """
    try:
        start, end = (float(environ[f"SLURM_JOB_{edge}_TIME"]) for edge in ("START", "END"))
    except (KeyError, ValueError):
        return None
    if not math.isfinite(start):
        return None
    limit = end if start < end < start + _YEAR_S else None
    source = "SLURM_JOB_END_TIME"
    return Allocation(job_id=job_id, start_unix_s=start, end_unix_s=limit, source=source)


def from_scontrol(text: str, job_id: str) -> Allocation | None:
    """Parse ``scontrol show job -o``; the first element of an array. Times are local to the node.

    >>> text = "TimeLimit=UNLIMITED TimeMin=N/A StartTime=2026-11-22T00:23:02 EndTime=Unknown"
    >>> from_scontrol(text, "7").end_unix_s is None
    True
    """
    # Match neighbouring fields too, since the job's name may be any text.
    span = re.search(r" ?TimeLimit=(\S+) TimeMin=", text)
    edges = re.search(r" StartTime=(\S+) EndTime=(\S+)", text)
    if span is None or edges is None:
        return None
    start, end = _moment(edges[1]), _moment(edges[2])
    limit = duration_s(span[1])
    if math.isinf(limit):
        end = None
    elif end is None and start is not None and not math.isnan(limit):
        end = start + limit
    gone = re.search(r" RunTime=(\S+) TimeLimit=\S+ TimeMin=", text)
    remaining_s = math.nan if gone is None else limit - duration_s(gone[1])
    return Allocation(
        job_id=job_id,
        start_unix_s=start,
        end_unix_s=end,
        source="scontrol",
        remaining_s=remaining_s if math.isfinite(remaining_s) else None,
    )


def from_squeue(text: str, job_id: str, now_unix_s: float) -> Allocation | None:
    """Parse the remaining time printed by ``squeue -o %L``."""
    remaining_s = duration_s(text.strip().partition("\n")[0])
    if math.isnan(remaining_s):
        return None
    span = (
        {}
        if math.isinf(remaining_s)
        else {"end_unix_s": now_unix_s + remaining_s, "remaining_s": remaining_s}
    )
    return Allocation(job_id=job_id, source="squeue", **span)


def duration_s(text: str) -> float:
    """Return seconds from ``[days-]hours:minutes:seconds``, ``minutes:seconds`` or ``days-hours``.

    Infinite for ``UNLIMITED``, NaN for anything else.

    >>> duration_s("1-02:00:00"), duration_s("30:00"), duration_s("2-12"), duration_s("UNLIMITED")
    (93600.0, 1800.0, 216000.0, inf)
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    match = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,9}(?::\d{1,9}){0,2})", text, re.ASCII)
    if match is None:
        return math.nan
    days, parts = match[1], [float(part) for part in match[2].split(":")]
    if days is None and len(parts) < 3:  # without days, two parts are minutes and seconds
        parts.insert(0, 0.0)
    hours, minutes, seconds = (*parts, 0.0, 0.0)[:3]
    return int(days or 0) * 86400.0 + hours * 3600.0 + minutes * 60.0 + seconds


def num_jobs(remaining_s: float, job_s: float, lost_s: float) -> int | None:
    """Return the number of jobs of ``job_s`` for ``remaining_s`` of work if each loses ``lost_s``;
    None if a job does no work.

    >>> num_jobs(100.0, 24.0, 4.0), num_jobs(1.0, 4.0, 4.0)
    (5, None)
    """
    return math.ceil(remaining_s / (job_s - lost_s)) if job_s > lost_s else None


def _moment(text: str) -> float | None:
    """Return Unix seconds; None for ``Unknown`` and the like."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
