"""An explanation as lines of text within 80 columns: a sentence, terms, bars, and the way there."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from ...calib.advice import Change, Difference, Explained, Explanation, TermTime
from ...calib.fit.estimates import Source
from ...calib.timeline import TERM_TEXTS
from ...calib.units import format_frac

WIDTH = 80
"""Of a usual terminal; the lines are the same wherever they go."""
_NAME, _BARS, _CHOICE = 17, 50, 29
_SMALL_FRAC = 0.005
"""Of the longer step: smaller terms share a row."""
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_UNIT = r"(?<=\d) (?=(?:s|ms|us|min|h)\b|%)"
"""The space between a number and its unit, where no line ends."""
_ENDS = 4
"""Digits of a time: what intervals leave to tell apart."""


def explanation_lines(found: Explanation) -> Iterator[str]:
    """Everything that is said, line by line."""
    yield from wrapped(found.sentence)
    yield ""
    if found.difference is None:
        yield from _of_one(found.one)
    else:
        yield from _of_two(found.difference)


def wrapped(text: str, indent: str = "") -> Iterator[str]:
    """A sentence as lines of at most ``WIDTH``, numbers beside their units."""
    held = re.sub(_UNIT, "\u00a0", text)
    lines = textwrap.wrap(held, WIDTH, break_on_hyphens=False, subsequent_indent=indent)
    yield from (line.replace("\u00a0", " ") for line in lines)


class Scale:
    """One unit for all times of an answer."""

    def __init__(self, most_s: float) -> None:
        self.unit_s, self.name = next((u for u in _UNITS if most_s >= u[0]), _UNITS[-1])
        whole = len(str(int(most_s / self.unit_s)))
        self._decimals = max(0, _ENDS - whole)

    def text(self, time_s: float, *, is_signed: bool = False) -> str:
        """A time without its unit; 0 has no sign."""
        text = f"{time_s / self.unit_s:.{self._decimals}f}"
        text = f"{0:.{self._decimals}f}" if float(text) == 0 else text
        return f"+{text}" if is_signed and float(text) > 0 else text

    def ends(self, low_s: float, high_s: float, *, is_signed: bool = False) -> str:
        """An interval."""
        low, high = (self.text(end, is_signed=is_signed) for end in (low_s, high_s))
        return f"{low} to {high}"


def _of_one(one: Explained) -> Iterator[str]:
    total_s = one.estimate.time_s
    scale = Scale(total_s)
    large, small = _parted(one.terms, _SMALL_FRAC * total_s)
    yield f"{'':{_NAME}}{scale.name:>9}{'share':>9}  {'90 %':<20}rests on"
    for term in large:
        share = format_frac(term.time_s / total_s)
        yield _line(term, [scale.text(term.time_s), share], scale.ends(term.low_s, term.high_s))
    if small:
        rest_s = sum(term.time_s for term in small)
        yield f"{'all else':{_NAME}}{scale.text(rest_s):>9}{format_frac(rest_s / total_s):>9}"
    ends = scale.ends(one.estimate.low_s, one.estimate.high_s)
    yield f"{'step':{_NAME}}{scale.text(total_s):>9}{format_frac(1.0):>9}  {ends}"
    yield ""
    yield from _bars([(TERM_TEXTS[t.term], t.time_s) for t in large], 0.0)


def _of_two(found: Difference) -> Iterator[str]:
    one, other = found.one, found.other
    longer_s = max(one.estimate.time_s, other.estimate.time_s)
    scale = Scale(longer_s)
    ours, theirs = ({t.term: t.time_s for t in side.terms} for side in (one, other))
    large = [
        t
        for t in found.terms
        if max(abs(ours.get(t.term, 0.0)), abs(theirs.get(t.term, 0.0))) >= _SMALL_FRAC * longer_s
    ]
    small = [term for term in found.terms if term not in large]
    yield f"A: {one.label}"
    yield f"B: {other.label}"
    yield ""
    yield f"{scale.name:{_NAME}}{'A':>8}{'B':>8}{'A - B':>9}  {'90 %':<18}rests on"
    for term in large:
        both = [scale.text(side.get(term.term, 0.0)) for side in (ours, theirs)]
        cells = [*both, scale.text(term.time_s, is_signed=True)]
        yield _line(term, cells, scale.ends(term.low_s, term.high_s, is_signed=True), wide=18)
    if small:
        sums = [sum(side.get(t.term, 0.0) for t in small) for side in (ours, theirs)]
        rest_s = sum(term.time_s for term in small)
        cells = [*map(scale.text, sums), scale.text(rest_s, is_signed=True)]
        yield f"{'all else':{_NAME}}{_cells(cells)}"
    cells = [
        scale.text(one.estimate.time_s),
        scale.text(other.estimate.time_s),
        scale.text(found.time_s, is_signed=True),
    ]
    ends = scale.ends(found.low_s, found.high_s, is_signed=True)
    yield f"{'step':{_NAME}}{_cells(cells)}  {ends}"
    yield ""
    yield from _bars([(TERM_TEXTS[t.term], t.time_s) for t in large], other.estimate.time_s)
    yield from _way(found, scale)


def _way(found: Difference, scale: Scale) -> Iterator[str]:
    way = found.walk
    if len(way.changes) < 2:
        return
    alone = {change.axes: change for change in way.alone}
    yield ""
    yield f"From B to A, one choice after another, in {scale.name}:"
    yield f"{'':{_CHOICE}}{'step':>9}{'change':>10}  {'90 %':<20}{'alone':>10}"
    for change in way.changes:
        by_itself = alone.get(change.axes)
        lone = scale.text(by_itself.change_s, is_signed=True) if by_itself else "cannot run"
        yield (
            f"{_named(change):{_CHOICE}}{scale.text(change.step_time_s):>9}"
            f"{scale.text(change.change_s, is_signed=True):>10}  "
            f"{scale.ends(change.low_s, change.high_s, is_signed=True):<20}{lone:>10}"
        )


def _named(change: Change) -> str:
    """What was changed, without what it was where both are long."""
    if len(change.text) < _CHOICE:
        return change.text
    after = zip(change.axes, change.after, strict=True)
    text = ", ".join(f"{axis} {value}".rstrip() for axis, value in after)
    return text if len(text) < _CHOICE else f"{text[: _CHOICE - 4]}..."


def _line(term: TermTime, cells: Sequence[str], ends: str, *, wide: int = 20) -> str:
    found = f"{TERM_TEXTS[term.term]:{_NAME}}{_cells(cells)}  {ends:<{wide}}"
    return f"{found}{_provenance(term.source_frac)}".rstrip()


def _cells(cells: Sequence[str]) -> str:
    widths = (9, 9) if len(cells) == 2 else (8, 8, 9)
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _provenance(shares: Mapping[Source, float]) -> str:
    """The largest share, with how much it is where others are not small."""
    source, share = max(shares.items(), key=lambda pair: pair[1], default=(None, 0.0))
    if source is None or not share:
        return ""
    return source.value if share > 0.995 else f"{source.value} {share * 100:.0f} %"


def _parted(terms: Sequence[TermTime], least_s: float) -> tuple[list[TermTime], list[TermTime]]:
    large = [term for term in terms if abs(term.time_s) >= least_s]
    return large, [term for term in terms if abs(term.time_s) < least_s]


def _bars(terms: Sequence[tuple[str, float]], start_s: float) -> Iterator[str]:
    """A waterfall of blocks: each bar begins where the one before it ended."""
    ends, at_s = [], start_s
    for _, time_s in terms:
        ends.append((at_s, at_s + time_s))
        at_s += time_s
    lows, highs = zip(*((min(pair), max(pair)) for pair in ends), strict=True)
    # Differences are drawn large: the axis begins where the lowest of them does.
    least_s = 0.0 if not start_s else min(lows)
    width_s = max(highs) - least_s or 1.0
    for (name, time_s), low_s, high_s in zip(terms, lows, highs, strict=True):
        begin = round(_BARS * (low_s - least_s) / width_s)
        end = max(begin + 1, round(_BARS * (high_s - least_s) / width_s))
        block = "-" if start_s and time_s < 0 else ("+" if start_s else "=")
        yield f"{name:{_NAME}}{' ' * begin}{block * (end - begin)}"
