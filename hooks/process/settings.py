"""Settings from the launcher to the hooks: the user's options and this process's rank."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...calib.records.cluster import StatedNodes
from ...calib.workload.run_options import RunOptions

_log = logging.getLogger(__name__)
RESTART_WINDOWS = 1000
"""Stride of window numbers between loops begun in the same process: each counts from a multiple."""

LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
LOCAL_SIZES = (
    *("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    "SLURM_NTASKS_PER_NODE",
)
"""Variables of local rank and size in torchrun, Open MPI, MPICH and Intel MPI, and Slurm."""


def environ_number(environ: Mapping[str, str], names: Iterable[str], default: int) -> int:
    """Return the first of these variables that is a whole number; any other text is reported."""
    for name in names:
        if (text := environ.get(name, "")).isascii() and text.isdecimal():
            return int(text)
        if text:
            _log.warning("[forerun] %s=%.40r is no whole number, and is ignored", name, text)
    return default


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """This process's ranks, from torchrun's environment."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    run_id: str

    @property
    def is_last(self) -> bool:
        """True on the rank where Megatron prints, logs to W&B, and where our companion runs."""
        return self.rank == self.world_size - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CadenceHint:
    """Length of the run, from the host's own arguments if they use Megatron's names."""

    train_iters: int | None = None
    train_samples: int | None = None
    eval_interval: int | None = None
    eval_iters: int | None = None
    save_interval: int | None = None
    exit_interval: int | None = None
    global_batch_size: int | None = None
    rampup_batch_size: tuple[int, ...] = ()
    step_batch_size_schedule: str = ""
    save: str = ""
    """Folder of checkpoints; empty if none are written."""
    ckpt_format: str = ""
    """Form of checkpoints; empty if unknown."""
    dist_ckpt_optim_fully_reshardable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RunOptions):
    """The user's options on one rank; the companion receives all of them."""

    rank: RankInfo
    cadence: CadenceHint = field(default_factory=CadenceHint)
    host_argv: tuple[str, ...] = ()
    companion_command: tuple[str, ...] = ()
    """Program that reads the records and answers, started once on the last rank with the directory
    as additional last argument.  If empty, records are written without live analysis."""
    nodes: StatedNodes = field(default_factory=StatedNodes)
    """Nodes as stated in the file ``cluster``."""
    is_answered: bool = False
    """True if live answers are wanted: without a program for them, one line gives the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompanionSettings:
    """Settings of the companion, passed as one JSON object."""

    settings: Settings
    """Settings of the rank, with masked arguments."""
    launch_id: str = ""
    started_unix_s: float = 0.0
    num_restarts: int = 0
    has_host_wandb: bool = False
    host_tensorboard: str = ""
    """Folder of training's own event files; empty if unknown."""
    has_host_trainjob: bool = False
    """True if training itself reports to its Kubeflow TrainJob."""

    @property
    def num_steps(self) -> int:
        """Length of the run as known before its first step; 0 if unknown."""
        return self.settings.cadence.train_iters or self.settings.total_steps or 0

    @property
    def requests_since_unix_s(self) -> float:
        """Time before which requests belong to an earlier launch; 0.0 after a restart, which
        follows it."""
        return 0.0 if self.num_restarts else self.started_unix_s
