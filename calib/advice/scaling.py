"""Scaling over numbers of GPUs: best step, efficiency, the knee, and the parts that cause it.

Each number of ranks is represented by the best layout of its plan; errors that two sizes share
cancel in their ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..arguments.short_names import LayoutConstraint
from ..memory.peak import Verdict
from ..plain_json import JsonObject
from ..regressors.estimate import Estimate
from ..steps.estimate import StepEstimate
from ..timeline.items import Part
from ..workload.config import RunConfig
from ..workload.config_json import Encoded, encoded
from .planning import Candidate, Plan

KNEE_SHARE = 0.5
"""Growth of tokens/s over growth of the number of GPUs, both in doublings, below which the knee
is passed: there the ratio of efficiency to time is greatest (Eager, Zahorjan and Lazowska 1989,
Speedup versus efficiency in parallel systems).  A doubling of GPUs is then worth a factor 1.41."""
TRUSTED_FACTOR = 2.0
"""Largest ratio of the ends of a 90 % interval that is still informative."""
_SURE = 0.95
"""Probability on either side of an end of a 90 % interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePoint(Encoded):
    """The best layout on one number of GPUs."""

    candidate: Candidate
    efficiency: Estimate
    """Tokens/s of a GPU over those of the smallest number of GPUs; errors that both sizes share
    have cancelled."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(
            num_ranks=self.num_ranks,
            global_batch_size=self.config.batch.global_batch_size,
            efficiency_frac=self.efficiency.median,
            efficiency_low_frac=self.efficiency.low,
            efficiency_high_frac=self.efficiency.high,
            is_trusted=self.is_trusted,
            tokens_low_per_s=self.tokens_per_s.low,
            tokens_high_per_s=self.tokens_per_s.high,
            layout=self.candidate,
        )

    @property
    def config(self) -> RunConfig:
        """The layout."""
        return self.candidate.config

    @property
    def num_ranks(self) -> int:
        """Number of GPUs."""
        return self.config.parallelism.num_ranks

    @property
    def tokens_per_s(self) -> Estimate:
        """Tokens/s; no error is shared with those of another device, whose model is another."""
        return Estimate(
            median=self.candidate.throughput.tokens_per_s,
            unshared_sigma_log=self.candidate.sigma_log,
        )

    @property
    def is_trusted(self) -> bool:
        """False if the interval of the step exceeds a factor of two."""
        return self.candidate.high_s <= TRUSTED_FACTOR * self.candidate.low_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth(Encoded):
    """Growth from one number of GPUs to the next."""

    before: ScalePoint
    after: ScalePoint
    tokens: Estimate
    """Factor by which tokens/s grow."""
    parts_frac: Mapping[Part, float]
    """Increase of each part of the GPU time per token, over the whole before; they add up to
    efficiency before over efficiency after, minus one."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(
            from_num_ranks=self.before.num_ranks,
            to_num_ranks=self.after.num_ranks,
            **self.yields,
            past_knee_probability=self.past_knee_probability,
            parts_frac=self.parts_frac,
        )

    @property
    def yields(self) -> dict[str, float]:
        """Growth of tokens/s over growth of the number of GPUs, both in doublings, with its 90 %
        interval: 1 if scaling is linear, 0 if the added GPUs gain nothing."""
        doublings = math.log(self.after.num_ranks / self.before.num_ranks)
        names = ("yield_share", "yield_low", "yield_high")
        factors = (self.tokens.median, self.tokens.low, self.tokens.high)
        return {n: math.log(f) / doublings for n, f in zip(names, factors, strict=True)}

    @property
    def past_knee_probability(self) -> float:
        """Probability that the yield is below ``KNEE_SHARE``."""
        return self.tokens.below((self.after.num_ranks / self.before.num_ranks) ** KNEE_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee(Encoded):
    """Number of GPUs beyond which additional ones mostly wait; None if not reached."""

    num_ranks: int | None
    low_num_ranks: int | None
    """Lower bound of the knee, with 95 %."""
    high_num_ranks: int | None
    """Upper bound of the knee, with 95 %; None if beyond the requested numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling(Encoded):
    """Scaling curve of one device, fewest GPUs first."""

    device: str
    points: tuple[ScalePoint, ...]
    growths: tuple[Growth, ...]
    without: tuple[int, ...] = ()
    """Numbers of GPUs for which no layout fits or divides the batch."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(
            device=self.device,
            is_weak=self.is_weak,
            knee=self.knee,
            points=self.points,
            growths=self.growths,
            without=self.without,
        )

    @property
    def is_weak(self) -> bool:
        """True if the batch grows with the GPUs."""
        return len({point.config.batch.global_batch_size for point in self.points}) > 1

    @property
    def knee(self) -> Knee:
        """The number of GPUs before the first growth that is past the knee.

        The median and the two ends of the 90 % interval are where that probability first reaches
        50 %, 5 % and 95 %.  Numbers with untrusted intervals count like others.
        """
        return Knee(
            num_ranks=self._first_past(1.0 - KNEE_SHARE),
            low_num_ranks=self._first_past(1.0 - _SURE),
            high_num_ranks=self._first_past(_SURE),
        )

    def _first_past(self, probability: float) -> int | None:
        past = (one for one in self.growths if one.past_knee_probability >= probability)
        first_growth = next(past, None)
        return first_growth.before.num_ranks if first_growth is not None else None


def compute_scaling(
    chosen: Sequence[Candidate], *, device: str = "", without: Sequence[int] = ()
) -> Scaling:
    """Return the curve over given layouts, one for each number of GPUs, fewest first.

    The batch may stay (strong scaling) or grow with the GPUs (weak scaling), as efficiency is that
    of tokens.
    """
    base = chosen[0]
    points = [
        ScalePoint(
            candidate=one,
            efficiency=replace(base.over(one), median=_gpu_time_s(base) / _gpu_time_s(one)),
        )
        for one in chosen
    ]
    return Scaling(
        device=device or base.config.device,
        points=tuple(points),
        growths=tuple(_growth(before, after) for before, after in pairwise(points)),
        without=tuple(without),
    )


def best_on(num_ranks: int, plan: Plan, keep: LayoutConstraint | None = None) -> Candidate | None:
    """Return the fastest layout of a plan on ``num_ranks`` ranks that may fit; None if none does.

    The running layout counts if ``keep`` allows it.  On a machine without measurements, layouts
    that surely fit precede tight ones.
    """
    able = [
        one
        for one in plan.rows.values()
        if one.config.parallelism.num_ranks == num_ranks
        and one.verdict is not Verdict.DOES_NOT_FIT
        and (keep is None or keep.allows(one.config))
    ]
    by_time = sorted(able, key=lambda one: one.step_time_s)
    sure = (one for one in by_time if one.verdict is not Verdict.TIGHT or not plan.is_unmeasured)
    return next(sure, by_time[0] if by_time else None)


def _growth(before: ScalePoint, after: ScalePoint) -> Growth:
    cost, cost_after = _gpu_time_s(before.candidate), _gpu_time_s(after.candidate)
    factor = after.num_ranks / before.num_ranks * cost / cost_after
    parts, parts_after = _parts_s(before.candidate), _parts_s(after.candidate)
    names = [part for part in Part if part in parts or part in parts_after]
    return Growth(
        before=before,
        after=after,
        tokens=replace(before.candidate.over(after.candidate), median=factor),
        parts_frac={n: (parts_after.get(n, 0.0) - parts.get(n, 0.0)) / cost for n in names},
    )


def _gpu_time_s(estimate: StepEstimate) -> float:
    """Return the GPU-seconds per sample."""
    config = estimate.config
    return estimate.time_s * config.parallelism.num_ranks / config.batch.global_batch_size


def _parts_s(estimate: StepEstimate) -> dict[Part, float]:
    """Return the GPU-seconds per sample by part; they add up to ``_gpu_time_s``."""
    factor = _gpu_time_s(estimate) / sum(estimate.parts_s.values())
    return {part: factor * time_s for part, time_s in estimate.parts_s.items()}
