"""User options of a run: every option of ``--calibrate``, declared once.

A field is an option; its ``Flag`` describes the command line.  The flags, the companion, the
analysis and the decision all take these classes whole, so a new option is one field here and one
use.  The module imports only the standard library, since training imports it.
"""

# ruff: noqa: RUF009  `_option` returns a field of the dataclass.
from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from ..units import DAY_S, HOUR_S


class OnAdvice(Enum):
    """Action when the decision is to stop."""

    LOG = "log"
    ALERT = "alert"
    STOP = "stop"


class AutoSwitch(Enum):
    """Switch of a feature that under ``auto`` decides by its environment."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Switch(Enum):
    """Switch of an opt-in feature."""

    OFF = "off"
    ON = "on"


class DeviceChoice(Enum):
    """Training device: the one that torch detects, or the CPU stand-in."""

    AUTO = "auto"
    CPU = "cpu"


Reader: TypeAlias = "tuple[str, Callable[[str], Any]]"
"""Rule for the text of an option, in words, and the function that reads such a text; it raises
``ValueError`` for any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """Command-line form of an option: ``--calibrate-<name>=<metavar>``."""

    name: str
    reader: Reader
    metavar: str
    example: str
    default: str
    """Default value as text for display."""
    description: str
    """Description for the reference."""


def _whole(low: int) -> Reader:
    return f"a whole number from {low} on", lambda text: _within(low, int(_matched(text, r"\d+")))


def _number(rule: str, low: float, high: float = sys.float_info.max) -> Reader:
    return rule, lambda text: _within(low, float(text), high)


def _within(low: float, value: float, high: float = math.inf) -> float:
    if low <= value <= high:
        return value
    raise ValueError(value)


def _matched(text: str, pattern: str) -> str:
    if re.fullmatch(pattern, text, re.ASCII):
        return text
    raise ValueError(text)


def _moment(text: str) -> float | datetime:
    """Return Unix seconds, or a time as written, which may be local."""
    with suppress(ValueError):
        return _within(math.ulp(0.0), float(text), sys.float_info.max)
    # Python 3.10 does not parse the Z.
    return datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))


_UNITS_S = {"s": 1.0, "m": 60.0, "h": HOUR_S, "d": DAY_S}


def duration(text: str) -> float:
    """Return seconds; ``ValueError`` if the text is not seconds, or a number with a unit.

    >>> duration("600"), duration("1.5m"), duration("2d")
    (600.0, 90.0, 172800.0)
    """
    number = _matched(text, r"\d+(\.\d+)?[smhd]?").rstrip("smhd")
    return float(number) * _UNITS_S.get(text[-1], 1.0)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(_matched(part, r"0*[1-9]\d{0,6}")) for part in text.split(","))


_MOMENT: Reader = "an ISO 8601 time, or Unix seconds", _moment
_DURATION: Reader = "seconds, or a number with s, m, h or d", duration
_COUNTS: Reader = "whole numbers above 0 of up to 7 digits, with commas between", _counts
_PATH: Reader = "a path", Path
_TEXT: Reader = "text", str
_HOURS = _number("a number above 0", math.ulp(0.0))


def _option(
    default: Any,
    name: str,
    reader: Reader,
    metavar: str,
    description: str,
    *,
    shown: str = "",
    example: str = "",
) -> Any:
    text = shown or ("none" if default is None else str(default))
    flag = Flag(
        name=name,
        reader=reader,
        metavar=metavar,
        example=example or text,
        default=text,
        description=description,
    )
    return field(default=default, metadata={"flag": flag})


def _choice(default: Enum, name: str, description: str, *, example: str = "") -> Any:
    words, shown = [str(member.value) for member in type(default)], str(default.value)
    reader = " or ".join(words), type(default)
    metavar = "|".join(words)
    return _option(default, name, reader, metavar, description, shown=shown, example=example)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """Goals and costs that advice is weighed against, and numbers of ranks to plan for."""

    deadline_unix_s: float | None = _option(
        None, "deadline", _MOMENT, "TIME",
        "ISO 8601 or unix seconds: advise to stop when it will not be met",
        example="2030-01-31T18:00:00+00:00",
    )  # fmt: skip
    budget_hours: float | None = _option(
        None, "budget-hours", _HOURS, "H",
        "wall-clock time: advise to stop when it will be exceeded", example="48",
    )  # fmt: skip
    restart_cost_s: float = _option(
        600.0, "restart-cost", _DURATION, "T",
        "time that a restart costs, `600`, `10m` or `1h`",
        shown="10m",
    )  # fmt: skip
    mtbf_hours: float | None = _option(
        None, "mtbf-hours", _HOURS, "H",
        "mean time between failures of the whole job; observed restarts refine it",
        shown="public rate", example="48",
    )  # fmt: skip
    price_per_gpu_hour: float | None = _option(
        None, "price-per-gpu-hour", _number("a price of 0 or more", 0.0), "X",
        "adds the run's cost to the forecast", example="2.5",
    )  # fmt: skip
    limit_unix_s: float | None = None
    """End of the scheduler's job in Unix seconds, as given to ``forerun run``."""
    confidence: float = _option(
        0.9, "confidence", _number("from 0.5 to 1", 0.5, 1.0), "P",
        "probability that advice needs",
    )  # fmt: skip
    gpus: tuple[int, ...] = _option(
        (), "gpus", _COUNTS, "16,32", "other numbers of ranks to plan for",
        shown="as the run", example="8,16",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """User options of a calibrated run."""

    steps: int = _option(
        20, "steps", _whole(4), "N",
        "steps in the window, half of them hooked, after three warm-up steps",
    )  # fmt: skip
    every: int = _option(
        500, "every", _whole(0), "N",
        "open another, shorter window every N steps, after a drift, and for a second opinion "
        "before advice: rows are added, models refitted; 0: one window, and nothing but the step "
        "timer after it",
    )  # fmt: skip
    total_steps: int | None = _option(
        None, "total-steps", _whole(1), "N",
        "optimizer steps of the whole run from its first step here, if the training loop does "
        "not state them; without either, no finish is predicted; if both do, the loop counts",
        shown="as the loop says", example="5000",
    )  # fmt: skip
    directory: Path = _option(
        # Not an importable name, since a folder `forerun` would shadow an editable install.
        Path("forerun-out"), "dir", _PATH, "DIR",
        "records and answers; several launches may share it",
    )  # fmt: skip
    on_advice: OnAdvice = _choice(
        OnAdvice.LOG, "on-advice",
        "`alert` sends a W&B alert as well; `stop` ends training on advice",
    )  # fmt: skip
    goals: Goals = field(default_factory=Goals)
    python: str = _option(
        "", "python", _TEXT, "PATH",
        "the Python whose environment has the extra `analysis`, for live answers if that of "
        "training lacks it",
        shown="this one, else `FORERUN_PYTHON`", example="/opt/forerun/bin/python",
    )  # fmt: skip
    probe_s: float = _option(
        0.0, "probe-seconds", _number("seconds from 0 to 3600", 0.0, 3600.0), "S",
        "time to measure, between steps after the window, what other layouts need "
        "and the running one does not have: operators at other widths, collectives on the groups "
        "that exist; 10 is sensible",
        shown="0 (none)", example="10",
    )  # fmt: skip
    wandb: AutoSwitch = _choice(
        AutoSwitch.AUTO, "wandb",
        "into the host's own run if there is one, else a separate offline run, which stays on the "
        "machine until your `wandb sync`; `on` sends it",
    )  # fmt: skip
    tensorboard: AutoSwitch = _choice(
        AutoSwitch.AUTO, "tensorboard",
        "event files in the folder `forerun` beside the host's own if it writes any, else in "
        "`DIR/tensorboard`; `on` reports a missing package",
    )  # fmt: skip
    prometheus: Path | None = _option(
        None, "prometheus", _PATH, "FILE",
        "values as a text file for node exporter's textfile collector, replaced every few seconds",
        example="/var/lib/node_exporter/forerun.prom",
    )  # fmt: skip
    trainjob: AutoSwitch = _choice(
        AutoSwitch.AUTO, "trainjob",
        "progress, remaining time and values in the status of this Kubeflow TrainJob; "
        "`auto`: unless training itself reports there",
    )  # fmt: skip
    slurm_comment: Switch = _choice(
        Switch.OFF, "slurm-comment",
        "`on` sets the comment of the Slurm job to progress and end, at most once a minute",
        example="on",
    )  # fmt: skip
    device: DeviceChoice = _choice(
        DeviceChoice.AUTO, "device", "`cpu` installs the stand-in", example="cpu"
    )
    trace: AutoSwitch = _choice(
        AutoSwitch.AUTO, "trace",
        "one step after the window under PyTorch's profiler: kernels by operator; `auto`: on a GPU "
        "only",
    )  # fmt: skip
    cluster: Path | None = _option(
        None, "cluster", _PATH, "FILE",
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
