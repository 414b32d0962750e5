"""One launch from start to exit code: signals, the scheduler's limit, and clean-up."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...calib.forecast.forecast_record import Forecast
from ...hooks.process.launch_identity import LAUNCH_ID
from ..known.scheduler import ask_slurm
from ..options.flags import LIMIT, REQUESTS
from ..store.launch_files import LaunchFiles, Stopped
from ._children import END, WARN, ProcessTree, SignalInbox
from .log_lines import log_line
from .slurm import GIVEN, Allocation, allocation

TICK_S = 1.0
"""Longest delay in noticing a limit, seconds; signals wake the wrapper at once."""
LINGER_S = 5.0
"""Time for descendants to end by themselves after a clean exit of the command, seconds."""
LOOK_EVERY_S = 2.0
"""Polling interval of files, seconds; a shared file system may serve many wrappers."""
TOLERANCE_S = 60.0
"""Smallest difference that counts as a changed limit, seconds: remaining time is reported in whole
seconds and by another clock."""
_NEVER_S = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapOptions:
    """Options of a wrapped launch."""

    command: tuple[str, ...]
    directory: Path
    launch_id: str
    allocation: Allocation
    grace_s: float
    margin_s: float
    patience_s: float
    """Time for a session to follow a request to save and stop before SIGTERM, seconds."""
    listens: bool
    """True if a session follows requests to stop."""
    saves_before_limit: bool


@dataclass(slots=True, kw_only=True)
class Ending:
    """Content of the files when the command has ended; times are of the monotonic clock."""

    stopped: Stopped | None = None
    forecast: Forecast | None = None
    longest_save_s: float = 0.0
    forecast_age_s: float = 0.0
    startup_s: float = 0.0
    """Seconds to the first forecast: start-up, and the steps that it is based on."""
    advised: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a launch."""

    child_code: int
    wall_s: float
    request_reason: str
    """Reason of the request to save and stop; empty if there was none."""
    signals: tuple[int, ...]
    """Forwarded signals."""
    num_ended: int
    """Number of processes killed at the end."""
    folder: Path
    """Folder of this launch."""
    ending: Ending
    surviving_pids: tuple[int, ...]
    """Processes that could not be ended."""

    def exit_code(self, stop_code: int) -> int:
        """Return the exit code for the scheduler: of an advised stop, else of the command."""
        if self.ending.stopped is not None and self.ending.stopped.is_advised:
            return stop_code
        return 128 - self.child_code if self.child_code < 0 else self.child_code


class WrappedLaunch:
    """Starts and watches the command; call ``run`` once."""

    def __init__(self, options: WrapOptions) -> None:
        self._options = options
        self._files = LaunchFiles(options.directory, options.launch_id)
        self._file_watch = FileWatch(self._files, options)
        self._signals: list[int] = []
        self._request_reason = ""
        self._term_at_s = _NEVER_S
        self._has_warned = self._is_hurried = False

    def run(self) -> Outcome:
        """Run until the last descendant is gone; raises ``OSError`` if there is no such command.

        A fault of ours ends the watching, but no process.
        """
        begin_s, num_ended = time.monotonic(), 0
        self._file_watch.begin()
        with SignalInbox() as inbox:
            family = ProcessTree(self._options.command, self._environment())
            try:
                self._watch(family, inbox)
                num_ended = self._settle(family, inbox)
                family.kill()
            except BaseException as err:
                log_line(f"cannot watch ({type(err).__name__}: {err}); training goes on")
                family.wait_for_exit((*END, *WARN))
            wall_s = time.monotonic() - begin_s
            ending = self._file_watch.end()
        return Outcome(
            child_code=-signal.SIGKILL if family.code is None else family.code,
            wall_s=wall_s,
            request_reason=self._request_reason,
            signals=tuple(self._signals),
            num_ended=num_ended,
            ending=ending,
            folder=self._files.folder,
            surviving_pids=tuple(sorted(family.living_pids())),
        )

    def _environment(self) -> dict[str, str]:
        """Return the command's environment: ours, the limit, and time for workers to save."""
        environ = {**os.environ, LAUNCH_ID: self._options.launch_id}
        if (end_unix_s := self._options.allocation.end_unix_s) is not None:
            environ[LIMIT] = str(int(end_unix_s))
        if self._options.listens:
            environ[REQUESTS] = "1"
        # A second less than our grace, so that torchrun ends hanging ranks and reports which.
        shutdown_s = max(1.0, self._options.grace_s - 1.0)
        environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", f"{shutdown_s:.0f}")
        return environ

    def _watch(self, family: ProcessTree, inbox: SignalInbox) -> None:
        """Return when the command has ended, or has not ended within the grace period."""
        kill_at_s = _NEVER_S
        while family.code is None:
            now_s = time.monotonic()
            if now_s >= kill_at_s or self._is_hurried:
                return
            self._heed_files()
            if now_s >= self._term_at_s:
                self._term_at_s = _NEVER_S
                if self._options.listens:
                    log_line("no answer to the request to save and stop; SIGTERM is sent")
                self._pass_on(family, signal.SIGTERM)
            if self._signals and kill_at_s == _NEVER_S:
                kill_at_s = now_s + self._options.grace_s
            for number in inbox.wait(min(TICK_S, kill_at_s - now_s, self._term_at_s - now_s)):
                self._take(family, number)
            family.reap()

    def _settle(self, family: ProcessTree, inbox: SignalInbox) -> int:
        """End remaining processes; return how many did not end by themselves or on SIGTERM."""
        begin_s = time.monotonic()
        linger_s = LINGER_S if family.code == 0 and not self._signals else 0.0
        while remaining := family.living_pids():
            gone_s = time.monotonic() - begin_s
            if self._is_hurried or family.code is None or gone_s > self._options.grace_s + linger_s:
                return len(remaining)
            if gone_s >= linger_s:
                family.end_orphans()
            for number in inbox.wait(0.1):
                self._take(family, number)
        return 0

    def _take(self, family: ProcessTree, number: int) -> None:
        if number in WARN:
            self._ask(f"{signal.Signals(number).name} from the scheduler")
        elif number == signal.SIGINT and number in self._signals:
            log_line("second SIGINT: ending everything now")
            self._is_hurried = True
        elif number in END and number not in self._signals:
            self._pass_on(family, number)

    def _pass_on(self, family: ProcessTree, number: int) -> None:
        self._signals.append(number)
        if family.code is not None:
            return
        # Signal all tasks of an srun; a signal to srun itself would kill them.
        job_id = self._options.allocation.job_id
        is_step = job_id and Path(self._options.command[0]).name == "srun"
        if not is_step or ask_slurm(["scancel", "--signal=TERM", job_id]) is None:
            family.send(number)

    def _ask(self, reason: str) -> None:
        """Request a save and stop; SIGTERM if no session reads requests."""
        if self._request_reason:
            return
        self._request_reason = reason
        now_s, patience_s = time.monotonic(), self._options.patience_s
        if self._file_watch.limit_s is not None:
            patience_s = min(patience_s, 0.5 * max(0.0, self._file_watch.limit_s - now_s))
        if self._options.listens:
            log_line(f"{reason}: save and stop requested; SIGTERM follows in {patience_s:.0f} s")
            self._file_watch.ask(reason)
        else:
            log_line(f"{reason}: no session takes requests here (add --calibrate); SIGTERM is sent")
            patience_s = 0.0
        self._term_at_s = now_s + patience_s

    def _heed_files(self) -> None:
        """Save or warn, once, near the limit; SIGTERM if a request could not be written."""
        watch, limit_s = self._file_watch, self._file_watch.limit_s
        if self._request_reason and watch.has_request_failed and self._term_at_s < _NEVER_S:
            self._term_at_s = 0.0
        if limit_s is None or not watch.is_limit_near or self._request_reason or self._has_warned:
            return
        remaining_s = max(0.0, limit_s - time.monotonic())
        if self._options.saves_before_limit:
            self._ask(f"{remaining_s:.0f} s before the limit")
        else:
            self._has_warned = True
            log_line(
                f"{remaining_s:.0f} s before the limit; --save-before-limit would save and stop now"
            )


class FileWatch:
    """Watches files and limits in a thread that may hang or fail without harm.

    If the file system or Slurm does not answer, or a file is malformed, signals are still forwarded
    and the command's end is noticed.  Neither ``begin``, ``ask`` nor ``end`` waits long.
    """

    def __init__(self, files: LaunchFiles, options: WrapOptions) -> None:
        self._files, self._options, self._ending = files, options, Ending()
        self._start_s = self._seen_s = time.monotonic()
        self.limit_s = _limit_s(options.allocation, self._start_s)
        """Limit by the monotonic clock, which setting the clock does not move; None: no limit."""
        self.is_limit_near = self.has_request_failed = False
        """Near: only time for two saves and the margin remains."""
        self._request_reason = ""
        self._is_requested = self._is_closing = self._has_warned = False
        self._faults: set[str] = set()
        self._bell, self._is_ready = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self) -> None:
        """Start, marking files of an earlier launch of the same name before returning."""
        try:
            self._thread.start()
        except RuntimeError as err:  # no thread can be started
            log_line(f"files and limits cannot be watched ({err}); the command still runs")
            self.has_request_failed = True
        else:
            self._is_ready.wait(2.0)

    def ask(self, reason: str) -> None:
        """Have a request to save and stop written at once."""
        self._request_reason = reason
        self._bell.set()

    def end(self) -> Ending:
        """Return the content of the files, read a last time if that does not take long."""
        self._is_closing = True
        self._bell.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)
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
        if self._request_reason:
            self._files.withdraw()

    def _guarded(self, look: Callable[[], object]) -> None:
        try:
            look()
        except BaseException as err:
            name = getattr(look, "__name__", "look").strip("_").replace("_", " ")
            if name not in self._faults:
                self._faults.add(name)
                log_line(f"cannot {name} ({type(err).__name__}: {err}); training goes on")

    def _request(self) -> None:
        if not self._request_reason:
            return
        try:
            self._files.ask(self._request_reason)
        except BaseException:
            self.has_request_failed = not self._is_requested
            raise
        self._is_requested = True

    def _look_at_forecast(self) -> None:
        newest, ending = self._files.forecast(), self._ending
        ending.longest_save_s = self._files.longest_save_s()
        if newest is None or newest == ending.forecast:
            return
        self._seen_s = time.monotonic()
        if ending.forecast is None:
            ending.startup_s = self._seen_s - self._start_s
        ending.forecast = newest
        until_s = _NEVER_S if self.limit_s is None else self.limit_s - self._seen_s
        if not self._has_warned and newest.remaining_after_s(until_s) > 0:
            self._has_warned = True
            done = newest.done_frac_after(until_s)
            log_line(f"will not finish in this allocation: {done * 100:.0f} % done at the limit")

    def _look_at_limit(self) -> None:
        """Check if the limit is near: two of the longest saves plus the margin, at most half the
        time."""
        limit_s = self.limit_s
        if limit_s is None or self.is_limit_near:
            return
        lead_s = 2.0 * self._ending.longest_save_s + self._options.margin_s
        lead_s = min(lead_s, 0.5 * max(0.0, limit_s - self._start_s))
        if time.monotonic() < limit_s - lead_s:
            return
        if self._options.allocation.source != GIVEN:
            newer = allocation(os.environ, time.time(), is_anew=True)
            newer_s = _limit_s(newer, time.monotonic())
            if newer.source and (newer_s is None or abs(newer_s - limit_s) > TOLERANCE_S):
                self.limit_s = newer_s
                return
        self.is_limit_near = True

    def _look_back(self) -> None:
        self._ending.forecast_age_s = time.monotonic() - self._seen_s
        self._ending.stopped = self._files.stop()
        self._ending.advised = self._files.advised_command()


def _limit_s(granted: Allocation, now_s: float) -> float | None:
    if granted.end_unix_s is None:
        return None
    remaining_s = granted.remaining_s
    return now_s + (granted.end_unix_s - time.time() if remaining_s is None else remaining_s)
