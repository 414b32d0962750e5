"""One launch from start to exit code: signals, the scheduler's limit, nobody left behind."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from ...hooks.process.launch_identity import LAUNCH_ID
from ..directory.launch_files import LaunchFiles, Stopped
from ..known.scheduler import ask_slurm
from ..options.flags import LIMIT, REQUESTS
from .children import ProcessTree
from .file_watch import Ending, FileWatch
from .log_lines import say
from .signals import END, WARN, SignalInbox
from .slurm import Allocation

SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
# How late a limit may be noticed; signals wake the wrapper at once.
TICK_S = 1.0
LINGER_S = 5.0
"""What the command leaves behind on a quiet exit has so long to end by itself: last words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapOptions:
    """What is wanted of a wrapped launch."""

    command: tuple[str, ...]
    directory: Path
    launch_id: str
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
    wall_s: float
    asked: str
    """Why it was asked to save and stop; empty: it was not."""
    signals: tuple[int, ...]
    """That were passed on."""
    num_ended: int
    """Processes that had to be killed at the end."""
    folder: Path
    """What this launch wrote."""
    ending: Ending = field(default_factory=Ending)
    left: tuple[int, ...] = ()

    @property
    def stopped(self) -> Stopped | None:
        """None where it was not stopped."""
        return self.ending.stopped

    def exit_code(self, stop_code: int) -> int:
        """What the scheduler is to see: an advised stop before the command's own code."""
        if self.stopped is not None and self.stopped.is_advised:
            return stop_code
        return 128 - self.child_code if self.child_code < 0 else self.child_code


class Wrapped:
    """Starts the command and watches it; ``run`` once."""

    def __init__(self, options: WrapOptions) -> None:
        self._options = options
        self._files = LaunchFiles(options.directory, options.launch_id)
        self._file_watch = FileWatch(
            self._files,
            options.allocation,
            margin_s=options.margin_s,
            is_limit_fixed=options.is_limit_fixed,
        )
        self._signals: list[int] = []
        self._asked = ""
        self._term_at_s = float("inf")
        self._has_warned = False
        self._is_hurried = False

    def run(self) -> Outcome:
        """Until the last process below us is gone; raises ``OSError`` where there is no command."""
        begin_s = time.monotonic()
        self._file_watch.begin()
        with SignalInbox() as inbox:
            family = ProcessTree(self._options.command, self._told())
            num_ended = self._accompany(family, inbox)
            wall_s = time.monotonic() - begin_s
            ending = self._file_watch.end()
        return Outcome(
            child_code=-signal.SIGKILL if family.code is None else family.code,
            wall_s=wall_s,
            asked=self._asked,
            signals=tuple(self._signals),
            num_ended=num_ended,
            ending=ending,
            folder=self._files.folder,
            left=tuple(sorted(family.rest())),
        )

    def _accompany(self, family: ProcessTree, inbox: SignalInbox) -> int:
        """To the end of the command and of what it leaves; how many had to be killed.

        A fault of ours ends our watching and no process.
        """
        try:
            self._watch(family, inbox)
            num_ended = self._settle(family, inbox)
            family.kill()
        except BaseException as err:
            say(f"cannot watch ({type(err).__name__}: {err}); training goes on")
            family.outlast((*END, *WARN))
            return 0
        return num_ended

    def _told(self) -> dict[str, str]:
        """The command's environment: ours, the limit, and time for workers to save."""
        environ = dict(os.environ)
        environ[LAUNCH_ID] = self._options.launch_id
        if self._options.allocation.end_unix_s is not None:
            environ[LIMIT] = str(int(self._options.allocation.end_unix_s))
        if self._options.listens:
            environ[REQUESTS] = "1"
        # A second more, so that what hangs is ended by torchrun, which says which rank it was.
        environ.setdefault(SHUTDOWN_TIMEOUT, f"{max(1.0, self._options.grace_s - 1.0):.0f}")
        return environ

    def _watch(self, family: ProcessTree, inbox: SignalInbox) -> None:
        """Until the command has ended, or was to end and has not within the grace."""
        kill_at_s = float("inf")
        while family.code is None:
            now_s = time.monotonic()
            if now_s >= kill_at_s or self._is_hurried:
                return
            self._heed_files()
            if now_s >= self._term_at_s:
                self._term_at_s = float("inf")
                if self._options.listens:
                    say("no answer to the request to save and stop; SIGTERM is sent")
                self._pass_on(family, signal.SIGTERM)
            if self._signals and kill_at_s == float("inf"):
                kill_at_s = now_s + self._options.grace_s
            for number in inbox.wait(min(TICK_S, kill_at_s - now_s, self._term_at_s - now_s)):
                self._take(family, number)
            family.reap()

    def _settle(self, family: ProcessTree, inbox: SignalInbox) -> int:
        """End what is left; how many did not go by themselves or on SIGTERM."""
        begin_s = time.monotonic()
        is_quiet = family.code == 0 and not self._signals
        linger_s = LINGER_S if is_quiet else 0.0
        while left := family.rest():
            gone_s = time.monotonic() - begin_s
            if self._is_hurried or family.code is None or gone_s > self._options.grace_s + linger_s:
                return len(left)
            if gone_s >= linger_s:
                family.end_orphans()
            for number in inbox.wait(0.1):
                self._take(family, number)
        return 0

    def _take(self, family: ProcessTree, number: int) -> None:
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

    def _pass_on(self, family: ProcessTree, number: int) -> None:
        self._signals.append(number)
        if family.code is None and not self._has_signalled_steps():
            family.send(number)

    def _has_signalled_steps(self) -> bool:
        """SIGTERM to all tasks of an srun; a signal to srun itself would have them killed."""
        job_id = self._options.allocation.job_id
        if not job_id or Path(self._options.command[0]).name != "srun":
            return False
        return ask_slurm(["scancel", "--signal=TERM", job_id]) is not None

    def _ask(self, reason: str) -> None:
        """A request to save and stop; SIGTERM where nobody would read it."""
        if self._asked:
            return
        self._asked = reason
        now_s, patience_s = time.monotonic(), self._options.patience_s
        if self._file_watch.limit_s is not None:
            patience_s = min(patience_s, 0.5 * max(0.0, self._file_watch.limit_s - now_s))
        if self._options.listens:
            say(f"{reason}: asked to save and stop; SIGTERM follows in {patience_s:.0f} s")
            self._file_watch.ask(reason)
        else:
            say(f"{reason}: no session takes requests here (add --calibrate); SIGTERM is sent")
            patience_s = 0.0
        self._term_at_s = now_s + patience_s

    def _heed_files(self) -> None:
        """Save or warn, once, near the limit; SIGTERM where a request could not be written."""
        looks = self._file_watch
        if self._asked and looks.has_asked_in_vain and self._term_at_s < float("inf"):
            self._term_at_s = 0.0
        if not looks.is_limit_near or looks.limit_s is None or self._asked or self._has_warned:
            return
        left_s = max(0.0, looks.limit_s - time.monotonic())
        if self._options.saves_before_limit:
            self._ask(f"{left_s:.0f} s before the limit")
        else:
            self._has_warned = True
            say(f"{left_s:.0f} s before the limit; --save-before-limit would save and stop now")
