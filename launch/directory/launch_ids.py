"""The name of one launch, by which it knows what was written by it and for it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from ...hooks.process.launch_identity import LAUNCH_ID, new_launch_id, safe_launch_id

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""From here on Slurm's numbers of steps mean the batch script and the like."""


def launch_id(environ: Mapping[str, str]) -> str:
    """The id that a wrapper gives its command: the one that is set, else a new one.

    All tasks of one step of a Slurm job make the same.  An id that was made in another job, as
    where a job submits the next one, is not taken over.
    """
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or ""
    of_job = f"slurm-{job}-{environ.get('SLURM_RESTART_COUNT') or '0'}" if job else ""
    given = environ.get(LAUNCH_ID, "")
    if given and not (of_job and given.startswith("slurm-") and not given.startswith(of_job)):
        return safe_launch_id(given)
    if not of_job:
        return new_launch_id()
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP:
        return safe_launch_id(f"{of_job}-{step}")
    # One batch script or shell may start several launches, at once or in turn.
    return safe_launch_id(f"{of_job}-{secrets.token_hex(3)}")
