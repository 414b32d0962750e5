"""A drift event: the change, its causes once a window has shown them, its line of the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..samples.table import SampleTable, only_windows
from ..units import format_frac, format_time
from ..workload.config_json import Encoded
from .causes import Cause, causes, group_causes
from .monitor import Drift, DriftKind

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftEvent(Encoded):
    """A change of the step, or, without ``drift``, of groups that the step hides."""

    JSON: ClassVar[str] = "run_id unix_s iteration kind causes line **drift"

    run_id: str
    unix_s: float
    iteration: int
    drift: Drift | None = None
    causes: tuple[Cause, ...] = ()
    """Empty until a window has been compared with the one before."""

    @property
    def line(self) -> str:
        """One line of the log.

        >>> from forerun.calib.drift.monitor import Drift, DriftKind
        >>> found = Drift(kind=DriftKind.SLOWER, iteration=1208, since_iteration=1200,
        ...     before_s=1.84, after_s=2.12, probability=1.0)
        >>> DriftEvent(run_id="r", unix_s=0.0, iteration=1208, drift=found).line
        'drift: a step takes 2.120 s since iteration 1200, 15.2 % more than before (1.840 s)'
        """
        if self.drift is None:
            return f"drift of transfers, seen at iteration {self.iteration}: {self._why}"
        found = self.drift
        what = "recovered" if found.kind is DriftKind.RECOVERED else "drift"
        side = "more" if found.change_frac >= 0 else "less"
        text = (
            f"{what}: a step takes {format_time(found.after_s)} since iteration "
            f"{found.since_iteration}, {format_frac(abs(found.change_frac))} {side} than before "
            f"({format_time(found.before_s)})"
        )
        return f"{text}; {self._why}" if self.causes else text

    @property
    def _why(self) -> str:
        return "; ".join(cause.text for cause in self.causes)

    @property
    def kind(self) -> str:
        """The kind of the drift; ``transfers`` where only these have changed."""
        return "transfers" if self.drift is None else self.drift.kind.value


def drift_causes(table: SampleTable, drift: Drift, window: int) -> tuple[Cause, ...]:
    """What window ``window`` shows against the last one before the drift.

    Empty where either of them is missing: no window closed before the drift, or this one opened
    before it.
    """
    rows = table.newest("windows")
    # Iterations count from 1, steps from 0.
    since = drift.since_iteration - 1
    earlier = rows[rows["last_step"] < since]["window"]
    opened = rows[rows["window"] == window]["first_step"]
    if earlier.empty or opened.empty or int(opened.max()) < since:
        return ()
    return causes(
        only_windows(table, [int(earlier.max())]),
        only_windows(table, [window]),
        change_s=drift.after_s - drift.before_s,
        step_s=drift.before_s,
    )


def transfer_causes(table: SampleTable, windows: Sequence[int], step_s: float) -> tuple[Cause, ...]:
    """Groups whose transfers differ between the last two of ``windows``; empty for fewer."""
    if len(windows) < 2:
        return ()
    before, after = (only_windows(table, [window]) for window in windows[-2:])
    return group_causes(before, after, step_s=step_s)
