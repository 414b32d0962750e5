"""What a wrapper looks at beside its duties, in a thread that may hang or fail without harm.

A file system that does not answer, a Slurm that does not, a file that is absurd: signals are passed
on meanwhile, and the command's end is seen.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..directory.launch_files import LaunchFiles, NewestForecast, Stopped
from .log_lines import say
from .slurm import Allocation, allocation

# A shared file system serves many such looks; nobody asks for a stop in less.
LOOK_EVERY_S = 2.0
TOLERANCE_S = 60.0
"""A limit that is told anew has changed where it differs by more: what is left is told in whole
seconds, and by another clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What the files say when the command has ended; times by the monotonic clock."""

    stopped: Stopped | None = None
    forecast: NewestForecast | None = None
    forecast_age_s: float = 0.0
    startup_s: float = 0.0
    """Until the first forecast: start-up, and the steps that it rests on."""
    advised: tuple[str, ...] = ()


class FileWatch:
    """``begin``, then attributes and ``ask``, then ``end``: none of them waits long."""

    def __init__(
        self,
        files: LaunchFiles,
        granted: Allocation,
        *,
        margin_s: float,
        is_limit_fixed: bool,
    ) -> None:
        self._files = files
        self._margin_s = margin_s
        self._is_limit_fixed = is_limit_fixed
        self._start_s = time.monotonic()
        self.limit_s = _limit_s(granted, self._start_s)
        """By the monotonic clock, so that a clock that is set moves it nowhere; None: no limit."""
        self.is_limit_near = False
        """Time for two saves and the margin is left, no more."""
        self.has_asked_in_vain = False
        self._asked = ""
        self._is_asked = False
        self._ending = Ending()
        self._seen_s = 0.0
        self._has_told = False
        self._faults: set[str] = set()
        self._bell = threading.Event()
        self._is_ready = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self, patience_s: float = 2.0) -> None:
        """Start; what an earlier launch of the same name has left is noted before this returns."""
        try:
            self._thread.start()
        except RuntimeError as err:  # no thread to be had
            say(f"files and limits cannot be watched ({err}); the command still runs")
            self.has_asked_in_vain = True
        else:
            self._is_ready.wait(patience_s)

    def ask(self, reason: str) -> None:
        """Have a request to save and stop written, at once."""
        self._asked = reason
        self._bell.set()

    def end(self, patience_s: float = 5.0) -> Ending:
        """What was found, with a last look where that can be had in time."""
        self._is_closing = True
        self._bell.set()
        if self._thread.ident is not None:
            self._thread.join(patience_s)
        return self._ending

    def _run(self) -> None:
        self._guarded(self._files.begin)
        self._is_ready.set()
        looks = (self._files.follow, self._request, self._look_at_forecast, self._look_at_limit)
        while not self._is_closing:
            for look in looks:
                self._guarded(look)
            if not self._is_closing:
                self._bell.wait(LOOK_EVERY_S)
            self._bell.clear()
        for look in (self._files.follow, self._look_at_forecast, self._look_back):
            self._guarded(look)
        if self._asked:
            self._files.withdraw()

    def _guarded(self, look: Callable[[], object]) -> None:
        try:
            look()
        except BaseException as err:
            name = getattr(look, "__name__", "look").strip("_").replace("_", " ")
            if name not in self._faults:
                self._faults.add(name)
                say(f"cannot {name} ({type(err).__name__}: {err}); training goes on")

    def _request(self) -> None:
        if not self._asked:
            return
        try:
            self._files.ask(self._asked)
        except BaseException:
            self.has_asked_in_vain = not self._is_asked
            raise
        self._is_asked = True

    def _look_at_forecast(self) -> None:
        found, before = self._files.forecast(), self._ending
        if found is None or found == before.forecast:
            return
        self._seen_s = time.monotonic()
        startup_s = before.startup_s if before.forecast else self._seen_s - self._start_s
        self._ending = Ending(forecast=found, startup_s=startup_s)
        if self.limit_s is None or self._has_told:
            return
        until_s = self.limit_s - self._seen_s
        if found.left_s(until_s) <= 0:
            return
        self._has_told = True
        done = found.done_frac_after(until_s)
        say(f"will not finish in this allocation: {done * 100:.0f} % done at the limit")

    def _look_at_limit(self) -> None:
        limit_s = self.limit_s
        if limit_s is None or self.is_limit_near:
            return
        if time.monotonic() < limit_s - self._lead_s(limit_s):
            return
        if not self._is_limit_fixed:
            newer = allocation(os.environ, time.time(), is_anew=True)
            newer_s = _limit_s(newer, time.monotonic())
            if newer.source and (newer_s is None or abs(newer_s - limit_s) > TOLERANCE_S):
                self.limit_s = newer_s
                return
        self.is_limit_near = True

    def _lead_s(self, limit_s: float) -> float:
        """Before the limit: two of the longest saves and the margin, at most half of the time."""
        forecast = self._ending.forecast
        wanted_s = 2.0 * (forecast.longest_save_s if forecast else 0.0) + self._margin_s
        return min(wanted_s, 0.5 * max(0.0, limit_s - self._start_s))

    def _look_back(self) -> None:
        self._ending = replace(
            self._ending,
            stopped=self._files.stop(),
            forecast_age_s=time.monotonic() - self._seen_s,
            advised=self._files.advised_command(),
        )


def _limit_s(granted: Allocation, now_s: float) -> float | None:
    if granted.end_unix_s is None:
        return None
    left_s = granted.left_s
    return now_s + (granted.end_unix_s - time.time() if left_s is None else left_s)
