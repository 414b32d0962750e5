"""The answer on two runs: what was set differently, which is slower, and where the time went."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from ..drift.causes import Cause, CauseKind
from ..units import format_time
from ..workload.config_json import Encoded
from .levels import Change, frac_text
from .settings import SettingChange

SCHEMA = 1


class Verdict(Enum):
    """Of the second run against the first."""

    SLOWER = "slower"
    FASTER = "faster"
    NO_DIFFERENCE = "no difference shown"
    NOT_COMPARABLE = "not comparable"


class Basis(Enum):
    """What the verdict is of."""

    STEP_TIME = "time per step"
    THROUGHPUT = "tokens/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side(Encoded):
    """One of the two runs."""

    run_id: str
    windows: tuple[int, ...]
    num_steps: int
    """Clean steps that its level is taken from."""
    num_ranks: int
    device: str
    step_time_s: float
    """Mean over windows of the median step, of logarithms."""
    tokens_per_s: float | None
    """Of all ranks; None where the run did not describe itself."""
    slow: str
    """Ranks or links that hold the others up in its newest window, in words; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermChange(Encoded):
    """One term of both runs, seconds per step or per 1,000 tokens."""

    JSON: ClassVar[str] = (
        "term=name first_s second_s change_s=change.value low_s=change.low high_s=change.high "
        "is_shown=change.is_shown"
    )

    name: str
    first_s: float
    second_s: float
    change: Change


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Encoded):
    """The second run held against the first."""

    JSON: ClassVar[str] = (
        "schema verdict basis sentence reason first second settings **fracs "
        "chance=step.chance per_tokens terms ranks causes"
    )
    schema: ClassVar[int] = SCHEMA

    first: Side
    second: Side
    settings: tuple[SettingChange, ...]
    basis: Basis
    reason: str
    """Why they cannot be compared; empty where they can."""
    step: Change
    """Of the logarithm of the time for the same tokens; of a step where tokens are not known."""
    terms: tuple[TermChange, ...]
    """They add up to the step, ``ALL_ELSE`` last."""
    per_tokens: int
    """What the terms are seconds of: so many tokens; 0: one step."""
    ranks: tuple[TermChange, ...]
    """Own work and waiting of single ranks, where they have changed."""
    causes: tuple[Cause, ...]

    @property
    def verdict(self) -> Verdict:
        """Which is slower, where they can be told apart."""
        if self.reason:
            return Verdict.NOT_COMPARABLE
        if not self.step.is_shown:
            return Verdict.NO_DIFFERENCE
        return Verdict.SLOWER if self.step.value > 0 else Verdict.FASTER

    def is_slower_by(self, frac: float) -> bool:
        """Whether the second is shown to be slower, by more than this share of the first's time."""
        return self.verdict is Verdict.SLOWER and math.expm1(self.step.value) > frac

    @property
    def settings_text(self) -> str:
        """What was set differently, the most telling first; empty where nothing was."""
        told = [one.text for one in self.settings]
        more = f" and {len(told) - 3} more settings" if len(told) > 3 else ""
        return f"B has {', '.join(told[:3])}{more}" if told else ""

    @property
    def sentence(self) -> str:
        """The verdict in words, of B against A."""
        if self.reason:
            return f"not comparable: {self.reason}"
        if not self.step.is_shown:
            least = frac_text(self.step.least)
            return f"no difference that these runs could show (below {least}) in {self._of}"
        # More tokens/s are the inverse of less time.
        sign = -1.0 if self.basis is Basis.THROUGHPUT else 1.0
        ends = sorted(abs(math.expm1(sign * end)) for end in (self.step.low, self.step.high))
        low, high = (f"{100 * end:.1f}" for end in ends)
        amount = frac_text(sign * self.step.value)
        return f"B is {self.verdict.value} by {amount} ({low} to {high}, 90 %) in {self._of}"

    @property
    def _of(self) -> str:
        return f"{self.basis.value}: {self._amount(self.first)} -> {self._amount(self.second)}"

    def _amount(self, side: Side) -> str:
        if self.basis is Basis.STEP_TIME or side.tokens_per_s is None:
            return format_time(side.step_time_s)
        return f"{side.tokens_per_s:,.0f}"

    @property
    def main(self) -> str:
        """Where most of a difference that was shown lies; empty where none was."""
        if self.verdict not in (Verdict.SLOWER, Verdict.FASTER):
            return ""
        known = [cause.text for cause in self.causes if cause.kind is not CauseKind.UNKNOWN]
        if known:
            return "; ".join(known)
        sign = math.copysign(1.0, self.step.value)
        along = [t for t in self.terms if t.change.is_shown and t.change.value * sign > 0]
        along.sort(key=lambda term: -abs(term.change.value))
        return ", ".join(f"{t.name} {_signed(t.change.value)}" for t in along[:3])

    @property
    def fracs(self) -> dict[str, float]:
        """The difference of the steps, its interval and what could be seen, as shares."""
        names = {
            "time_frac": "value",
            "low_frac": "low",
            "high_frac": "high",
            "least_frac": "least",
        }
        return {key: math.expm1(getattr(self.step, name)) for key, name in names.items()}


def _signed(time_s: float) -> str:
    return f"{'+' if time_s > 0 else '-'}{format_time(abs(time_s))}"
