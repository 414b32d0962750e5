"""The largest micro-batch that fits, and the cheapest options with which a layout fits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product

from ..arguments.megatron_args import apply_options
from ..errors import ConfigError
from ..forecast.modelled import batch_levels
from ..memory.peak import Verdict
from ..plain_json import JsonObject
from ..search.results import MemoryBudget
from ..steps.model import FittedSteps
from ..units import format_bytes, format_frac
from ..workload.config import RunConfig
from ..workload.config_json import Encoded, encoded
from .planning import Candidate, compare, unsupported_reason

_NUM_REMEDIES = 2
_MOST_CHANGES = 3
_DEGREES = (2, 4, 8)
_CHOICES = (
    (("--zero", "1"), ("--zero", "2"), ("--zero", "3")),
    (("--recompute", "selective"), ("--recompute", "full")),
    tuple(("--tp", str(degree), "--sp", "on") for degree in _DEGREES),
    tuple(("--pp", str(degree)) for degree in (*_DEGREES, 16)),
    tuple(("--cp", str(degree)) for degree in _DEGREES),
    tuple(("--ep", str(degree)) for degree in _DEGREES),
    (("--optimizer-cpu-offload",),),
)
"""Options of ``predict``; at most one is taken from each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy(Encoded):
    """A layout that fits in place of one that may not."""

    words: tuple[str, ...]
    """Options of ``predict`` that select the layout."""
    layout: Candidate
    slower_frac: float
    """Step time over that of the requested layout, minus one."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(
            options=self.words,
            label=self.layout.label,
            total_nbytes=self.layout.memory.total_nbytes,
            fit_probability=self.layout.fit_probability,
            step_time_s=self.layout.step_time_s,
            slower_frac=self.slower_frac,
        )

    @property
    def text(self) -> str:
        """The remedy as ``--tp 2 (66.0 GiB, step +24.1 %)``."""
        size = format_bytes(self.layout.memory.total_nbytes)
        size += ", tight" * (self.layout.verdict is Verdict.TIGHT)
        cost = f", step {format_frac(self.slower_frac, signed=True)}" * bool(self.slower_frac)
        return f"{' '.join(self.words)} ({size}{cost})"


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingLayouts:
    """Search for layouts that fit on one kind of device in place of the requested one."""

    requested: RunConfig
    steps: FittedSteps
    budget: MemoryBudget
    measured: RunConfig
    """Layout in which the offset was measured."""

    def largest_micro_batch(self) -> Remedy | None:
        """Return the layout with the largest micro-batch that is likelier to fit than not; None if
        there is none."""
        unfit = Verdict.DOES_NOT_FIT
        fitting = [one for one in micro_batches(self.requested) if self.verdict(one) is not unfit]
        largest = {("--mbs", str(one.batch.micro_batch_size)): one for one in fitting[-1:]}
        return next(iter(self.priced(largest)), None)

    def remedies(self) -> list[Remedy]:
        """Return the cheapest layouts that fit with the fewest changes, one of each kind."""
        for number in range(1, _MOST_CHANGES + 1):
            cheapest = {}
            for rows in combinations(_CHOICES, number):
                fitting = dict(self._fitting(product(*rows)))
                for best in self.priced(fitting)[:1]:
                    cheapest[best.words] = best
            if cheapest:
                return sorted(cheapest.values(), key=lambda one: one.slower_frac)[:_NUM_REMEDIES]
        return []

    def verdict(self, config: RunConfig) -> Verdict:
        """Return the verdict on a layout's memory."""
        return self.budget.verdict(self.budget.needed(config, self.measured))

    def priced(self, layouts: dict[tuple[str, ...], RunConfig]) -> list[Remedy]:
        """Return the layouts, given by their options, as remedies, fastest first."""
        (requested, *candidates) = compare(
            self.requested,
            [self.requested, *layouts.values()],
            self.steps,
            budget=self.budget,
        )
        pairs = zip(layouts, candidates, strict=True)
        made = [
            Remedy(words=w, layout=c, slower_frac=c.step_time_s / requested.step_time_s - 1.0)
            for w, c in pairs
        ]
        return sorted(made, key=lambda one: one.slower_frac)

    def _fitting(
        self, choices: Iterator[tuple[tuple[str, ...], ...]]
    ) -> Iterator[tuple[tuple[str, ...], RunConfig]]:
        for chosen in choices:
            words = tuple(word for one in chosen for word in one)
            try:
                config = apply_options(self.requested, words)
            except ConfigError:
                continue
            if self.verdict(config) is Verdict.FITS and not unsupported_reason(
                config, self.requested
            ):
                yield words, config


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
