"""Slurm sink: progress and end as the job's comment, shown by ``squeue`` and ``scontrol``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from datetime import datetime, timezone

from ...calib.records.run_values import TIME
from ...calib.units import format_time
from ...calib.workload.run_options import Switch
from ...hooks.process.settings import CompanionSettings
from ..known.scheduler import Ask, ask_slurm
from .sink import LatestValues, Sink

EVERY_S = 60.0
_NAMES = ("progress_frac", "finish_p50_unix_s", "step_time_predicted_s", TIME)
_WEEK_S = 6 * 86400.0


class SlurmComment(LatestValues):
    """Replaces the comment if its text has changed, at most every ``EVERY_S`` seconds."""

    def __init__(self, job_id: str, ask: Ask = ask_slurm) -> None:
        super().__init__(f"comment of job {job_id}", self._update, every_s=EVERY_S, name="slurm")
        self._job_id, self._ask, self._last_text = job_id, ask, ""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Queue a changed comment; there is none before the first forecast."""
        self._values |= {name: values[name] for name in _NAMES if name in values}
        text = comment(self._values)
        if text and text != self._last_text:
            self._last_text = text
            self._newest.put({**self._values})

    def _update(self, values: Mapping[str, float]) -> None:
        words = [f"JobId={self._job_id}", f"Comment={comment(values)}"]
        if self._ask(["scontrol", "update", *words]) is None:
            raise OSError("scontrol update was refused or did not answer")


def open_slurm(companion_settings: CompanionSettings) -> Sink:
    """Return the sink of this Slurm job, if its comment was requested."""
    if companion_settings.settings.slurm_comment is not Switch.ON:
        return Sink("")
    job_id = os.environ.get("SLURM_JOB_ID") or os.environ.get("SLURM_JOBID") or ""
    if not job_id:
        return Sink("off (no SLURM_JOB_ID here)")
    if shutil.which("scontrol") is None:
        return Sink("off (no scontrol here, as in many containers)")
    return SlurmComment(job_id)


def comment(values: Mapping[str, float]) -> str:
    """Return progress, end and step in short; empty without a step.

    >>> comment({"progress_frac": 0.42, "finish_p50_unix_s": 1e9, "step_time_predicted_s": 1.84})
    'forerun: 42 % · ends Sun 9 Sep 01:46 UTC · step 1.840 s'
    """
    if "step_time_predicted_s" not in values:
        return ""
    parts = []
    if "progress_frac" in values:
        parts.append(f"{int(100 * values['progress_frac'])} %")
    if "finish_p50_unix_s" in values:
        parts.append(f"ends {_moment(values['finish_p50_unix_s'], values.get(TIME, 0.0))}")
    parts.append(f"step {format_time(values['step_time_predicted_s'])}")
    return "forerun: " + " · ".join(parts)


def _moment(unix_s: float, now_unix_s: float) -> str:
    """Return weekday and time, with the date if it is six days ahead or more."""
    try:
        end = datetime.fromtimestamp(unix_s, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return "beyond any calendar"
    day = f"{end:%a}" if unix_s - now_unix_s < _WEEK_S else f"{end:%a} {end.day} {end:%b}"
    return f"{day} {end:%H:%M} UTC"
