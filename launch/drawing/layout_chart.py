"""Layouts by what they need and what they give: memory against the time of a step."""

from __future__ import annotations

from collections.abc import Sequence

from ...calib.advice import Candidate, Plan
from ...calib.memory import Verdict
from ...calib.units import GIB, MIB, format_bytes, format_time
from .axes import Scale, draw_axes, most_ticks, padded, round_ticks, seconds_unit
from .canvas import Canvas, Drawing, Point, text_width

_HEIGHT, _TOP, _BOTTOM = 340, 62, 44
_LEFT, _RIGHT = 60, 22
_RUNNING = "orange-dots large"
_KINDS = (("other layouts", "blue-dots large"), ("not offered", "grey-ring"))
_NEAR = 3.0
"""Capacity over the largest need: beyond it the line is not drawn."""


def layouts_chart(plan: Plan, rows: Sequence[Candidate], width: int) -> Drawing | None:
    """The running layout and ``rows`` of its plan, each by its number there; None without rows.

    An upright line is a 90 % interval; the broken one is where memory ends.
    """
    if not rows:
        return None
    own, capacity = plan.own, plan.memory_capacity_nbytes
    shown = (own, *rows)
    factor, unit = seconds_unit(max(one.step_time_s for one in shown))
    most_nbytes = max(one.memory.total_nbytes for one in shown)
    size, named = (GIB, "GiB") if most_nbytes >= GIB else (MIB, "MiB")
    needs = [one.memory.total_nbytes / size for one in shown]
    # Where memory is no question its end would press all layouts into a corner.
    is_near = capacity is not None and capacity < _NEAR * most_nbytes
    limit = capacity / size if capacity is not None and is_near else None
    canvas = Canvas(width, _HEIGHT)
    least, most = (0.0, 1.08 * max(*needs, limit)) if limit else padded(needs, 0.2)
    x = Scale(low=max(0.0, least), high=most, begin=_LEFT, end=width - _RIGHT)
    low, high = padded([s for one in shown for s in (one.low_s, one.high_s)])
    legend = [("running", _RUNNING)]
    legend += [pair for pair in _KINDS if any(_kind(plan, one) == pair[1] for one in rows)]
    if limit is not None:
        legend.append(("memory of a device", "limit"))
    top = _TOP + canvas.legend((_LEFT, 16), legend)
    y = Scale(low=max(0.0, low), high=high, begin=canvas.height - _BOTTOM, end=top)
    there = f" of {format_bytes(capacity)}" if capacity is not None and limit is None else ""
    draw_axes(
        canvas,
        x,
        y,
        (
            round_ticks(x.low, x.high, most_ticks(x.end - x.begin, "1,000")),
            round_ticks(y.low, y.high, 6, factor=factor),
        ),
        (f"memory that it needs, {named}{there}", f"time of a step, {unit}"),
    )
    if limit is not None:
        canvas.line((x(limit), y.begin), (x(limit), y.end), "limit")
    places = [(x(need), y(one.step_time_s)) for one, need in zip(shown, needs, strict=True)]
    names = ["running", *map(str, range(1, len(shown)))]
    spreads = [(y(one.high_s), y(one.low_s)) for one in shown]
    labels = label_places(places, names, width, spreads)
    for at, (high_y, low_y) in zip(places, spreads, strict=True):
        canvas.line((at[0], low_y), (at[0], high_y), "error")
    for one, at, name, label in zip(shown, places, names, labels, strict=True):
        kind = _kind(plan, one)
        if kind.endswith("-ring"):
            canvas.ring(at, 4, kind)
        else:
            canvas.dots([at], kind)
        if one is plan.best:
            canvas.ring(at, 9, "ring")
        canvas.text(label, name, "strong" * (one is plan.best), shown=_told(one))
    return canvas.finished("Layouts: memory against the time of a step", _text(plan, rows))


def _kind(plan: Plan, one: Candidate) -> str:
    if one is plan.own:
        return _RUNNING
    return _KINDS[1 if plan.obstacle(one) else 0][1]


def label_places(
    points: Sequence[Point],
    names: Sequence[str],
    width: int,
    spreads: Sequence[tuple[float, float]] = (),
) -> list[Point]:
    """Where each name stands beside its point: the first place of a few that no other takes.

    ``spreads`` are the ends of upright lines through the points: names lie on one only where there
    is no other place.
    """
    lines = [
        (x - 2, top, x + 2, bottom) for (x, _), (top, bottom) in zip(points, spreads, strict=False)
    ]
    taken: list[tuple[float, float, float, float]] = [
        (x - 5, y - 5, x + 5, y + 5) for x, y in points
    ]
    found = []
    for (x, y), name in zip(points, names, strict=True):
        wide = text_width(name)
        tried = [(x + 11, y + 4), (x - 11 - wide, y + 4)]
        tried += [(x - wide / 2, y + rise) for rise in (-12, 20, -26, 34, -40, 48)]
        boxes = [(at[0], at[1] - 11, at[0] + wide, at[1] + 2) for at in tried]
        free = [
            place
            for place, box in enumerate(boxes)
            if box[0] >= 0 and box[2] <= width and not any(_meets(box, one) for one in taken)
        ]
        clear = [place for place in free if not any(_meets(boxes[place], one) for one in lines)]
        best = next(iter([*clear, *free]), 0)
        taken.append(boxes[best])
        found.append(tried[best])
    return found


def _meets(
    one: tuple[float, float, float, float], other: tuple[float, float, float, float]
) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _told(one: Candidate) -> str:
    return (
        f"{one.label}: {format_time(one.step_time_s)} ({format_time(one.low_s)} to "
        f"{format_time(one.high_s)}), {format_bytes(one.memory.total_nbytes)}"
    )


def _text(plan: Plan, rows: Sequence[Candidate]) -> str:
    own, best = plan.own, plan.best
    text = f"The running layout {own.label} takes {format_time(own.step_time_s)} per step"
    if best is None or best not in rows:
        misfits = sum(one.verdict is Verdict.DOES_NOT_FIT for one in rows)
        text += f"; none of these {len(rows)} others is offered"
        return f"{text}, {misfits} do not fit" if misfits else text
    return (
        f"{text}; number {rows.index(best) + 1}, {best.label}, is the best that is offered: "
        f"{format_time(best.step_time_s)}, {best.change_text}, in "
        f"{format_bytes(best.memory.total_nbytes)}"
    )
