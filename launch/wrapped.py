"""One launch from start to exit code: signals, the scheduler's limit, nobody left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .children import Family
from .flags import LIMIT, REQUESTS
from .run_files import (
    NewestForecast,
    Stopped,
    newest_forecast,
    request_stop,
    stop_since,
    withdraw_request,
)
from .signals import END, WARN, SignalInbox
from .slurm import Allocation, allocation, ask_slurm

SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
LOOK_EVERY_S = 2.0
LINGER_S = 5.0
"""What the command leaves behind on a quiet exit has so long to end by itself: last words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What is wanted of a wrapped launch."""

    command: tuple[str, ...]
    directory: Path
    allocation: Allocation
    grace_s: float
    margin_s: float
    patience_s: float
    """A session that was asked to save and stop has so long before SIGTERM."""
    listens: bool
    """There is a session that follows requests to stop."""
    saves_before_limit: bool
    is_limit_fixed: bool = False
    """The limit was given, so that the scheduler is not asked again."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a launch ended."""

    child_code: int
    start_unix_s: float
    end_unix_s: float
    asked: str
    """Why it was asked to save and stop; empty: it was not."""
    signals: tuple[int, ...]
    """That were passed on."""
    num_ended: int
    """Processes that had to be killed at the end."""
    stopped: Stopped | None = None
    forecast: NewestForecast | None = None
    startup_s: float = 0.0
    """Until the first forecast: start-up, and the steps that it rests on."""
    left: tuple[int, ...] = field(default=())

    def exit_code(self, stop_code: int) -> int:
        """What the scheduler is to see: an advised stop before the command's own code."""
        if self.stopped is not None and self.stopped.is_advised:
            return stop_code
        return 128 - self.child_code if self.child_code < 0 else self.child_code


class Wrapped:
    """Starts the command and watches it; ``run`` once."""

    def __init__(self, wishes: Wishes, environ: Mapping[str, str] = os.environ) -> None:
        self._wishes = wishes
        self._environ = environ
        self._allocation = wishes.allocation
        self._start_unix_s = time.time()
        self._signals: list[int] = []
        self._asked = ""
        self._term_at_s = float("inf")
        self._forecast: NewestForecast | None = None
        self._startup_s = 0.0
        self._has_warned = self._has_told = False
        self._is_hurried = False

    def run(self) -> Outcome:
        """Until the last process below us is gone; raises ``OSError`` where there is no command."""
        withdraw_request(self._wishes.directory)
        with SignalInbox() as inbox:
            family = Family(self._wishes.command, self._told())
            try:
                self._watch(family, inbox)
                num_ended = self._settle(family, inbox)
            finally:
                family.kill()
        self._look_at_forecast()
        if self._asked:
            withdraw_request(self._wishes.directory)
        return Outcome(
            child_code=-signal.SIGKILL if family.code is None else family.code,
            start_unix_s=self._start_unix_s,
            end_unix_s=time.time(),
            asked=self._asked,
            signals=tuple(self._signals),
            num_ended=num_ended,
            stopped=stop_since(self._wishes.directory, self._start_unix_s),
            forecast=self._forecast,
            startup_s=self._startup_s,
            left=tuple(sorted(family.rest())),
        )

    def _told(self) -> dict[str, str]:
        """The command's environment: ours, the limit, and time for workers to save."""
        environ = dict(self._environ)
        if self._allocation.end_unix_s is not None:
            environ[LIMIT] = str(int(self._allocation.end_unix_s))
        if self._wishes.listens:
            environ[REQUESTS] = "1"
        # A second more, so that what hangs is ended by torchrun, which says which rank it was.
        environ.setdefault(SHUTDOWN_TIMEOUT, f"{max(1.0, self._wishes.grace_s - 1.0):.0f}")
        return environ

    def _watch(self, family: Family, inbox: SignalInbox) -> None:
        """Until the command has ended, or was to end and has not within the grace."""
        next_look_s = time.monotonic() + LOOK_EVERY_S
        kill_at_s = float("inf")
        while family.code is None:
            now_s = time.monotonic()
            if now_s >= kill_at_s or self._is_hurried:
                return
            if now_s >= next_look_s:
                next_look_s = now_s + LOOK_EVERY_S
                self._look_at_forecast()
                self._look_at_limit()
            if now_s >= self._term_at_s:
                self._term_at_s = float("inf")
                if self._wishes.listens:
                    say("no answer to the request to save and stop; SIGTERM")
                self._pass_on(family, signal.SIGTERM)
            if self._signals and kill_at_s == float("inf"):
                kill_at_s = now_s + self._wishes.grace_s
            wait_s = min(next_look_s, kill_at_s, self._term_at_s) - now_s
            for number in inbox.wait(wait_s):
                self._take(family, number)
            family.reap()

    def _settle(self, family: Family, inbox: SignalInbox) -> int:
        """End what is left; how many did not go by themselves or on SIGTERM."""
        begin_s = time.monotonic()
        is_quiet = family.code == 0 and not self._signals
        linger_s = LINGER_S if is_quiet else 0.0
        while left := family.rest():
            gone_s = time.monotonic() - begin_s
            if self._is_hurried or family.code is None or gone_s > self._wishes.grace_s + linger_s:
                return len(left)
            if gone_s >= linger_s:
                family.end_orphans()
            for number in inbox.wait(0.1):
                self._take(family, number)
        return 0

    def _take(self, family: Family, number: int) -> None:
        """A signal to us."""
        if number in WARN:
            self._ask(f"{signal.Signals(number).name} from the scheduler")
        elif number not in END:
            return
        elif number == signal.SIGINT and number in self._signals:
            say("second SIGINT: ending everything now")
            self._is_hurried = True
        elif number not in self._signals:
            self._pass_on(family, number)

    def _pass_on(self, family: Family, number: int) -> None:
        self._signals.append(number)
        if family.code is None and not self._has_signalled_steps():
            family.send(number)

    def _has_signalled_steps(self) -> bool:
        """SIGTERM to all tasks of an srun; a signal to srun itself would have them killed."""
        job_id = self._allocation.job_id
        if not job_id or Path(self._wishes.command[0]).name != "srun":
            return False
        return ask_slurm(["scancel", "--signal=TERM", job_id]) is not None

    def _ask(self, reason: str) -> None:
        """A request to save and stop; SIGTERM where nobody would read it."""
        if self._asked:
            return
        self._asked = reason
        patience_s = self._wishes.patience_s
        if self._allocation.end_unix_s is not None:
            left_s = max(0.0, self._allocation.end_unix_s - time.time())
            patience_s = min(patience_s, 0.5 * left_s)
        if not self._wishes.listens:
            say(f"{reason}: no session here that takes requests (--calibrate); SIGTERM")
            patience_s = 0.0
        elif request_stop(self._wishes.directory, reason):
            say(f"{reason}: asked to save and stop; SIGTERM in {patience_s:.0f} s")
        else:
            patience_s = 0.0
        self._term_at_s = time.monotonic() + patience_s

    def _look_at_forecast(self) -> None:
        found = newest_forecast(self._wishes.directory, self._start_unix_s)
        if found is None:
            return
        if self._forecast is None:
            self._startup_s = found.now_unix_s - self._start_unix_s
        self._forecast = found
        end_unix_s = self._allocation.end_unix_s
        if end_unix_s is None or self._has_told or found.left_s(end_unix_s) <= 0:
            return
        self._has_told = True
        done = found.done_frac_at(end_unix_s)
        say(f"will not finish in this allocation: {done * 100:.0f} % done at the limit")

    def _look_at_limit(self) -> None:
        """Save or warn, once, while there is time for two saves and the margin."""
        end_unix_s = self._allocation.end_unix_s
        now_unix_s = time.time()
        if end_unix_s is None or self._asked or self._has_warned:
            return
        if now_unix_s < end_unix_s - self._lead_s(end_unix_s):
            return
        if not self._wishes.is_limit_fixed:
            newer = allocation(self._environ, now_unix_s, is_anew=True)
            if newer.source and newer.end_unix_s != end_unix_s:
                self._allocation = newer
                return
        left_s = max(0.0, end_unix_s - now_unix_s)
        if self._wishes.saves_before_limit:
            self._ask(f"{left_s:.0f} s before the limit")
        else:
            self._has_warned = True
            say(f"{left_s:.0f} s before the limit; --save-before-limit would save and stop now")

    def _lead_s(self, end_unix_s: float) -> float:
        """Before the limit: two of the longest saves and the margin, at most half of the time."""
        save_s = self._forecast.longest_save_s if self._forecast else 0.0
        wanted_s = 2.0 * save_s + self._wishes.margin_s
        return min(wanted_s, 0.5 * max(0.0, end_unix_s - self._start_unix_s))


def say(text: str) -> None:
    """One line for the job's log; standard output is the command's."""
    print(f"[forerun] {text}", file=sys.stderr, flush=True)


def words(numbers: Sequence[int]) -> str:
    """Names of signals."""
    return ", ".join(signal.Signals(number).name for number in numbers)
