"""Values of a run that every sink gets, with their names and meanings, and how it was launched.

The suffix of a name is its unit: ``_s`` seconds, ``_unix_s`` seconds since 1970, ``_h`` hours,
``_frac`` a fraction of 1, ``_per_s`` per second; without one it is a number, or 1 for yes.  All are
finite floats.  Standard library only: training logs some of them into the host's own W&B run.

``Launch`` has the command, host and environment that rank 0 noted, as far as they may be stored
(``calib.arguments.passed_on``); a masked word is ``***``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ..errors import ConfigError, RecordError
from ..plain_json import Json, JsonObject
from ..shell import is_word
from ..workload.config_json import Encoded, decode, encode_fields, encoded

PREFIX = "calib/"
"""Prefix of each name in a sink that has other metrics too."""
ITERATION = "iteration"
TIME = "unix_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunValue:
    """Meaning of a value; if ``is_constant``, it is sent once, and then only if it has changed."""

    meaning: str
    is_constant: bool = False


def _of(meaning: str) -> RunValue:
    return RunValue(meaning=meaning)


def _once(meaning: str) -> RunValue:
    return RunValue(meaning=meaning, is_constant=True)


RUN_VALUES: Mapping[str, RunValue] = {
    ITERATION: _of("Step as the host counts it, from 1."),
    TIME: _of("When the step ended."),
    "step_time_s": _of("Time of the step, from its start to the next one's."),
    "step_time_predicted_s": _of("Step time that was predicted from measured steps."),
    "step_time_predicted_low_s": _of("Lower end of the 90 % interval of the predicted step."),
    "step_time_predicted_high_s": _of("Upper end of the 90 % interval of the predicted step."),
    "step_time_modelled_s": _of("Step time of the model of operators and collectives."),
    "step_time_error_frac": _of("Predicted over measured step time, less 1."),
    "is_in_interval": _of("1 if the step lay in its 90 % interval, else 0."),
    "level_s": _of("Level of the step time now."),
    "drift_frac": _of("Level of the step time over the first one, less 1."),
    "tokens_per_s": _of("Tokens per second of the whole run."),
    "tokens_per_s_per_gpu": _of("Tokens per second of one GPU."),
    "samples_per_s": _of("Samples per second of the whole run, if tokens are not known."),
    "samples_per_s_per_gpu": _of("Samples per second of one GPU, if tokens are not known."),
    "mfu_frac": _of("Model FLOP/s utilization of the GPUs (MFU)."),
    "progress_frac": _of("Steps done of all steps of the run."),
    "eta_h": _of("Time until the run ends, median."),
    "finish_p50_unix_s": _of("When the run ends, median."),
    "finish_p95_unix_s": _of("When the run has ended with 95 % probability."),
    "num_steps": _once("Steps of the whole run."),
    "is_stop_advised": _once("1 if the advice is to stop, else 0."),
    "stop_probability": _once("Probability that the strongest reason to stop holds."),
    "overhead_frac": _once("Overhead of hooks, as a share of a step of the window."),
    "overhead_below_frac": _once("Upper bound of that overhead, if noise hides it."),
}
"""All values that are sent for steps."""
RATES = (
    *("tokens_per_s", "tokens_per_s_per_gpu"),
    *("samples_per_s", "samples_per_s_per_gpu"),
    "mfu_frac",
)
"""Values inversely proportional to the step time."""
LEVELS = frozenset(
    {"level_s", "drift_frac", *(name for name, one in RUN_VALUES.items() if one.is_constant)}
)
"""Values that are valid for steps of a window too."""
SUMMARY_VALUES: Mapping[str, str] = {
    "decision": "The last decision: stop, continue or abstain, as text.",
    "advice": "The line on it, or on the next launch once the run has ended, as text.",
    "answers_time_s": "Time that Forerun's answers added to the steps beside them.",
    "num_scored_steps": "Steps that had a prediction before they ran.",
    "step_time_error_median_frac": "Predicted over measured step time, less 1, median.",
    "step_time_abs_error_median_frac": "Absolute error of the step time, median.",
    "interval_coverage_frac": "Share of these steps that lay within their 90 % interval.",
}
"""Values added at the end of a run in sinks with a summary, besides rates of the measured step."""


class UnsentValues:
    """Filter of the values to send: constants only once, numbers that are not finite never.

    >>> unsent = UnsentValues()
    >>> [unsent.of({"level_s": 2.0, "overhead_frac": 0.01}) for _ in range(2)]
    [{'level_s': 2.0, 'overhead_frac': 0.01}, {'level_s': 2.0}]
    """

    def __init__(self) -> None:
        self._sent: dict[str, float] = {}

    def of(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the finite values of a step, without constants that were sent before."""
        new_values = {name: value for name, value in values.items() if self._is_news(name, value)}
        self._sent |= {name: new_values[name] for name in new_values if _is_constant(name)}
        return new_values

    def _is_news(self, name: str, value: float) -> bool:
        return math.isfinite(value) and self._sent.get(name) != value


def _is_constant(name: str) -> bool:
    known = RUN_VALUES.get(name)
    return known is not None and known.is_constant


def progress(iteration: int, num_steps: int) -> dict[str, float]:
    """Return the run's length and the fraction done; empty if its length is unknown.

    >>> progress(50, 200)
    {'num_steps': 200.0, 'progress_frac': 0.25}
    """
    if num_steps <= 0:
        return {}
    return {"num_steps": float(num_steps), "progress_frac": min(1.0, iteration / num_steps)}


def hours_remaining(finish_unix_s: float, now_unix_s: float) -> float:
    """Return the hours from now to the end, 0 if that has passed.

    >>> hours_remaining(9000.0, 1800.0)
    2.0
    """
    return max(0.0, finish_unix_s - now_unix_s) / 3600.0


NAME = "command.json"
"""File of rank 0 in the folder of a run's records."""
RUNS = "runs"
"""Folder in a directory that has one folder for each launch."""
LAUNCH = "launch.json"
"""File in such a folder: the launch it belongs to, or the one its launch has agreed to be."""
MARKER = "stop.json"
"""File in such a folder, written on a request to save and stop training: when and why."""
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(Encoded):
    """Description of a launch; fields are empty if nothing was noted."""

    schema: ClassVar[int] = SCHEMA

    argv: tuple[str, ...] = ()
    """The program and its arguments, without ours."""
    launcher: tuple[str, ...] = ()
    """Words before the program, as ``torchrun --nproc-per-node 8``; empty if unknown."""
    folder: str = ""
    """The working directory."""
    host: str = ""
    """Framework whose loop trains, if a module tells (``megatron.bridge``); else see the config."""
    num_nodes: int = 1
    ranks_per_node: int = 1
    absent: tuple[str, ...] = ()
    """Layout options that the program does not accept, and ``transformer_engine`` if that was not
    imported (``RunConfig.absent``)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that Megatron's rules require, and our own, as the processes had them."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(schema=self.schema, **encode_fields(self))

    @staticmethod
    def from_json(value: Mapping[str, Json]) -> Launch:
        """Return the launch that ``to_json`` wrote; unknown keys are ignored.

        Raise ``RecordError`` if a value has a wrong type, or is no word of a command.

        >>> Launch.from_json(Launch(argv=("t.py", "--lr", "1")).to_json()).argv
        ('t.py', '--lr', '1')
        """
        try:
            launch = decode(Launch, value)
        except ConfigError as err:
            raise RecordError(f"{NAME} cannot be read ({err}); delete it") from err
        if not all(map(is_word, (*launch.argv, *launch.launcher, launch.folder))):
            raise RecordError(f"{NAME} has words that no process was given; delete it")
        return launch
