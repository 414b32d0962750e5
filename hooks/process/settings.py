"""What the user asked for, as one frozen value that the launch edge hands to the hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


class OnAdvice(Enum):
    """What happens when the decision is to stop."""

    LOG = "log"
    ALERT = "alert"
    STOP = "stop"


class WandbMode(Enum):
    """Whether predicted against actual goes to W&B, in words of ``--calibrate-wandb``."""

    AUTO = "auto"
    """Into the host's own run; without one an offline run, which leaves the machine only by the
    user's own ``wandb sync``."""
    ON = "on"
    """The same, but a run of our own is online where there is a key and ``WANDB_MODE`` allows."""
    OFF = "off"


class TraceChoice(Enum):
    """Whether a step or two of the window run under Kineto: ``auto`` only where there is a GPU."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class DeviceChoice(Enum):
    """Where training runs: what torch finds, or the CPU stand-in."""

    AUTO = "auto"
    CPU = "cpu"


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
class Settings:
    """The ``--calibrate-*`` flags, parsed."""

    rank: RankInfo
    steps: int = 20
    every: int = 500
    """Steps from one window to the next; 0: one window, and nothing after it."""
    directory: Path = Path("forerun-out")
    """Not an importable name: a folder ``forerun`` in the working directory would hide an editable
    install of the package."""
    on_advice: OnAdvice = OnAdvice.LOG
    deadline_unix_s: float | None = None
    budget_hours: float | None = None
    restart_cost_s: float = 600.0
    mtbf_hours: float | None = None
    """Mean time between failures of the whole job, hours."""
    price_per_gpu_hour: float | None = None
    limit_unix_s: float | None = None
    """When the scheduler ends the job, as ``forerun run`` was told."""
    takes_requests: bool = False
    """``forerun run`` may ask for a stop, since that limit is near."""
    confidence: float = 0.9
    gpus: tuple[int, ...] = ()
    wandb: WandbMode = WandbMode.AUTO
    device: DeviceChoice = DeviceChoice.AUTO
    probe_s: float = 0.0
    """Time that all probes together may take between steps; 0: none."""
    trace: TraceChoice = TraceChoice.AUTO
    cadence: CadenceHint = field(default_factory=CadenceHint)
    host_argv: tuple[str, ...] = ()
    companion_command: tuple[str, ...] = ()
    """The program that reads the records and answers, started once on the last rank; its last
    argument will be the directory.  Empty: records are written, nothing is analysed live."""
    is_answered: bool = False
    """Live answers are wanted: where there is no program for them, one line says what to do."""
