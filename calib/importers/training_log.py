"""Steps of a run from the log that Megatron-LM, or one of its forks, prints while it trains.

A line per log interval gives the iteration and the mean time of the iterations since the last one
(``training_log`` of ``megatron/training/training.py``); evaluations and saves are not part of it.
A launcher may prefix lines, and several ranks or restarts may have printed the same iteration: the
last one counts.
"""

from __future__ import annotations

import re
from calendar import timegm
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from ..errors import RecordError
from ..units import format_time
from ..workload.argument_values import ArgumentValue, option_of, shown

MAX_LINE_LENGTH = 4000
"""Longer lines are skipped: none of steps is so long, and a search in one could take for ever."""
_MOST_STEPS, _MOST_S, _MS_PER_S = 10**12, 1e7, 1000.0
_MOST = 1e18
"""Larger numbers are damage."""
_ITERATION = re.compile(
    r"(?P<nemo>\bTraining epoch \d+, )?\biteration:?\s+(?P<at>\d+)\s*/\s*(?P<total>\d+)\s*\|"
    r"(?P<rest>.*)",
    re.IGNORECASE,
)
"""NeMo counts from 0."""
_FIELD = re.compile(r"\s*(?P<name>[^:|]+?)\s*:\s*(?P<value>[^|]*?)\s*(?:\||$)")
_TIME = re.compile(
    r"elapsed time per iteration ?\((?P<unit>ms|s)\)|elapsed_time_per_iteration_(?P<nanotron>ms)"
    r"|train_step_timing in (?P<nemo>s)",
    re.IGNORECASE,
)
_BATCH = ("global batch size", "global_batch_size", "gloabl batch size")
_SAMPLE_RATE = re.compile(r"samples(?:/sec| per second):?\s+(\d+\.?\d*)")
_NUMBER = re.compile(r"([-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)([KM])?")
_POWERS = {None: 1.0, "K": 1e3, "M": 1e6}
_MOMENT = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):([0-5]\d(?:[.,]\d{1,6})?)")
_ARGUMENT = re.compile(r"(?:^|[\s:>])([a-z][a-z0-9_]*) \.{2,} ?(\S.*?)\s*$")
_RULE = re.compile(r"-{5,} (end of )?\w*\s?arguments -{5,}", re.IGNORECASE)
_TIMER = re.compile(
    r"\b(evaluate|save-checkpoint)\b[ .]*:\s*\(?\s*(?:\d+\.?\d*\s*,\s*)?(\d+\.?\d*)"
)
"""The slowest rank's time, of one number or of least and most."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TREND_FRAC = 0.1
"""Least change that counts, as for a drift of a live run."""
_COUNTS = ("world_size", "eval_iters", "eval_interval", "save_interval", "seq_length")
"""Arguments that a run's steps and end depend on, whole numbers or none."""
_COUNT = re.compile(r"\d{1,15}")
_PHASES = {"evaluate": "eval", "save-checkpoint": "save-checkpoint"}
_THROUGHPUT = re.compile(r"throughput|tflops|tflop/s", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line: iterations since the line before."""

    iteration: int
    """Last of its iterations, from 1."""
    num_iterations: int
    time_s: float
    """Mean time of one of them."""
    unix_s: float | None = None
    """When the line was printed, in the log's own time zone read as UTC."""
    global_batch_size: int = 0
    samples: int = 0
    """Samples consumed so far."""
    num_skipped: int = 0
    num_nan: int = 0
    tflops_per_gpu: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLog:
    """Steps of one run in a log."""

    lines: tuple[LogLine, ...]
    num_steps: int
    """Iterations of the whole run."""
    phases: tuple[tuple[int, str, float], ...] = ()
    """Evaluations and saves that timers print: iteration before it, name, seconds."""
    arguments: Mapping[str, ArgumentValue] = field(default_factory=dict)
    """Arguments that the log begins with, by name in Megatron's namespace."""
    problems: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines on what a log shows besides its steps: skipped iterations, a batch that changes,
        the rate that it states, and iterations that get slower or faster."""
        skipped, nan = (
            sum(getattr(one, n) for one in self.lines) for n in ("num_skipped", "num_nan")
        )
        batches = list(dict.fromkeys(one.global_batch_size for one in self.lines))
        rates = [one.tflops_per_gpu for one in self.lines[1:] if one.tflops_per_gpu > 0]
        notes = [
            f"{skipped:,} iterations were skipped, {nan:,} had no finite loss"
            * bool(skipped + nan),
            f"the batch changed from {batches[0]:,} to {batches[-1]:,} samples; steps of other "
            f"batches than the newest are left out" * (len(batches) > 1),
            f"the log states {median(rates):.4g} TFLOP/s per GPU" if rates else "",
            self._trend(),
        ]
        return tuple(note for note in notes if note)

    def _trend(self) -> str:
        """Return a line if the last third of the lines differs from the first by 10 % or more; the
        very first, which has the warm-up, counts only where there are two."""
        lines = self.lines[1:] if len(self.lines) > 2 else self.lines
        if len(lines) < 2:
            return ""
        third = -(-len(lines) // 3)
        early, late = lines[:third], lines[-third:]
        early_s, late_s = (median(one.time_s for one in part) for part in (early, late))
        if abs(late_s / early_s - 1.0) < _TREND_FRAC:
            return ""
        word = "slower" if late_s > early_s else "faster"
        return (
            f"iterations got {word}: {format_time(early_s)} up to {early[-1].iteration:,}, "
            f"{format_time(late_s)} from {late[0].iteration:,} on ({late_s / early_s - 1.0:+.0%})"
        )


def read_training_log(texts: Sequence[str], name: str) -> TrainingLog:
    """Return the run of one or several logs: of its launches in order, or of its ranks.

    Iterations that a restart runs again replace those of the launch before it.  Raise
    ``RecordError`` if no line has an iteration and its time.

    >>> line = "iteration   20/  2000 | elapsed time per iteration (ms): 500.0 | lm loss: 1 |"
    >>> log = read_training_log([line.replace("20/", "10/"), line], "train.log")
    >>> log.num_steps, [(one.iteration, one.num_iterations, one.time_s) for one in log.lines]
    (2000, [(10, 10, 0.5), (20, 10, 0.5)])
    """
    reader = _Reader()
    for text in texts:
        for line in _whole(text).splitlines():
            if len(line) <= MAX_LINE_LENGTH:
                reader.take(_COLOUR.sub("", line))
    if not reader.lines:
        raise RecordError(
            f"{name} has no line 'iteration N/ TOTAL | ... elapsed time per iteration (ms): T |'; "
            "give the standard output of Megatron-LM or of a fork; no other trainer's log is read"
        )
    return reader.log()


def logged_arguments(text: str) -> dict[str, ArgumentValue]:
    """Return the arguments that a log begins with, by name in Megatron's namespace.

    They are printed between two rules of dashes; of several lists the first counts.
    """
    arguments: dict[str, ArgumentValue] = {}
    is_inside = False
    for line in text.splitlines():
        if rule := _RULE.search(line):
            if rule[1]:
                break
            is_inside = True
        elif is_inside and (one := _ARGUMENT.search(_COLOUR.sub("", line))):
            arguments.setdefault(one[1], _value(one[2]))
    return arguments


def _whole(text: str) -> str:
    """Return a text without the value that it ends in, which may still be written or cut."""
    start = text.rfind("\n") + 1
    end = text.rfind("|", start) + 1 or text.rfind(")", start) + 1
    return text[: max(start, end)]


@dataclass(slots=True)
class _Reader:
    """Steps of the lines so far."""

    lines: dict[int, LogLine] = field(default_factory=dict)
    phases: dict[tuple[int, str], float] = field(default_factory=dict)
    arguments: dict[str, ArgumentValue] = field(default_factory=dict)
    num_steps: int = 0
    num_damaged: int = 0
    last: int = 0
    """Iteration of the newest line."""

    def take(self, text: str) -> None:
        """Read one line."""
        if match := _ITERATION.search(text):
            line = _line(match, text)
            if line is None:
                self.num_damaged += bool(_TIME.search(text))
            else:
                self._add(line, int(match["total"]) + (match["nemo"] is not None))
        elif timer := _TIMER.search(text):
            self.phases[self.last, _PHASES[timer[1]]] = _number(timer[2]) / _MS_PER_S
        elif argument := _ARGUMENT.search(text):
            self.arguments.setdefault(argument[1], _value(argument[2]))

    def _add(self, line: LogLine, total: int) -> None:
        same = self.lines.get(line.iteration)
        if same is not None and same.time_s == line.time_s:
            return  # another rank's copy
        if line.iteration < self.last:
            # A restart from a checkpoint.
            self.lines = {at: one for at, one in self.lines.items() if at < line.iteration}
            self.phases = {at: s for at, s in self.phases.items() if at[0] < line.iteration}
        if not line.global_batch_size and self.last in self.lines:
            before = self.lines[self.last]
            line = replace(line, global_batch_size=before.global_batch_size)
        self.lines[line.iteration] = line
        self.last, self.num_steps = line.iteration, total

    def log(self) -> TrainingLog:
        """Return the whole run."""
        ordered = [self.lines[at] for at in sorted(self.lines)]
        apart = [b.iteration - a.iteration for a, b in pairwise(ordered)]
        stated = str(self.arguments.get("log_interval"))
        usual = int(stated) if stated.isdecimal() else _usual(apart)
        starts = [max(0, ordered[0].iteration - usual), *(line.iteration for line in ordered)]
        lines = f"{self.num_damaged} lines of iterations cannot be read, and are left out"
        problems = [lines] * bool(self.num_damaged)
        for name in _COUNTS:
            value = self.arguments.get(name)
            if value is not None and not _COUNT.fullmatch(str(value)):
                del self.arguments[name]
                problems.append(
                    f"{option_of(name)} {shown(value)} of the log is not a whole number, and is "
                    f"left out"
                )
        return TrainingLog(
            lines=tuple(
                replace(line, num_iterations=max(1, min(usual, line.iteration - start)))
                for line, start in zip(ordered, starts, strict=False)
            ),
            num_steps=self.num_steps,
            phases=tuple((at, name, time_s) for (at, name), time_s in self.phases.items()),
            arguments=self.arguments,
            problems=tuple(problems),
        )


def _usual(apart: Sequence[int]) -> int:
    """Return the most frequent distance, the larger of several; 1 without any."""
    return max(apart, key=lambda one: (apart.count(one), one)) if apart else 1


def _line(match: re.Match[str], text: str) -> LogLine | None:
    """Return the line of an iteration; None if it has no time, or one that is no number."""
    values = {one["name"].lower(): one["value"] for one in _FIELD.finditer(match["rest"])}
    label = _TIME.search(match["rest"])
    # NeMo's first iteration, and its last one, are 0 and one below the number of all.
    is_from_0 = match["nemo"] is not None
    iteration = int(match["at"]) + is_from_0
    if label is None or not 0 < iteration <= _MOST_STEPS or int(match["total"]) > _MOST_STEPS:
        return None
    # A fork prints the newest value, then the mean of all: 1234.5/1300.2.
    is_s = (label["unit"] or label["nanotron"] or label["nemo"]).lower() == "s"
    time_s = _number(values.get(label[0].lower(), "")) / (1.0 if is_s else _MS_PER_S)
    if not 0.0 < time_s < _MOST_S:
        return None
    batch = next((_number(values[name]) for name in _BATCH if name in values), 0.0)
    if not batch and (rate := _SAMPLE_RATE.search(text)):
        batch = round(_number(rate[1]) * time_s)
    rates = [value for name, value in values.items() if _THROUGHPUT.search(name)]
    return LogLine(
        iteration=iteration,
        num_iterations=1,
        time_s=time_s,
        unix_s=_unix_s(text),
        global_batch_size=int(batch),
        samples=int(_number(values.get("consumed samples", values.get("consumed_samples", "")))),
        num_skipped=int(_number(values.get("number of skipped iterations", ""))),
        num_nan=int(_number(values.get("number of nan iterations", ""))),
        tflops_per_gpu=_number(rates[0]) if rates else 0.0,
    )


def _value(text: str) -> ArgumentValue:
    """Return a value as ``print`` writes it: a word, a switch, a list of words, or None."""
    if text in ("None", "True", "False"):
        return None if text == "None" else text == "True"
    if text.startswith("["):
        return [word.strip(" '\"") for word in text.strip("[]").split(",") if word.strip()]
    return text


def _number(text: str) -> float:
    """Return the first number of a text; 0 if there is none, or one that no run has."""
    match = _NUMBER.match(text.strip())
    number = float(match[1].replace(",", "")) * _POWERS[match[2]] if match else 0.0
    return number if 0.0 <= number < _MOST else 0.0


def _unix_s(text: str) -> float | None:
    """Return the time that a line begins with, in its own time zone read as UTC."""
    moment = _MOMENT.search(text)
    if moment is None:
        return None
    year, month, day, hour, minute = (int(number) for number in moment.groups()[:5])
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60):
        return None
    return timegm((year, month, day, hour, minute, 0)) + float(moment[6].replace(",", "."))
