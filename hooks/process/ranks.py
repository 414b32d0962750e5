"""Rank of this process: as its launcher states it, and as ``torch.distributed`` does in training.

Launchers other than torchrun state it in variables of their own, or leave it to the program.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping

from .launch_identity import process_start
from .settings import LOCAL_RANKS, LOCAL_SIZES, RankInfo, environ_number

_log = logging.getLogger(__name__)
SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""Variables of the number of ranks in torchrun, Open MPI, MPICH and Slurm."""
_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")


def current_rank(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Return this process's ranks from ``torch.distributed``, else those of a single process."""
    rank, world_size = _joint_rank()
    if world_size == 1:
        return RankInfo(
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            run_id=run_id({**environ, "WORLD_SIZE": "1"}),
        )
    is_slurm = environ_number(environ, SIZES[-1:], 0) == world_size
    num_nodes = environ_number(environ, _NODES, 1) if is_slurm else 1
    local_size = environ_number(environ, LOCAL_SIZES, -(-world_size // max(1, num_nodes)))
    local_size = max(1, min(local_size, world_size))
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=environ_number(environ, LOCAL_RANKS, rank),
        local_world_size=local_size,
        run_id=run_id({**environ, "WORLD_SIZE": str(world_size)}),
    )


def rank_in_training(
    launched: RankInfo, environ: Mapping[str, str], *, is_forked: bool
) -> RankInfo | None:
    """Return the rank of a process that begins to train; None if another one answers for it.

    ``launched`` is the rank by the launcher's variables.  If ranks train without each other, only
    the first is observed, as the single process that it is; what a process forks is not.
    """
    rank = current_rank(environ)
    if is_forked or (rank.world_size == 1 and launched.rank):
        return None
    if launched.world_size > rank.world_size == 1:
        _log.warning(
            "[forerun] the launcher states %d ranks, and torch.distributed is not initialised: "
            "this process is calibrated alone",
            launched.world_size,
        )
    is_launched = (rank.rank, rank.world_size) == (launched.rank, launched.world_size)
    return launched if is_launched else rank


def _joint_rank() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def run_id(environ: Mapping[str, str]) -> str:
    """Return a name for this launch, the same on all ranks, that can be part of a file name.

    torchrun's run id is random with ``--standalone`` and the user's with ``--rdzv-id``.  The
    restart count is appended, and the number of ranks, since nodes may join without a restart.  If
    the id is the default ``none``, the agent's process id and start time replace it on a single
    node; several nodes share only the master's address, so there only ``--rdzv-id`` (or a Slurm job
    id) separates the records of two launches into one directory.  A single process without a
    launcher is named by its own process id and start time.

    >>> run_id({"TORCHELASTIC_RUN_ID": "nightly/7", "MASTER_PORT": "29500", "WORLD_SIZE": "8"})
    'nightly-7-29500-0-w8'
    """
    name = environ.get("TORCHELASTIC_RUN_ID", "")
    if name in ("", "none"):
        job = [environ.get(key, "") for key in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
        is_alone = environ.get("WORLD_SIZE", "1") == "1" and "MASTER_ADDR" not in environ
        is_one_node = environ.get("LOCAL_WORLD_SIZE", "") == environ.get("WORLD_SIZE", "1")
        if all(job) and not is_alone:
            name = "-".join(job)
        elif is_alone or (name and is_one_node):
            pid = os.getpid() if is_alone else os.getppid()  # torchrun's agent of this node
            name = "-".join(str(one) for one in (pid, process_start(pid)) if one is not None)
        else:
            name = environ.get("MASTER_ADDR", environ.get("PMIX_NAMESPACE", "local"))
    count = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    ranks = f"w{environ.get('WORLD_SIZE', '1')}"
    full = "-".join((name, environ.get("MASTER_PORT", "0"), count, ranks))
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", full).lstrip(".-")
    if len(safe) <= 64:
        return safe
    return f"{safe[:40]}-{hashlib.sha256(full.encode()).hexdigest()[:12]}"
