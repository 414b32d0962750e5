"""Where each launch of a directory is now, as its files say."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from ...calib.errors import RecordError
from ...calib.records import LAUNCH, MARKER, RUNS, Action
from ...calib.workload import Encoded
from ..directory.forecast_log import FORECASTS, Logged, read_forecasts
from ..directory.publishing import OWNER, STALE_S, STATUS, Phase, StatusFile, is_live, status_of
from ..directory.run_folders import nothing_in, number, read_object, top_of

_FORECAST, _DECISION, _DRIFT = "forecast.json", "decision.json", "drift.json"
_READ = (STATUS, _FORECAST, _DECISION, _DRIFT, MARKER)
_NONE = Logged(made={}, ended={}, problems=())


class State(Enum):
    """What has become of a run."""

    LIVE = "live"
    ENDED = "ended"
    """It has reached its last step."""
    STOPPED = "stopped"
    """It has ended before, on advice or by itself."""
    LOST = "lost"
    """It has gone without a word, or nothing is heard of it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus(Encoded):
    """One launch, by its newest run; None: not known."""

    JSON: ClassVar[str] = "* finish_p50_local"

    launch_id: str
    run_id: str
    directory: str
    """Where its answers are."""
    state: State
    iteration: int | None
    """Steps that are done."""
    steps_total: int | None
    step_time_s: float | None
    """Median of the newest steps, else what the newest forecast expects."""
    step_low_s: float | None
    """90 % of single steps lie from here ..."""
    step_high_s: float | None
    """... to here."""
    finish_p50_unix_s: float | None
    finish_p95_unix_s: float | None
    """With 95 % it has ended by then."""
    decision: str | None
    """``action`` of ``decision.json``."""
    reason: str
    """Of the decision, or of the stop."""
    drift: str
    """The newest change of the step; empty without one."""
    heard_unix_s: float | None
    """When training last said something."""
    age_s: float | None
    """How long ago that was."""

    @property
    def is_stop_advised(self) -> bool:
        """True where it should be stopped, or was."""
        return self.decision == Action.STOP.value and self.state in (State.LIVE, State.STOPPED)

    @property
    def finish_p50_local(self) -> str | None:
        """The end of the run in local time."""
        return local_time(self.finish_p50_unix_s)

    def told(self) -> tuple[Any, ...]:
        """What is told anew where it has changed; how long ago it was is not among it."""
        return tuple(held for name, held in asdict(self).items() if name != "age_s")


def local_time(unix_s: float | None) -> str | None:
    """A moment as ISO 8601 with the offset of this machine's zone; None where it is none."""
    if not unix_s:
        return None
    try:
        return datetime.fromtimestamp(unix_s).astimezone().isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return None


def run_statuses(
    directory: Path, now_unix_s: float, run_id: str | None = None
) -> tuple[list[RunStatus], list[str]]:
    """Every launch of a directory, the newest last, and which files cannot be read.

    Of the folder of one launch that alone; with ``run_id`` the launch of that run, or of that name.
    ``RecordError`` where there is none.
    """
    top, own = top_of(directory)
    folders = [directory] if own else _folders(top)
    problems: list[str] = []
    logged = _logged(top, problems)
    owner = read_object(top / OWNER) or {}
    found = []
    for folder in folders:
        launch_id, names = _names(folder, logged, problems)
        if run_id is not None and run_id not in (launch_id, *names):
            continue
        if run_id in names:
            names = (run_id,)
        if names:
            held = _Held(folder, launch_id, names, problems)
            found.append(held.status(logged, owner, now_unix_s))
    if not found:
        raise RecordError(_nothing(directory, run_id))
    return found, [*dict.fromkeys(problems)]


def _nothing(directory: Path, run_id: str | None) -> str:
    if run_id is not None and not nothing_in(directory):
        return f"{directory} has no run {run_id}; forerun status {directory} lists its runs"
    return nothing_in(directory) or (
        f"{directory} has records but no answers yet: a run answers after its first window; "
        f"forerun report {directory} analyses the records"
    )


def _folders(top: Path) -> list[Path]:
    """Of all launches, the oldest first; the directory itself where it has none."""
    found = [path.parent for path in top.glob(f"{RUNS}/*/{LAUNCH}")]
    return sorted(found, key=_began) or [top]


def _began(folder: Path) -> tuple[float, str]:
    try:
        return os.lstat(folder / LAUNCH).st_mtime, folder.name
    except OSError:
        return 0.0, folder.name


def _logged(top: Path, problems: list[str]) -> Logged:
    if not (top / FORECASTS).exists():
        return _NONE
    try:
        found = read_forecasts(top)
    except RecordError as err:
        problems.append(str(err))
        return _NONE
    problems += found.problems
    return found


def _names(folder: Path, logged: Logged, problems: list[str]) -> tuple[str, tuple[str, ...]]:
    """The launch of a folder and its runs, the newest last."""
    if folder.parent.name == RUNS:
        value = _object(folder / LAUNCH, problems)
        held = value.get("run_ids")
        names = tuple(n for n in held if isinstance(n, str)) if isinstance(held, list) else ()
        return str(value.get("launch_id") or folder.name), names
    # Answers of before there were launches.
    said = (_object(folder / name, problems).get("run_id") for name in _READ)
    known = [*logged.made, *logged.ended, *(name for name in said if isinstance(name, str))]
    return "", tuple(dict.fromkeys(known))


def _object(path: Path, problems: list[str]) -> Mapping[str, Any]:
    """The object of a file; empty where there is none, and told where it cannot be read."""
    value = read_object(path)
    if value is None and os.path.lexists(path):
        problems.append(f"{path} cannot be read, skipped; delete it")
    return value or {}


def _amount(value: object) -> float:
    """A value of a file as a number from 0 up; 0.0 where it is none."""
    return max(0.0, number(value))


class _Held:
    """The files of one launch that are of its newest run."""

    def __init__(
        self, folder: Path, launch_id: str, names: tuple[str, ...], problems: list[str]
    ) -> None:
        self._folder, self._launch_id, self._run_id = folder, launch_id, names[-1]
        values = {name: _object(folder / name, problems) for name in _READ}
        self._values = {
            name: value for name, value in values.items() if value.get("run_id") == self._run_id
        }
        self._ahead = self._values.get(_FORECAST, {})
        self._now = status_of(self._values[STATUS]) if STATUS in self._values else None

    def status(self, logged: Logged, owner: Mapping[str, Any], now_unix_s: float) -> RunStatus:
        """All of it at that time; ``owner`` is the claim on the top of the directory."""
        done, total = self._steps(logged)
        heard = self._heard_unix_s(logged)
        claim = owner if owner.get("run_id") == self._run_id else {}
        is_ended = self._run_id in logged.ended
        state = self._state(claim, now_unix_s, done=done, total=total, is_ended=is_ended)
        ends = {
            name: (_amount(self._ahead.get(name)) or None) if state is State.LIVE else None
            for name in ("finish_p50_unix_s", "finish_p95_unix_s")
        }
        return RunStatus(
            launch_id=self._launch_id,
            run_id=self._run_id,
            directory=str(self._folder),
            state=state,
            iteration=done or None,
            steps_total=total or None,
            **self._step(),
            **ends,
            **self._decision(),
            drift=self._drift(),
            heard_unix_s=heard or None,
            age_s=max(0.0, now_unix_s - heard) if heard else None,
        )

    def _steps(self, logged: Logged) -> tuple[int, int]:
        """Those that are done, and all of them; 0: not known."""
        now, made = self._now or StatusFile(), logged.made.get(self._run_id, ())[-1:]
        ended = logged.ended.get(self._run_id)
        known: list[tuple[float, float]] = [(now.iteration, now.steps_total)]
        if ended is not None:
            known.append((ended.iteration, ended.steps_total))
        done = _amount(self._ahead.get("steps_done"))
        known.append((done, done + _amount(self._ahead.get("steps_left"))))
        known += [(one.iteration, _amount(one.iteration) + _amount(one.steps_left)) for one in made]
        pairs = [(int(_amount(done)), int(_amount(total))) for done, total in known]
        return max(done for done, _ in pairs), next((total for _, total in pairs if total), 0)

    def _heard_unix_s(self, logged: Logged) -> float:
        if self._now is not None:
            return self._now.heard_unix_s
        ended = logged.ended.get(self._run_id)
        said = self._ahead.get("now_unix_s")
        return _amount(said if ended is None else ended.last_step_unix_s)

    def _state(
        self,
        claim: Mapping[str, Any],
        now_unix_s: float,
        *,
        done: int,
        total: int,
        is_ended: bool,
    ) -> State:
        now = self._now
        if now is not None:
            claim = asdict(now) if now.phase is Phase.RUNS else {}
            is_ended = now.phase is Phase.ENDED
        if is_live(claim, now_unix_s):
            return State.LIVE
        if 0 < total <= done:
            return State.ENDED
        if MARKER in self._values or (is_ended and total):
            return State.STOPPED
        # Its first words come after its folder: between the two it is no run that is lost.
        is_new = 0 <= now_unix_s - _began(self._folder)[0] < STALE_S
        if is_new and not (self._values or claim or is_ended):
            return State.LIVE
        return State.ENDED if is_ended else State.LOST

    def _step(self) -> dict[str, float | None]:
        now = self._now
        if now is not None and now.num_steps:
            times = now.step_time_s, now.step_low_s, now.step_high_s
        else:
            names = ("step_time_s", "single_low_s", "single_high_s")
            times = tuple(_amount(self._ahead.get(name)) for name in names)
        names = ("step_time_s", "step_low_s", "step_high_s")
        return {name: held or None for name, held in zip(names, times, strict=True)}

    def _decision(self) -> dict[str, Any]:
        value = self._values.get(_DECISION, {})
        action, reasons = value.get("action"), value.get("reasons")
        rows = (
            [one for one in reasons if isinstance(one, dict)] if isinstance(reasons, list) else []
        )
        rows.sort(key=lambda one: (bool(one.get("is_met")), number(one.get("probability"))))
        reason = rows[-1].get("text") if rows else ""
        stop = self._values.get(MARKER, {}).get("reason")
        reason = stop if isinstance(stop, str) else reason
        return {
            "decision": action if isinstance(action, str) else None,
            "reason": reason if isinstance(reason, str) else "",
        }

    def _drift(self) -> str:
        events = self._values.get(_DRIFT, {}).get("events")
        return next(self._lines(events if isinstance(events, list) else []), "")

    def _lines(self, events: list[Any]) -> Iterator[str]:
        """Of this run, the newest first."""
        for event in reversed(events):
            is_own = isinstance(event, dict) and event.get("run_id") == self._run_id
            if is_own and isinstance(line := event.get("line"), str):
                yield line
