"""What a wrapped launch and its wrapper tell each other by files in the calibrate directory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..calib.samples.files import PRIVATE, replace_file
from ..hooks.orders import MARKER

STOP_REQUEST = "stop-request.json"
"""The wrapper: please save and stop, since the scheduler soon ends this job."""
REQUEST_RULE = "request"
"""The rule of a stop that the wrapper asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """What ``stop.json`` says."""

    run_id: str = ""
    iteration: int | None = None
    unix_s: float = 0.0
    reason: str = ""
    rule: str = ""
    command: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {**asdict(self), "command": list(self.command)}

    @property
    def is_advised(self) -> bool:
        """False where the scheduler's limit was the reason: such a run is to be taken up again."""
        return self.rule != REQUEST_RULE


def stop_since(directory: Path, start_unix_s: float) -> Stopped | None:
    """The stop of a launch that began then; None where there was none."""
    value = read_object(directory / MARKER)
    if value is None or _number(value.get("unix_s")) < start_unix_s:
        return None
    iteration = value.get("iteration")
    return Stopped(
        run_id=str(value.get("run_id", "")),
        iteration=iteration if isinstance(iteration, int) else None,
        unix_s=_number(value.get("unix_s")),
        reason=str(value.get("reason", "")),
        rule=str(value.get("rule", "")),
        command=_words(value.get("command")),
    )


def request_stop(directory: Path, reason: str) -> bool:
    """Ask the session to save and stop; False where the file cannot be written."""
    value = {"schema": 1, "unix_s": time.time(), "reason": reason, "rule": REQUEST_RULE}
    try:
        replace_file(directory / STOP_REQUEST, json.dumps(value) + "\n", mode=PRIVATE)
    except OSError:
        return False
    return True


def withdraw_request(directory: Path) -> None:
    """No request is left for a later launch."""
    with suppress(OSError):
        (directory / STOP_REQUEST).unlink()


class StopRequests:
    """The companion's side: a request becomes an order to all ranks, once."""

    def __init__(
        self, directory: Path, since_unix_s: float, give: Callable[[dict[str, Any]], None]
    ) -> None:
        self._path = directory / STOP_REQUEST
        self._since_unix_s = since_unix_s
        self._give = give
        self._is_given = False

    def look(self) -> None:
        """Pass on a request that is newer than the run."""
        value = None if self._is_given else read_object(self._path)
        if value is None or _number(value.get("unix_s")) < self._since_unix_s:
            return
        self._is_given = True
        self._give({"order": "stop", "rule": REQUEST_RULE, "reason": str(value.get("reason", ""))})


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestForecast:
    """What the newest forecast of a launch says, from ``forecast.json`` and ``request.json``."""

    now_unix_s: float
    left_p95_s: float
    """Time that is left with 5 % beyond it, at ``now_unix_s``."""
    left_p50_s: float
    done_frac: float
    """Share of the steps that were done at ``now_unix_s``."""
    longest_save_s: float

    def left_s(self, unix_s: float) -> float:
        """What of ``left_p95_s`` is left at a later time, training having gone on until then."""
        return max(0.0, self.left_p95_s - max(0.0, unix_s - self.now_unix_s))

    def done_frac_at(self, unix_s: float) -> float:
        """Share of the steps that will be done, at the expected speed."""
        if self.left_p50_s <= 0:
            return 1.0
        gone = min(1.0, max(0.0, unix_s - self.now_unix_s) / self.left_p50_s)
        return self.done_frac + (1.0 - self.done_frac) * gone


def newest_forecast(directory: Path, start_unix_s: float) -> NewestForecast | None:
    """The newest forecast of a launch that began then; None before there is one."""
    found = read_object(directory / "forecast.json")
    if found is None or _number(found.get("now_unix_s")) < start_unix_s:
        return None
    done, left = _number(found.get("steps_done")), _number(found.get("steps_left"))
    if left <= 0:
        return None
    asked = read_object(directory / "request.json") or {}
    saves = asked.get("save_times_s")
    return NewestForecast(
        now_unix_s=_number(found.get("now_unix_s")),
        left_p95_s=_number(found.get("remaining_high_s")),
        left_p50_s=_number(found.get("remaining_s")),
        done_frac=done / (done + left),
        longest_save_s=max(map(_number, saves), default=0.0) if isinstance(saves, list) else 0.0,
    )


def advised_command(directory: Path, start_unix_s: float) -> tuple[str, ...]:
    """The command line with the advised layout from ``decision.json``; empty without one."""
    found = read_object(directory / "decision.json") or {}
    if _number(found.get("now_unix_s")) < start_unix_s:
        return ()
    return _words(found.get("command"))


def read_object(path: Path) -> Mapping[str, Any] | None:
    """The JSON object of a file; None where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _words(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
