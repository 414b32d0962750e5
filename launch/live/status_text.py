"""Where a run is now, in words."""

from __future__ import annotations

from datetime import datetime

from ...calib.records import action_text, iso_time
from ...calib.units import format_time
from .run_status import RunStatus, State


def status_lines(found: RunStatus) -> list[str]:
    """A line for each thing that is known of a run, the first with its name."""
    words = [
        f"run {found.run_id}: {found.state.value}",
        _progress(found),
        _step(found),
        _ends(found),
        _decision(found, has_reason=True),
        found.drift or "no drift",
        _heard(found),
    ]
    return [text for text in words if text]


def status_line(found: RunStatus) -> str:
    """One line on one of several launches."""
    words = [
        f"{found.launch_id or found.run_id}: {found.state.value}",
        _progress(found),
        _step(found),
        _ends(found),
        _decision(found),
        found.drift,
        _heard(found),
    ]
    return " · ".join(text for text in words if text)


def _progress(found: RunStatus) -> str:
    if found.iteration is None:
        return "no step yet" if found.state is State.LIVE else "no step"
    total = found.steps_total
    share = f" of {total} ({100 * min(1.0, found.iteration / total):.0f} %)" if total else ""
    step = "last heard at step" if found.state is State.LOST else "step"
    return f"{step} {found.iteration}{share}"


def _step(found: RunStatus) -> str:
    if found.step_time_s is None:
        return ""
    text = f"{format_time(found.step_time_s)} per step"
    if found.step_low_s is None or found.step_high_s is None:
        return text
    ends = f"{format_time(found.step_low_s)} to {format_time(found.step_high_s)}"
    return f"{text} (90 % of steps: {ends})"


def _ends(found: RunStatus) -> str:
    if found.finish_p50_unix_s is None:
        return "no forecast yet" if found.state is State.LIVE else ""
    text = f"ends {iso_time(found.finish_p50_unix_s)}{_here(found.finish_p50_unix_s)}"
    if found.finish_p95_unix_s is None:
        return text
    return f"{text}, by {iso_time(found.finish_p95_unix_s)} with 95 %"


def _here(unix_s: float) -> str:
    """The same moment by the clock of this machine."""
    try:
        return f" ({datetime.fromtimestamp(unix_s).astimezone():%a %H:%M %Z} here)"
    except (ValueError, OverflowError, OSError):
        return ""


def _decision(found: RunStatus, *, has_reason: bool = False) -> str:
    if found.decision is None:
        return f"stopped: {found.reason}" if found.reason else ""
    reason = f" ({found.reason})" if has_reason and found.reason else ""
    return f"decision: {action_text(found.decision)}{reason}"


def _heard(found: RunStatus) -> str:
    return "" if found.age_s is None else f"heard {_ago(found.age_s)} ago"


def _ago(age_s: float) -> str:
    """Whole seconds, minutes, hours or days.

    >>> _ago(2.4), _ago(200.0), _ago(9000.0), _ago(400_000.0)
    ('2 s', '3 min', '2 h', '4 d')
    """
    for unit_s, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if age_s >= 2 * unit_s:
            return f"{age_s // unit_s:.0f} {unit}"
    return f"{age_s:.0f} s"
