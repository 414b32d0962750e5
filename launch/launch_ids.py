"""The name of one launch, by which it knows what was written by it and for it."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Mapping

LAUNCH_ID = "FORERUN_LAUNCH_ID"
"""Set by ``forerun run`` for its command, or by the user where several nodes need the same."""
_IS_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""From here on Slurm's numbers of steps mean the batch script and the like."""


def is_launch_id(text: object) -> bool:
    """Letters, digits, ``._-``, at most 64, and neither hidden nor a way up."""
    return isinstance(text, str) and _IS_ID.fullmatch(text) is not None


def safe_id(text: str) -> str:
    """The text where it is a launch id already, else one that is made of it.

    >>> safe_id("nightly-7"), is_launch_id(safe_id("../" * 50))
    ('nightly-7', True)
    """
    if is_launch_id(text):
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-_")[:48]
    return f"{safe}-{digest}" if safe else digest


def launch_id(environ: Mapping[str, str]) -> str:
    """The id that a wrapper gives its command: the one that is set, else a new one.

    All tasks of one step of a Slurm job make the same.  An id that was made in another job, as
    where a job submits the next one, is not taken over.
    """
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or ""
    of_job = f"slurm-{job}-{environ.get('SLURM_RESTART_COUNT') or '0'}" if job else ""
    given = environ.get(LAUNCH_ID, "")
    if given and not (of_job and given.startswith("slurm-") and not given.startswith(of_job)):
        return safe_id(given)
    if not of_job:
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        return f"{moment}-{secrets.token_hex(4)}"
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP:
        return safe_id(f"{of_job}-{step}")
    # One batch script or shell may start several launches, at once or in turn.
    return safe_id(f"{of_job}-{secrets.token_hex(3)}")
