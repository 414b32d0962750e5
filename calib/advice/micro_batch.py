"""Micro-batch and recompute that the measured memory allows, and their gain.

All degrees, the sharding and the global batch stay, so that the checkpoint stays valid and only a
few options change.  A larger micro-batch has larger products and fewer launches, but fewer
micro-batches have a larger bubble; spare memory replaces recompute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..arguments import resumed_command, rewrite_command, unsupported_options_reason
from ..errors import ConfigError
from ..forecast import batch_levels
from ..memory import FITS_PROBABILITY, fit_probability, memory, memory_with_offset, peaks_nbytes
from ..plain_json import JsonObject
from ..search import recomputes, rounded_log
from ..steps import FittedSteps
from ..units import GIB, format_bytes, format_count, format_frac
from ..workload import RunConfig, takes_options
from .axes import recompute_text
from .planning import Candidate, compare


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchAdvice:
    """The fastest recompute that fits, for each micro-batch that fits."""

    running: Candidate
    choices: tuple[Candidate, ...] = ()
    """Choices, smallest micro-batch first; the running layout may be among them."""
    memory_capacity_nbytes: int = 0
    num_layouts: int = 0
    """Number of pairs of micro-batch and recompute that were considered."""
    missing: str = ""
    """Reason why there is no advice; empty if there is."""
    confidence: float = 0.9
    """Probability of being faster that an advised choice must have."""
    host_argv: tuple[str, ...] = ()

    @property
    def best(self) -> Candidate | None:
        """The fastest choice that beats the running layout with the requested confidence; None if
        there is none."""
        sure = [one for one in self.choices if faster_probability(one) >= self.confidence]
        return min(sure, key=lambda one: one.time_frac, default=None)

    @property
    def nearest(self) -> Candidate | None:
        """The fastest other choice, sure or not; None if there is none."""
        others = [one for one in self.choices if one.config != self.running.config]
        return min(others, key=lambda one: one.time_frac, default=None)

    @property
    def largest(self) -> Candidate | None:
        """The largest micro-batch that fits, with the lightest recompute that fits with it."""
        return self.choices[-1] if self.choices else None

    @property
    def command(self) -> tuple[str, ...]:
        """User's command line with the best choice, resuming from the checkpoint.

        Empty if there is no such choice, if the command line is unknown, or if the program does not
        take Megatron's options.
        """
        best, running = self.best, self.running.config
        if best is None or not self.host_argv or not takes_options(running):
            return ()
        changed = rewrite_command(self.host_argv, best.config, running=running)
        return resumed_command(changed)

    @property
    def command_absent(self) -> str:
        """Reason why there is no command; empty if there is one."""
        if self.best is None:
            return self.missing or "nothing that fits is surely faster"
        if not self.host_argv:
            return "the command line of the run is not known"
        if takes_options(self.running.config):
            return ""
        return "micro-batch and recompute are set in the program, not on its command line"

    @property
    def line(self) -> str:
        """The advice as a line of the transcript."""
        if self.missing:
            return f"micro-batch: {self.missing}"
        best, largest = self.best, self.largest
        now = _in_words(self.running.config)
        if best is None:
            words = ["micro-batch: nothing that fits is surely faster", f"running {now}"]
            if self.nearest is not None:
                words.append(f"nearest {_describe(self.nearest)}")
        else:
            words = [
                f"micro-batch: {_in_words(best.config)}, now {now}",
                best.change_text,
                f"{format_count(best.throughput.tokens_per_s)} tokens/s "
                f"({format_frac(1 / (1 + best.time_frac) - 1, signed=True)})",
                f"memory {_of(best.memory.total_nbytes, self.memory_capacity_nbytes)}, "
                f"fits with probability {best.fit_probability or 0.0:.2f}",
            ]
        if largest is not None and largest not in (best, self.running, best or self.nearest):
            words.append(f"largest {_describe(largest)}")
        return " · ".join(words)

    def to_json(self) -> JsonObject:
        """Return a JSON object; layouts have only the fields that differ between them."""
        best, largest = self.best, self.largest
        return {
            "running": _choice(self.running),
            "choices": [_choice(one) for one in self.choices],
            "best": _choice(best) if best is not None else None,
            "largest": _choice(largest) if largest is not None else None,
            "memory_capacity_nbytes": self.memory_capacity_nbytes,
            "num_layouts": self.num_layouts,
            "missing": self.missing,
            "command": list(self.command) or None,
            "command_absent": self.command_absent,
        }


def micro_batch_advice(
    config: RunConfig,
    steps: FittedSteps,
    *,
    memory_capacity_nbytes: int | None,
    memory_offset_nbytes: int | None,
    confidence: float = 0.9,
    host_argv: Sequence[str] = (),
) -> MicroBatchAdvice:
    """Return advice on micro-batch and recompute of the running layout.

    ``memory_offset_nbytes`` is the measured memory peak minus its estimate.  A choice fits if it
    does so with the probability that a plan requires, or if it needs no more than the running
    layout.
    """
    (running,) = compare(
        config,
        [config],
        steps,
        memory_capacity_nbytes=memory_capacity_nbytes,
        memory_offset_nbytes=memory_offset_nbytes,
    )
    if not memory_capacity_nbytes:
        return MicroBatchAdvice(running=running, missing="the memory capacity is not known")
    if memory_offset_nbytes is None:
        why = "no memory peak was measured; record another window"
        return MicroBatchAdvice(running=running, missing=why)
    layouts = micro_batch_layouts(config)
    chosen = _fastest(
        _fitting(config, layouts, memory_capacity_nbytes, memory_offset_nbytes), steps
    )
    return MicroBatchAdvice(
        running=running,
        choices=tuple(
            compare(
                config,
                chosen,
                steps,
                memory_capacity_nbytes=memory_capacity_nbytes,
                memory_offset_nbytes=memory_offset_nbytes,
            )
        ),
        memory_capacity_nbytes=memory_capacity_nbytes,
        num_layouts=len(layouts),
        confidence=confidence,
        host_argv=tuple(host_argv),
    )


def faster_probability(choice: Candidate) -> float:
    """Return the probability that the choice is faster than the running layout (log-normal ratio).

    0 for the running layout itself; at most 0.5 if the model misfits the run.
    """
    if not choice.log_ratio_sigma:
        return float(choice.time_frac < 0)
    deviations = math.log1p(choice.time_frac) / choice.log_ratio_sigma
    faster = 0.5 * math.erfc(deviations / math.sqrt(2))
    return min(faster, 0.5) if choice.is_doubtful else faster


def micro_batch_layouts(config: RunConfig) -> list[RunConfig]:
    """Return every possible micro-batch with every recompute, lightest recompute first.

    Recompute stays as it is if the program does not take Megatron's options; choices that it has no
    option for are excluded.
    """
    layouts: list[RunConfig] = []
    for at_size in micro_batches(config):
        choices = recomputes(at_size) if takes_options(config) else ()
        layouts += [one.applied_to(at_size) for one in choices] or [at_size]
    if takes_options(config):
        layouts = [one for one in layouts if not unsupported_options_reason(one, config)] or [
            config
        ]
    return layouts


def micro_batches(config: RunConfig) -> list[RunConfig]:
    """Return the layout with each micro-batch that divides all global batch sizes of the run."""
    sizes = {level.global_batch_size for level in batch_levels(config)} | {
        config.batch.global_batch_size
    }
    samples = math.gcd(*sizes) // config.parallelism.dp
    layouts: list[RunConfig] = []
    for micro in (size for size in range(1, samples + 1) if samples % size == 0):
        try:
            batch = replace(config.batch, micro_batch_size=micro)
            layouts.append(replace(config, batch=batch))
        except ConfigError:  # interleaving wants micro-batches in groups
            continue
    return layouts


def _fitting(
    config: RunConfig, layouts: Sequence[RunConfig], capacity_nbytes: int, offset_nbytes: int
) -> list[RunConfig]:
    """Return the layouts that fit, given the measured memory peak."""
    running_nbytes = memory(config).total_nbytes
    return [
        layout
        for layout, needed in zip(layouts, peaks_nbytes(layouts).tolist(), strict=True)
        if needed <= running_nbytes
        or fit_probability(
            memory_with_offset(layout, config, offset_nbytes), capacity_nbytes, is_calibrated=True
        )
        >= FITS_PROBABILITY
    ]


def _fastest(layouts: Sequence[RunConfig], steps: FittedSteps) -> list[RunConfig]:
    """Return the fastest layout of each micro-batch, in their order; the first one among ties."""
    logs = [rounded_log(time_s) for time_s in steps.median_times(layouts).tolist()]
    best: dict[int, int] = {}
    for place, layout in enumerate(layouts):
        known = best.setdefault(layout.batch.micro_batch_size, place)
        if logs[place] < logs[known]:
            best[layout.batch.micro_batch_size] = place
    return [layouts[place] for _, place in sorted(best.items())]


def _in_words(config: RunConfig) -> str:
    return f"{config.batch.micro_batch_size} with {recompute_text(config)}"


def _describe(choice: Candidate) -> str:
    return f"{_in_words(choice.config)}, {choice.change_text}"


def _of(needed: int, capacity: int) -> str:
    if capacity >= GIB:
        return f"{needed / GIB:.3g} of {capacity / GIB:.3g} GiB"
    return f"{format_bytes(needed)} of {format_bytes(capacity)}"


def _choice(choice: Candidate) -> JsonObject:
    config = choice.config
    return {
        "label": choice.label,
        "micro_batch_size": config.batch.micro_batch_size,
        "recompute": config.recompute.value,
        "recompute_modules": list(config.recompute_modules),
        "recompute_num_layers": config.recompute_num_layers,
        "step_time_s": choice.step_time_s,
        "low_s": choice.low_s,
        "high_s": choice.high_s,
        "time_frac": choice.time_frac,
        "time_frac_low": choice.time_frac_low,
        "time_frac_high": choice.time_frac_high,
        "faster_probability": faster_probability(choice),
        "tokens_per_s": choice.throughput.tokens_per_s,
        "memory_nbytes": choice.memory.total_nbytes,
        "fit_probability": choice.fit_probability,
        "options": list(choice.options),
    }
