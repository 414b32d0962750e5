"""What the launch edge hands to the hooks: the user's options, and where they were given."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...calib.records import StatedNodes
from ...calib.workload import RunOptions

RESTART_WINDOWS = 1000
"""Windows of a loop that was begun again in the same process count on from a multiple of this."""

LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
LOCAL_SIZES = (
    *("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    "SLURM_NTASKS_PER_NODE",
)
"""Names of these variables in torchrun, Open MPI, MPICH and Intel MPI, and Slurm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """This process among its peers, as torchrun's environment told it."""

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
    """How long the run is, read from the host's own arguments where they use Megatron's names."""

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
    """The folder that checkpoints go to; empty: none are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RunOptions):
    """The user's options on one rank; the companion is sent all of them."""

    rank: RankInfo
    cadence: CadenceHint = field(default_factory=CadenceHint)
    host_argv: tuple[str, ...] = ()
    companion_command: tuple[str, ...] = ()
    """The program that reads the records and answers, started once on the last rank; its last
    argument will be the directory.  Empty: records are written, nothing is analysed live."""
    nodes: StatedNodes = field(default_factory=StatedNodes)
    """What the file ``cluster`` states."""
    is_answered: bool = False
    """Live answers are wanted: where there is no program for them, one line says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompanionSettings:
    """All that the session tells its companion, as one JSON object; it is read back whole."""

    settings: Settings
    """Of its arguments only what may be kept."""
    launch_id: str = ""
    started_unix_s: float = 0.0
    num_restarts: int = 0
    has_host_wandb: bool = False
    host_tensorboard: str = ""
    """Folder that training writes its own event files to; empty: none is known."""
    has_host_trainjob: bool = False
    """Training reports to its Kubeflow TrainJob itself."""

    @property
    def num_steps(self) -> int:
        """Length of the run as far as it is known before its first step; 0: unknown."""
        return self.settings.cadence.train_iters or self.settings.total_steps or 0

    @property
    def requests_since_unix_s(self) -> float:
        """What was asked before is of an earlier launch; 0.0 after a restart, which follows it."""
        return 0.0 if self.num_restarts else self.started_unix_s
