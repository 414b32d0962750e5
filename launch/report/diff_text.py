"""Two runs held against each other, as lines of text and as Markdown for a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...calib.differences import ALL_ELSE, Difference, Side, TermChange, Verdict
from ...calib.units import format_count, format_time
from .explain_text import Scale, wrapped

_NAME, _MOST_TERMS = 26, 10
_SMALL_FRAC = 0.005
"""Of the longer step: smaller changes share the last row."""
_BOTH = ("first_s", "second_s")
_SHOWN = "*"
_KEY = f"{_SHOWN} a larger change than noise would show in any row"
_CELLS = ("A", "B", "B - A", "90 %", "")
_SPECIAL = re.compile(r"([\\|`*_<>\[\]#])")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    name: str
    cells: tuple[str, ...]
    """As ``_CELLS`` names them."""


def difference_lines(found: Difference) -> Iterator[str]:
    """Everything that is said, within 80 columns."""
    for name, side in (("A", found.first), ("B", found.second)):
        yield from wrapped(f"{name}: {_side(side)}", "   ")
    yield ""
    for text in _told(found):
        yield from wrapped(text)
    unit, rows = _rows(found)
    if not rows:
        return
    yield ""
    yield f"{unit:{_NAME}}{'A':>9}{'B':>9}{'B - A':>10}   90 %"
    for row in rows:
        first, second, moved, ends, mark = row.cells
        yield f"{row.name:{_NAME}}{first:>9}{second:>9}{moved:>10}   {ends} {mark}".rstrip()
    if any(row.cells[-1] for row in rows):
        yield _KEY


def difference_markdown(found: Difference) -> Iterator[str]:
    """The same for a comment on a pull request; the terms are folded away."""
    settings, verdict, *more = _told(found) if found.settings else ("", *_told(found))
    yield f"**forerun diff**: {_escaped(verdict)}"
    yield ""
    for text in filter(None, (settings, *more)):
        yield f"- {_escaped(text)}"
    yield f"- A: {_escaped(_side(found.first))}"
    yield f"- B: {_escaped(_side(found.second))}"
    unit, rows = _rows(found)
    if not rows:
        return
    yield ""
    yield "<details><summary>Where the time goes</summary>"
    yield ""
    yield f"| {unit} | {' | '.join(_CELLS)} |"
    yield "| --- | ---: | ---: | ---: | ---: | --- |"
    for row in rows:
        yield f"| {' | '.join(map(_escaped, (row.name, *row.cells)))} |"
    yield ""
    yield _escaped(_KEY)
    yield ""
    yield "</details>"


def _told(found: Difference) -> list[str]:
    """Sentences: the settings that differ, the verdict, where the difference lies, who is slow."""
    sides = (("A", found.first.slow), ("B", found.second.slow))
    main = f"mainly: {found.main}" if found.main else ""
    slow = [f"{name}: {text}" for name, text in sides if text]
    return [text for text in (found.settings_text, found.sentence, main, *slow) if text]


def _side(side: Side) -> str:
    number = len(side.windows)
    windows = "window" if number == 1 else "windows"
    rate = "" if side.tokens_per_s is None else f" · {format_count(side.tokens_per_s)} tokens/s"
    return (
        f"{side.run_id} · {side.num_ranks} ranks of {side.device} · {side.num_steps} steps in "
        f"{number} {windows} · step {format_time(side.step_time_s)}{rate}"
    )


def _rows(found: Difference) -> tuple[str, list[_Row]]:
    """The unit, and a row for each term that matters, the largest change first; then the sum.

    No rows where the runs cannot be compared.
    """
    if found.verdict is Verdict.NOT_COMPARABLE:
        return "", []
    first_s, second_s = (sum(getattr(t, name) for t in found.terms) for name in _BOTH)
    scale = Scale(max(first_s, second_s))
    large, rest = _parted(found.terms, _SMALL_FRAC * max(first_s, second_s))
    rows = [_row(scale, term) for term in large]
    rest_s = [sum(getattr(term, name) for term in rest) for name in _BOTH]
    rows.append(_plain(scale, ALL_ELSE, *rest_s))
    rows.append(_plain(scale, "step", first_s, second_s))
    rows += [_row(scale, term) for term in found.ranks]
    per = "1,000 tokens" if found.per_tokens else "step"
    return f"{scale.name} per {per}", rows


def _parted(
    terms: Sequence[TermChange], least_s: float
) -> tuple[list[TermChange], list[TermChange]]:
    ordered = sorted(terms, key=lambda term: -abs(term.change.value))
    large = [
        term
        for term in ordered
        if term.name != ALL_ELSE and max(abs(term.first_s), abs(term.second_s)) >= least_s
    ][:_MOST_TERMS]
    return large, [term for term in terms if term not in large]


def _row(scale: Scale, term: TermChange) -> _Row:
    moved = term.change
    cells = (
        scale.text(term.first_s),
        scale.text(term.second_s),
        scale.text(moved.value, is_signed=True),
        scale.ends(moved.low, moved.high, is_signed=True),
        _SHOWN if moved.is_shown else "",
    )
    return _Row(name=term.name, cells=cells)


def _plain(scale: Scale, name: str, first_s: float, second_s: float) -> _Row:
    moved = scale.text(second_s - first_s, is_signed=True)
    return _Row(name=name, cells=(scale.text(first_s), scale.text(second_s), moved, "", ""))


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is.

    >>> _escaped("a|b * c")
    'a\\\\|b \\\\* c'
    """
    return _SPECIAL.sub(r"\\\1", text)
