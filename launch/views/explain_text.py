"""Text of comparisons of two layouts or two runs: sentence, terms, and steps in between."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ...calib.advice import explanation as explain
from ...calib.advice.explanation import Change
from ...calib.fit.estimates import Source
from ...calib.timeline.terms import TERM_TEXTS, Term
from ...calib.units import format_count, format_frac, format_time
from .table import COLUMNS, Part, ReportTable, markdown_rows, text_of, wrapped

if TYPE_CHECKING:
    from ...calib.differences.levels import Difference, Side, TermChange

_CHOICE, _MOST_TERMS = 29, 10
_SMALL_FRAC = 0.005
"""Fraction of the longer step below which terms share a row."""
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_ENDS = 4
"""Digits of a time; more would exceed the precision of the intervals."""
_BOTH = ("first_s", "second_s")
_SHOWN = "*"
_KEY = f"{_SHOWN} a larger change than noise would show in any row"
_SPECIAL = re.compile(r"([\\|`*_<>\[\]#])")


class Scale:
    """Common unit for all times of an answer."""

    def __init__(self, most_s: float) -> None:
        self.unit_s, self.name = next((u for u in _UNITS if most_s >= u[0]), _UNITS[-1])
        self._decimals = max(0, _ENDS - len(str(int(most_s / self.unit_s))))

    def text(self, time_s: float, *, is_signed: bool = False) -> str:
        """Return a time without its unit; 0 has no sign."""
        text = f"{time_s / self.unit_s:.{self._decimals}f}"
        text = f"{0:.{self._decimals}f}" if float(text) == 0 else text
        return f"+{text}" if is_signed and float(text) > 0 else text

    def ends(self, low_s: float, high_s: float, *, is_signed: bool = False) -> str:
        """Return an interval."""
        low, high = (self.text(end, is_signed=is_signed) for end in (low_s, high_s))
        return f"{low} to {high}"


def explanation_parts(explanation: explain.Explanation) -> Iterator[Part]:
    """Yield the explanation of a step, or of a difference, within 80 columns."""
    yield explanation.sentence
    yield ""
    one, against = explanation.one, explanation.difference
    sides = [one] if against is None else [against.one, against.other]
    if against is not None:
        yield from (f"{letter}: {side.label}" for letter, side in zip("AB", sides, strict=True))
        if abs(against.level - 1.0) >= _SMALL_FRAC:
            frac = format_frac(against.level - 1.0, signed=True)
            yield f"Terms of both are {frac} against their models: what the run as a whole"
            yield "takes beyond them, or less, explains no difference."
        yield ""
    longest_s = max(side.estimate.time_s for side in sides)
    scale = Scale(longest_s)
    terms = one.terms if against is None else against.terms
    times = [{term.term: term.time_s for term in side.terms} for side in sides]
    large = [
        term
        for term in terms
        if max(abs(side.get(term.term, 0.0)) for side in times) >= _SMALL_FRAC * longest_s
    ]
    yield _terms(explanation, scale, large, times)
    if against is not None and len(against.walk.changes) > 1:
        yield ""
        yield _way(against, scale)


def _terms(
    explanation: explain.Explanation,
    scale: Scale,
    large: Sequence[explain.TermTime],
    times: Sequence[Mapping[Term, float]],
) -> ReportTable:
    """Return a row for each large term, one for all else, and their sum."""
    one, against = explanation.one, explanation.difference
    is_signed, total_s = against is not None, one.estimate.time_s
    small = [t for t in (against or one).terms if t not in large]

    def row(name: str, sides: Sequence[float], moved_s: float, ends: str, rests: str) -> None:
        share = scale.text(moved_s, is_signed=True) if is_signed else format_frac(moved_s / total_s)
        rows.append((name, *map(scale.text, sides), share, ends, rests))

    rows: list[tuple[str, ...]] = []
    for term in large:
        sides = [side.get(term.term, 0.0) for side in times]
        ends = scale.ends(term.low_s, term.high_s, is_signed=is_signed)
        row(TERM_TEXTS[term.term], sides, term.time_s, ends, _provenance(term.source_frac))
    if small:
        sides = [sum(side.get(t.term, 0.0) for t in small) for side in times]
        row("all else", sides, sum(t.time_s for t in small), "", "")
    steps = [one.estimate] if against is None else [one.estimate, against.other.estimate]
    whole = one.estimate if against is None else against
    ends = scale.ends(whole.low_s, whole.high_s, is_signed=is_signed)
    row("step", [step.time_s for step in steps], whole.time_s, ends, "")
    time_columns = ("A", "B", "A - B") if is_signed else ("time", "share")
    columns = ("term", *time_columns, "90 %", "rests on")
    title = f"Where the step{'s differ' if is_signed else ' goes'}, {scale.name}"
    return ReportTable(key="terms", title=title, columns=columns, rows=tuple(rows))


def _way(difference: explain.Difference, scale: Scale) -> ReportTable:
    alone = {change.axes: change for change in difference.walk.alone}

    def moved(change: Change | None) -> str:
        return scale.text(change.change_s, is_signed=True) if change else "cannot run"

    rows = [
        (
            _named(change),
            scale.text(change.step_time_s),
            moved(change),
            scale.ends(change.low_s, change.high_s, is_signed=True),
            moved(alone.get(change.axes)),
        )
        for change in difference.walk.changes
    ]
    title = f"From B to A, one choice after another, {scale.name}"
    columns = ("choice", "step", "change", "90 %", "alone")
    return ReportTable(key="way", title=title, columns=columns, rows=tuple(rows))


def _named(change: Change) -> str:
    """Return the text of a change; only the new values if it is long."""
    if len(change.text) < _CHOICE:
        return change.text
    after = zip(change.axes, change.after, strict=True)
    text = ", ".join(f"{axis} {value}".rstrip() for axis, value in after)
    return text if len(text) < _CHOICE else f"{text[: _CHOICE - 4]}..."


def _provenance(shares: Mapping[Source, float]) -> str:
    """Return the largest source, with its percentage unless the others are negligible."""
    source, share = max(shares.items(), key=lambda pair: pair[1], default=(None, 0.0))
    if source is None or not share:
        return ""
    return source.value if share > 0.995 else f"{source.value} {share * 100:.0f} %"


def difference_lines(difference: Difference) -> Iterator[str]:
    """Yield the comparison of two runs, within 80 columns."""
    for name, side in (("A", difference.first), ("B", difference.second)):
        yield from wrapped(f"{name}: {_side(side)}", "   ")
    yield ""
    for text in _sentences(difference):
        yield from wrapped(text)
    if (table := _changes(difference)) is not None:
        yield ""
        yield from text_of([table], COLUMNS).splitlines()
        if any(row[-1] for row in table.rows):
            yield _KEY


def difference_markdown(difference: Difference) -> Iterator[str]:
    """Yield the comparison as Markdown for a pull-request comment, with the terms collapsed."""
    settings, verdict, *more = (
        _sentences(difference) if difference.settings else ("", *_sentences(difference))
    )
    yield f"**forerun diff**: {_escaped(verdict)}"
    yield ""
    sides = (f"A: {_side(difference.first)}", f"B: {_side(difference.second)}")
    yield from (f"- {_escaped(text)}" for text in (settings, *more, *sides) if text)
    if (table := _changes(difference)) is not None:
        rows = [[*map(_escaped, row)] for row in table.rows]
        yield from ("", f"<details><summary>{table.title}</summary>", "")
        yield from markdown_rows(table.columns, rows)
        yield from ("", _escaped(_KEY), "", "</details>")


def _sentences(difference: Difference) -> list[str]:
    """Return settings that differ, verdict, main terms, and slow ranks."""
    sides = (("A", difference.first.slow), ("B", difference.second.slow))
    main = f"mainly: {difference.main}" if difference.main else ""
    slow = [f"{name}: {text}" for name, text in sides if text]
    return [text for text in (difference.settings_text, difference.sentence, main, *slow) if text]


def _side(side: Side) -> str:
    number = len(side.windows)
    windows = "window" if number == 1 else "windows"
    ranks = "1 rank" if side.num_ranks == 1 else f"{side.num_ranks} ranks"
    rate = "" if side.tokens_per_s is None else f" · {format_count(side.tokens_per_s)} tokens/s"
    return (
        f"{side.run_id} · {ranks} of {side.device} · {side.num_steps} steps in "
        f"{number} {windows} · step {format_time(side.step_time_s)}{rate}"
    )


def _changes(difference: Difference) -> ReportTable | None:
    """Return a row for each large term, the largest change first, and then the sum.

    None if the runs cannot be compared.
    """
    # Slow to import, and needed only here.
    from ...calib.differences.levels import Verdict
    from ...calib.differences.terms import ALL_ELSE

    if difference.verdict is Verdict.NOT_COMPARABLE:
        return None
    totals_s = [sum(getattr(t, name) for t in difference.terms) for name in _BOTH]
    scale, least_s = Scale(max(totals_s)), _SMALL_FRAC * max(totals_s)
    named = [t for t in difference.terms if t.name != ALL_ELSE]
    large = [t for t in named if max(abs(t.first_s), abs(t.second_s)) >= least_s]
    large = sorted(large, key=lambda term: -abs(term.change.value))[:_MOST_TERMS]
    rest = [term for term in difference.terms if term not in large]
    rest_s = [sum(getattr(term, name) for term in rest) for name in _BOTH]

    def row(name: str, first_s: float, second_s: float) -> tuple[str, ...]:
        moved = scale.text(second_s - first_s, is_signed=True)
        return name, scale.text(first_s), scale.text(second_s), moved, "", ""

    def moved(term: TermChange) -> tuple[str, ...]:
        change, head = term.change, row(term.name, term.first_s, term.second_s)[:3]
        ends = scale.ends(change.low, change.high, is_signed=True)
        mark = _SHOWN if change.is_shown else ""
        return *head, scale.text(change.value, is_signed=True), ends, mark

    sums = (row(ALL_ELSE, *rest_s), row("step", *totals_s))
    per = "1,000 tokens" if difference.per_tokens else "step"
    return ReportTable(
        key="changes",
        title=f"Where the time goes, {scale.name} per {per}",
        columns=("term", "A", "B", "B - A", "90 %", ""),
        rows=(*map(moved, large), *sums, *map(moved, difference.ranks)),
    )


def _escaped(text: str) -> str:
    """Return a text escaped for Markdown.

    >>> _escaped("a|b * c")
    'a\\\\|b \\\\* c'
    """
    return _SPECIAL.sub(r"\\\1", text)
