"""What more GPUs bring: best step at each number of them, efficiency, the knee, and what bends it.

Each number of ranks has a plan of its own, whose best layout stands for it; the step model is asked
once for all of those, so that errors which two sizes share cancel in their ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import ClassVar

from ..arguments import Keep
from ..forecast import Throughput, throughput
from ..memory import Verdict
from ..regressors import Z_90
from ..steps import FittedSteps, StepEstimate, paired_sigma_log
from ..timeline import Part
from ..workload import Encoded, RunConfig
from .planning import Candidate, Plan

KNEE_SHARE = 0.5
"""Growth of tokens/s over growth of the number of GPUs, both in doublings, below which the knee
is passed: there the ratio of efficiency to time is greatest (Eager, Zahorjan and Lazowska 1989,
Speedup versus efficiency in parallel systems).  A doubling of GPUs is then worth a factor 1.41."""
TRUSTED_FACTOR = 2.0
"""From the lower to the upper end of a 90 % interval; beyond, neither end tells anything."""
_WORTH_SAYING_FRAC = 0.005
"""What rounds to one point of a hundred."""
_SURE = 0.95
"""Each side of a 90 % interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePoint(Encoded):
    """The best layout on one number of GPUs."""

    JSON: ClassVar[str] = (
        "num_ranks global_batch_size=config.batch.global_batch_size efficiency_frac "
        "efficiency_low_frac efficiency_high_frac is_trusted tokens_low_per_s "
        "tokens_high_per_s layout=candidate"
    )

    estimate: StepEstimate
    candidate: Candidate
    efficiency_frac: float
    """Tokens/s of a GPU over those of the smallest number of GPUs."""
    efficiency_low_frac: float
    efficiency_high_frac: float
    """90 %, paired: what both sizes share has cancelled."""

    @property
    def config(self) -> RunConfig:
        """The layout."""
        return self.estimate.config

    @property
    def num_ranks(self) -> int:
        """GPUs."""
        return self.config.parallelism.num_ranks

    @property
    def throughput(self) -> Throughput:
        """At the median step."""
        return throughput(self.config, self.estimate.time_s)

    @property
    def tokens_low_per_s(self) -> float:
        """Lower end of the 90 % interval of tokens/s."""
        return throughput(self.config, self.estimate.high_s).tokens_per_s

    @property
    def tokens_high_per_s(self) -> float:
        """Upper end of it."""
        return throughput(self.config, self.estimate.low_s).tokens_per_s

    @property
    def is_trusted(self) -> bool:
        """False where the interval of the step exceeds a factor of two: too far to trust."""
        return self.estimate.high_s <= TRUSTED_FACTOR * self.estimate.low_s

    def over(self, other: ScalePoint) -> tuple[float, float, float]:
        """Tokens/s over those of another device, with the ends of the 90 % interval.

        Two devices have models of their own, so that their errors do not cancel.
        """
        ratio = self.throughput.tokens_per_s / other.throughput.tokens_per_s
        spread = math.exp(Z_90 * math.hypot(self.estimate.sigma_log, other.estimate.sigma_log))
        return ratio, ratio / spread, ratio * spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth(Encoded):
    """From one number of GPUs to the next."""

    JSON: ClassVar[str] = (
        "from_num_ranks=before.num_ranks to_num_ranks=after.num_ranks yield_share yield_low "
        "yield_high past_knee_probability parts_frac"
    )

    before: ScalePoint
    after: ScalePoint
    yield_share: float
    """Growth of tokens/s over growth of the number of GPUs, both in doublings: 1 where all that was
    added works, 0 where nothing of it does."""
    yield_low: float
    yield_high: float
    """90 %, paired."""
    past_knee_probability: float
    """That ``yield_share`` is below ``KNEE_SHARE``."""
    parts_frac: Mapping[Part, float]
    """What each part adds to the GPU time of a token, over all of that before; they add up to
    efficiency before over efficiency after, minus one."""

    @property
    def tokens_factor(self) -> tuple[float, float, float]:
        """What tokens/s grow by, with the ends of the 90 % interval."""
        gpus = self.after.num_ranks / self.before.num_ranks
        return gpus**self.yield_share, gpus**self.yield_low, gpus**self.yield_high

    @property
    def bends(self) -> tuple[Part, ...]:
        """Parts that cost more GPU time of a token than before, those that grew most first."""
        grown = [part for part, frac in self.parts_frac.items() if frac >= _WORTH_SAYING_FRAC]
        return tuple(sorted(grown, key=lambda part: -self.parts_frac[part]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee(Encoded):
    """The number of GPUs from which on more of them mostly wait: None where none was reached."""

    num_ranks: int | None
    low_num_ranks: int | None
    """The earliest that it may lie at, with 95 %."""
    high_num_ranks: int | None
    """The latest, with 95 %; None: beyond what was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling(Encoded):
    """The curve of one device, fewest GPUs first."""

    JSON: ClassVar[str] = "device is_weak knee points growths without"

    device: str
    points: tuple[ScalePoint, ...]
    growths: tuple[Growth, ...]
    without: tuple[int, ...] = ()
    """Numbers of GPUs on which no layout fits, or none divides the batch."""

    @property
    def is_weak(self) -> bool:
        """True where the batch grows with the GPUs."""
        return len({point.config.batch.global_batch_size for point in self.points}) > 1

    @property
    def knee(self) -> Knee:
        """The last number of GPUs whose next step is worth its GPUs.

        Of the median and of the two ends of the 90 % interval: the first growth that is past the
        knee with at least 50 %, 5 % and 95 %.  Numbers too far to trust are counted like others.
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
    chosen: Sequence[Candidate], steps: FittedSteps, *, device: str = ""
) -> Scaling:
    """The curve over given layouts, one for each number of GPUs, fewest first.

    The batch may stay (strong scaling) or grow with the GPUs (weak scaling): efficiency is that of
    tokens.
    """
    estimates = steps.estimates([one.config for one in chosen])
    points = [
        _point(estimate, estimates[0], candidate)
        for estimate, candidate in zip(estimates, chosen, strict=True)
    ]
    return Scaling(
        device=device or estimates[0].config.device,
        points=tuple(points),
        growths=tuple(_growth(before, after) for before, after in pairwise(points)),
    )


def best_on(num_ranks: int, plan: Plan, keep: Keep | None = None) -> Candidate | None:
    """The fastest layout of a plan on so many ranks that may fit; None where none does.

    The running layout counts where ``keep`` allows it.  Of a machine that nothing was measured on
    one that surely fits goes before those that are tight.
    """
    able = [
        one
        for one in (*plan.candidates, plan.running)
        if one.config.parallelism.num_ranks == num_ranks
        and one.verdict is not Verdict.DOES_NOT_FIT
        and (keep is None or keep.allows(one.config))
    ]
    by_time = sorted(able, key=lambda one: one.step_time_s)
    sure = (one for one in by_time if one.verdict is not Verdict.TIGHT or not plan.is_unmeasured)
    return next(sure, by_time[0] if by_time else None)


def _point(estimate: StepEstimate, smallest: StepEstimate, candidate: Candidate) -> ScalePoint:
    ratio = _gpu_time_s(smallest) / _gpu_time_s(estimate)
    spread = math.exp(Z_90 * paired_sigma_log(estimate, smallest))
    return ScalePoint(
        estimate=estimate,
        candidate=candidate,
        efficiency_frac=ratio,
        efficiency_low_frac=ratio / spread,
        efficiency_high_frac=ratio * spread,
    )


def _growth(before: ScalePoint, after: ScalePoint) -> Growth:
    doublings = math.log(after.num_ranks / before.num_ranks)
    cost, cost_after = _gpu_time_s(before.estimate), _gpu_time_s(after.estimate)
    share = 1.0 - math.log(cost_after / cost) / doublings
    sigma = paired_sigma_log(after.estimate, before.estimate) / doublings
    parts, parts_after = _parts_s(before.estimate), _parts_s(after.estimate)
    names = [part for part in Part if part in parts or part in parts_after]
    return Growth(
        before=before,
        after=after,
        yield_share=share,
        yield_low=share - Z_90 * sigma,
        yield_high=share + Z_90 * sigma,
        past_knee_probability=_chance_below(share, sigma),
        parts_frac={n: (parts_after.get(n, 0.0) - parts.get(n, 0.0)) / cost for n in names},
    )


def _chance_below(share: float, sigma: float) -> float:
    if sigma <= 0:
        return float(share < KNEE_SHARE)
    return NormalDist().cdf((KNEE_SHARE - share) / sigma)


def _gpu_time_s(estimate: StepEstimate) -> float:
    """GPU-seconds of a sample."""
    config = estimate.config
    return estimate.time_s * config.parallelism.num_ranks / config.batch.global_batch_size


def _parts_s(estimate: StepEstimate) -> dict[Part, float]:
    """GPU-seconds of a sample by part; they add up to ``_gpu_time_s``."""
    factor = _gpu_time_s(estimate) / sum(estimate.parts_s.values())
    return {part: factor * time_s for part, time_s in estimate.parts_s.items()}
