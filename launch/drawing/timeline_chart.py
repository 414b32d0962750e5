"""One step on one scale: each stage as predicted, and below it as measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...calib.timeline import MeasuredSpan, Span, TaskKind
from ...calib.units import format_time
from .axes import Scale, most_ticks, round_ticks, seconds_unit
from .canvas import Canvas, Drawing

NUM_SPANS = 700
"""Bars that are drawn at most, the longest."""
NUM_STAGES = 8
"""Stages that are drawn at most; of more, evenly spread ones."""
_KINDS = {
    TaskKind.FORWARD: ("forward", "blue"),
    TaskKind.BACKWARD: ("backward", "orange"),
    TaskKind.INPUT_GRADIENT: ("backward", "orange"),
    TaskKind.WEIGHT_GRADIENT: ("weight gradients", "amber"),
    TaskKind.EXCHANGE: ("messages", "grey"),
    TaskKind.TRANSFER: ("messages", "grey"),
    TaskKind.REDUCE: ("gradients and parameters", "green"),
    TaskKind.GATHER: ("gradients and parameters", "green"),
    TaskKind.OPTIMIZER: ("optimizer", "purple"),
    TaskKind.HOST: ("host", "grey"),
}
_LANE, _GAP, _TOP = 18, 12, 56
_STEPS = "predicted is the simulated step, measured is a single hooked one"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    kind: TaskKind
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lane:
    name: str
    bars: tuple[_Bar, ...]
    is_last: bool
    """Of its stage."""


def timeline_chart(
    predicted: Sequence[Span], measured: Sequence[MeasuredSpan], width: int
) -> Drawing | None:
    """Passes, messages, gradients and the optimizer of each stage; None where nothing is known.

    Of a stage's ranks the first is shown.
    """
    lanes = _lanes(predicted, measured)
    if not lanes:
        return None
    left = 128
    height = _TOP + sum(_LANE + 2 + _GAP * lane.is_last for lane in lanes) + 40
    canvas = Canvas(width, height)
    most_s = max(bar.end_s for lane in lanes for bar in lane.bars)
    factor, unit = seconds_unit(most_s)
    x = Scale(low=0.0, high=most_s, begin=left, end=width - 16)
    seen = {_KINDS[bar.kind] for lane in lanes for bar in lane.bars}
    names = [one for one in dict.fromkeys(_KINDS.values()) if one in seen]
    top = _TOP + canvas.legend((8, 16), names)
    least_s = _least_shown_s(lanes)
    y = float(top)
    for lane in lanes:
        canvas.text((left - 8, y + 13), lane.name, "faint", anchor="end")
        for bar in lane.bars:
            if bar.end_s - bar.start_s >= least_s:
                _draw(canvas, bar, x, y)
        y += _LANE + 2 + _GAP * lane.is_last
    for tick in round_ticks(0.0, most_s, most_ticks(x.end - left, "0.000"), factor=factor):
        at = x(tick.value)
        canvas.line((at, top - 4), (at, y - _GAP + 4), "grid")
        canvas.text((at, y + 8), tick.text, "faint", anchor="middle")
    canvas.text((width - 16, y + 26), f"time in the step, {unit}", "faint", anchor="end")
    return canvas.finished("One step, predicted and measured", _text(lanes))


def _draw(canvas: Canvas, bar: _Bar, x: Scale, y: float) -> None:
    name, hue = _KINDS[bar.kind]
    # A message goes beside the passes of its stage.
    is_message = name == "messages"
    top, high = (y + _LANE - 5, 4) if is_message else (y, _LANE)
    number = f" {bar.microbatch}" if bar.microbatch >= 0 else ""
    shown = f"{name}{number}: {format_time(bar.end_s - bar.start_s)}"
    size = (max(0.6, x(bar.end_s) - x(bar.start_s)), high)
    canvas.rect((x(bar.start_s), top), size, f"bar {hue}", shown=shown)


def _lanes(predicted: Sequence[Span], measured: Sequence[MeasuredSpan]) -> list[_Lane]:
    stages = sorted({span.stage for span in predicted} | {span.stage for span in measured})
    if len(stages) > NUM_STAGES:
        last = len(stages) - 1
        stages = [stages[round(place * last / (NUM_STAGES - 1))] for place in range(NUM_STAGES)]
    lanes = []
    for stage in stages:
        own = [span for span in measured if span.stage == stage]
        first = min((span.rank for span in own), default=None)
        kept = [span for span in own if span.rank == first]
        told = [
            _Bar(kind=s.kind, microbatch=s.microbatch, start_s=s.start_s, end_s=s.end_s)
            for s in predicted
            if s.stage == stage
        ]
        seen = [
            _Bar(kind=s.kind, microbatch=s.microbatch, start_s=s.start_s, end_s=s.end_s)
            for s in kept
        ]
        found = [(f"stage {stage} predicted", told), (f"rank {first} measured", seen)]
        found = [(name, bars) for name, bars in found if bars]
        lanes += [
            _Lane(name=name, bars=tuple(bars), is_last=place == len(found) - 1)
            for place, (name, bars) in enumerate(found)
        ]
    return lanes


def _least_shown_s(lanes: Sequence[_Lane]) -> float:
    lengths = sorted((bar.end_s - bar.start_s for lane in lanes for bar in lane.bars), reverse=True)
    return lengths[min(NUM_SPANS, len(lengths)) - 1]


def _text(lanes: Sequence[_Lane]) -> str:
    ends = [
        f"{lane.name}: {len(lane.bars)} parts, the last ends at "
        f"{format_time(max(bar.end_s for bar in lane.bars))}"
        for lane in lanes
    ]
    # Neither is the step that gains are held against, and readers compare the three.
    return "; ".join([_STEPS, *ends])
