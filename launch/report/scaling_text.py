"""What more GPUs bring, for people: bars, and sentences on the knee and on causes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...calib.advice import TRUSTED_FACTOR, Growth, Scaling
from ...calib.timeline import PART_TEXTS

_BAR = 32
"""Characters of an efficiency of 1: with its words in 80 columns."""
_MOST_CAUSES = 3
_WORTH_SAYING_FRAC = 0.01
"""Of the GPU time of a token: less is not named."""
TOO_FAR = "too far to trust"


def scaling_text(curves: Sequence[Scaling]) -> str:
    """Bars of efficiency and sentences, as ``plan`` prints them below the table of plans; of the
    curves of several devices, which may have a single number of GPUs."""
    parts = ["\n".join(bars(curves))] if any(one.growths for one in curves) else []
    return "\n\n".join([*parts, "\n".join(scaling_lines(curves))])


def bars(curves: Sequence[Scaling]) -> Iterator[str]:
    """Efficiency against the smallest number of GPUs as bars, a line for each."""
    most = max(point.efficiency_frac for one in curves for point in one.points)
    for one in curves:
        yield f"efficiency, {one.device}" if len(curves) > 1 else "efficiency"
        knee = one.knee.num_ranks
        for point in one.points:
            bar = "█" * max(1, round(_BAR * point.efficiency_frac / max(1.0, most)))
            low, high = point.efficiency_low_frac, point.efficiency_high_frac
            ends = f" ({_points(low)} to {_points(high)})" if point is not one.points[0] else ""
            mark = " <- knee" if point.num_ranks == knee else ""
            yield f"{point.num_ranks:>9,} {bar} {_points(point.efficiency_frac)} %{ends}{mark}"


def scaling_lines(curves: Sequence[Scaling]) -> Iterator[str]:
    """Knee, causes and limits of trust of each curve, and devices beside each other."""
    for one in curves:
        head = f"{one.device}: " if len(curves) > 1 else ""
        if len(one.points) > 1:
            yield head + knee_line(one)
        yield from (head + growth_line(growth) for growth in one.growths if _causes(growth))
        far = [f"{point.num_ranks:,}" for point in one.points if not point.is_trusted]
        if far:
            yield (
                f"{head}{TOO_FAR}: {', '.join(far)} GPUs, where the 90 % interval of the step "
                f"spans more than a factor of {TRUSTED_FACTOR:g}"
            )
        if one.without:
            counts = ", ".join(f"{num:,}" for num in one.without)
            yield f"{head}no layout fits on {counts} GPUs"
    for other in curves[1:]:
        yield from _beside(curves[0], other)


def knee_line(found: Scaling) -> str:
    """Where more GPUs mostly wait, with the interval of that number."""
    knee, last = found.knee, found.points[-1].num_ranks
    if knee.num_ranks is None:
        maybe = f"; it may be at {knee.low_num_ranks:,}" if knee.low_num_ranks else ""
        return (
            f"no knee up to {last:,} GPUs: each doubling of GPUs gives more than 1.41 times the "
            f"tokens/s{maybe}"
        )
    low, high = knee.low_num_ranks or knee.num_ranks, knee.high_num_ranks
    ends = f"90 %: {low:,} to {high:,}" if high else f"90 %: {low:,} to beyond {last:,}"
    if low == high:
        ends = "with 90 % confidence"
    return (
        f"knee at {knee.num_ranks:,} GPUs ({ends}): beyond it, doubling the GPUs gives less than "
        "1.41 times the tokens/s"
    )


def growth_line(growth: Growth) -> str:
    """What more GPUs yield, and which parts take GPU time from a token for it."""
    before, after = growth.before.num_ranks, growth.after.num_ranks
    factor, low, high = growth.tokens_factor
    text = (
        f"{before:,} to {after:,} GPUs give {factor:.2f} times the tokens/s (90 %: {low:.2f} to "
        f"{high:.2f})"
    )
    causes = _causes(growth)
    return f"{text}; each token costs more GPU time in {', '.join(causes)}" if causes else text


def _causes(growth: Growth) -> list[str]:
    """In points of the GPU time of a token before, the largest first."""
    sums: dict[str, float] = {}
    for part, frac in growth.parts_frac.items():
        sums[PART_TEXTS[part]] = sums.get(PART_TEXTS[part], 0.0) + frac
    grown = sorted((-frac, word) for word, frac in sums.items() if frac >= _WORTH_SAYING_FRAC)
    return [f"{word} (+{_points(-frac)} %)" for frac, word in grown[:_MOST_CAUSES]]


def _beside(one: Scaling, other: Scaling) -> Iterator[str]:
    """Tokens/s of another device over those of the first, on the least and the most GPUs that both
    have."""
    theirs = {point.num_ranks: point for point in other.points}
    both = [point for point in one.points if point.num_ranks in theirs]
    for point in both[:1] + both[1:][-1:]:
        ratio, low, high = theirs[point.num_ranks].over(point)
        yield (
            f"{other.device} against {one.device} on {point.num_ranks:,} GPUs: {ratio:.2f} times "
            f"the tokens/s (90 %: {low:.2f} to {high:.2f})"
        )


def _points(frac: float) -> str:
    return f"{frac * 100:.0f}"
