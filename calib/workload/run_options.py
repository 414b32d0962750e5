"""User options of a run: every option of ``--calibrate``, declared once.

A field is an option; its ``Flag`` describes the command line.  The flags, the companion, the
analysis and the decision all take these classes whole, so a new option is one field here and one
use.  The module imports only the standard library, since training imports it.
"""

# ruff: noqa: RUF009  `_option` returns a field of the dataclass.
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any


class OnAdvice(Enum):
    """Action when the decision is to stop."""

    LOG = "log"
    ALERT = "alert"
    STOP = "stop"


class WandbMode(Enum):
    """Destination of predicted and actual values in W&B."""

    AUTO = "auto"
    """Host framework's W&B run; without one an offline run, which leaves the machine only by the
    user's ``wandb sync``."""
    ON = "on"
    """As ``AUTO``, but a separate run is online if there is a key and ``WANDB_MODE`` allows it."""
    OFF = "off"


class SinkChoice(Enum):
    """Switch of an optional sink; under ``auto`` the sink itself decides from its environment."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Switch(Enum):
    """Switch of an opt-in feature."""

    OFF = "off"
    ON = "on"


class TraceChoice(Enum):
    """Tracing of a step or two of the window under Kineto; ``auto``: only on a GPU."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class DeviceChoice(Enum):
    """Training device: the one that torch detects, or the CPU stand-in."""

    AUTO = "auto"
    CPU = "cpu"


class Reads(Enum):
    """Parsing of a flag's text into a value."""

    WHOLE = "a whole number from ``low`` on"
    NUMBER = "a number from ``low`` to ``high``"
    DURATION = "600, 10m or 1h, to seconds"
    MOMENT = "ISO 8601 or Unix seconds, to Unix seconds"
    COUNTS = "whole numbers with commas between"
    PATH = "a path"
    TEXT = "as it is"
    CHOICE = "a member of the enum of the default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """Command-line form of an option: ``--calibrate-<name>=<metavar>``."""

    name: str
    reads: Reads
    metavar: str
    example: str
    default: str
    """Default value as text for display."""
    description: str
    """Description for the reference."""
    low: float = -math.inf
    high: float = math.inf
    rule: str = ""
    """Message text for a number outside ``low`` to ``high``."""


def _option(
    default: Any,
    name: str,
    reads: Reads,
    metavar: str,
    description: str,
    *,
    shown: str = "",
    **more: Any,
) -> Any:
    if isinstance(default, Enum):
        metavar = "|".join(str(member.value) for member in type(default))
    plain = default.value if isinstance(default, Enum) else default
    words = shown or ("none" if plain is None else str(plain))
    flag = Flag(
        name=name, reads=reads, metavar=metavar, description=description, default=words,
        **{"example": words, **more},
    )  # fmt: skip
    return field(default=default, metadata={"flag": flag})


_HOURS = {
    "example": "48", "low": math.ulp(0.0), "rule": "a number above 0; give hours, such as 48",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """Goals and costs that advice is weighed against, and numbers of ranks to plan for."""

    deadline_unix_s: float | None = _option(
        None, "deadline", Reads.MOMENT, "TIME",
        "ISO 8601 or unix seconds: advise to stop when it will not be met",
        example="2030-01-31T18:00:00+00:00",
    )  # fmt: skip
    budget_hours: float | None = _option(
        None,
        "budget-hours",
        Reads.NUMBER,
        "H",
        "wall-clock time: advise to stop when it will be exceeded",
        **_HOURS,
    )
    restart_cost_s: float = _option(
        600.0, "restart-cost", Reads.DURATION, "T",
        "time that a restart costs, `600`, `10m` or `1h`",
        shown="10m",
    )  # fmt: skip
    mtbf_hours: float | None = _option(
        None, "mtbf-hours", Reads.NUMBER, "H",
        "mean time between failures of the whole job; observed restarts refine it",
        shown="public rate", **_HOURS,
    )  # fmt: skip
    price_per_gpu_hour: float | None = _option(
        None, "price-per-gpu-hour", Reads.NUMBER, "X", "adds the run's cost to the forecast",
        example="2.5", low=0.0, rule="a price of 0 or more; such as 2.5",
    )  # fmt: skip
    limit_unix_s: float | None = None
    """End of the scheduler's job in Unix seconds, as given to ``forerun run``."""
    confidence: float = _option(
        0.9, "confidence", Reads.NUMBER, "P", "probability that advice needs",
        low=0.5, high=1.0, rule="from 0.5 to 1; such as 0.9",
    )  # fmt: skip
    gpus: tuple[int, ...] = _option(
        (), "gpus", Reads.COUNTS, "16,32", "other numbers of ranks to plan for",
        shown="as the run", example="8,16",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """User options of a calibrated run."""

    steps: int = _option(
        20, "steps", Reads.WHOLE, "N",
        "steps in the window, half of them hooked, after three warm-up steps", low=4,
    )  # fmt: skip
    every: int = _option(
        500, "every", Reads.WHOLE, "N",
        "open another, shorter window every N steps, after a drift, and for a second opinion "
        "before advice: rows are added, models refitted; 0: one window, and nothing but the step "
        "timer after it",
        low=0,
    )  # fmt: skip
    total_steps: int | None = _option(
        None, "total-steps", Reads.WHOLE, "N",
        "optimizer steps of the whole run from its first step here, if the training loop does "
        "not state them; without either, no finish is predicted; if both do, the loop counts",
        shown="as the loop says", example="5000", low=1,
    )  # fmt: skip
    directory: Path = _option(
        # Not an importable name, since a folder `forerun` would shadow an editable install.
        Path("forerun-out"), "dir", Reads.PATH, "DIR",
        "records and answers; several launches may share it",
    )  # fmt: skip
    on_advice: OnAdvice = _option(
        OnAdvice.LOG, "on-advice", Reads.CHOICE, "",
        "`alert` sends a W&B alert as well; `stop` ends training on advice",
    )  # fmt: skip
    goals: Goals = field(default_factory=Goals)
    python: str = _option(
        "", "python", Reads.TEXT, "PATH",
        "the Python whose environment has the extra `analysis`, for live answers if that of "
        "training lacks it",
        shown="this one, else `FORERUN_PYTHON`", example="/opt/forerun/bin/python",
    )  # fmt: skip
    probe_s: float = _option(
        0.0, "probe-seconds", Reads.NUMBER, "S",
        "time to measure, between steps after the window, what other layouts need "
        "and the running one does not have: operators at other widths, collectives on the groups "
        "that exist; 10 is sensible",
        shown="0 (none)", example="10", low=0.0, high=3600.0,
        rule="seconds from 0 to 3600; such as 10",
    )  # fmt: skip
    wandb: WandbMode = _option(
        WandbMode.AUTO, "wandb", Reads.CHOICE, "",
        "into the host's own run if there is one, else a separate offline run, which stays on the "
        "machine until your `wandb sync`; `on` sends it",
    )  # fmt: skip
    tensorboard: SinkChoice = _option(
        SinkChoice.AUTO, "tensorboard", Reads.CHOICE, "",
        "event files in the folder `forerun` beside the host's own if it writes any, else in "
        "`DIR/tensorboard`; `on` reports a missing package",
    )  # fmt: skip
    prometheus: Path | None = _option(
        None, "prometheus", Reads.PATH, "FILE",
        "values as a text file for node exporter's textfile collector, replaced every few seconds",
        example="/var/lib/node_exporter/forerun.prom",
    )  # fmt: skip
    trainjob: SinkChoice = _option(
        SinkChoice.AUTO, "trainjob", Reads.CHOICE, "",
        "progress, remaining time and values in the status of this Kubeflow TrainJob; "
        "`auto`: unless training itself reports there",
    )  # fmt: skip
    slurm_comment: Switch = _option(
        Switch.OFF, "slurm-comment", Reads.CHOICE, "",
        "`on` sets the comment of the Slurm job to progress and end, at most once a minute",
        example="on",
    )  # fmt: skip
    device: DeviceChoice = _option(
        DeviceChoice.AUTO, "device", Reads.CHOICE, "", "`cpu` installs the stand-in", example="cpu"
    )
    trace: TraceChoice = _option(
        TraceChoice.AUTO, "trace", Reads.CHOICE, "",
        "one step after the window under PyTorch's profiler: kernels by operator; `auto`: on a GPU "
        "only",
    )  # fmt: skip
    cluster: Path | None = _option(
        None, "cluster", Reads.PATH, "FILE",
        "JSON of the links between GPUs, if their nodes do not show them: `docs/cluster.md`",
        example="cluster.json",
    )  # fmt: skip
    takes_requests: bool = False
    """True if ``forerun run`` may request a stop when the scheduler's limit is near."""


def options(kind: type = RunOptions) -> Iterator[tuple[Flag, Field[Any]]]:
    """Yield every option that has a flag, with its field; those of ``Goals`` in place of
    ``goals``."""
    for spec in fields(kind):
        if spec.name == "goals":
            yield from options(Goals)
        elif "flag" in spec.metadata:
            yield spec.metadata["flag"], spec
