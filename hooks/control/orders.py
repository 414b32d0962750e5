"""Orders of the companion, followed by all ranks at one step or by none.

The companion orders a stop or a window on one rank.  From the end of the first window on, a
thread of each rank polls the store; training only compares its step number with one that was
agreed on long before.  No collective, barrier or device work is involved, so losses stay the
same; a rank whose hooks are off refuses, and then nobody stops.  With ``--calibrate-every=0`` and
without stops there is no such thread.

One rank proposes an order and names its step.  Every rank that reads the proposal in time and can
follow it accepts.  A rank that cannot follow refuses, and so does one that approaches the step
without knowing the outcome.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import TYPE_CHECKING, Any

from ...calib.errors import unwritable
from ...calib.records.files import PRIVATE, replace_file
from ...calib.records.iso_times import with_iso_times
from ...calib.records.run_values import MARKER
from ...calib.shell import printable
from ...calib.workload.config_json import decode, encode
from ...calib.workload.run_options import OnAdvice
from ..process.guard import THREAD_NAME_PREFIX, Guard
from ..process.launch_identity import RANKS_PER_S, launch_folder
from ..process.settings import Settings
from ..process.votes import LATE, YES, StoreLink, Votes, find_link, refusal_reason

if TYPE_CHECKING:
    from ..process.host import Host

_log = logging.getLogger(__name__)
SCHEMA = 1
PAUSE_S = 0.5
"""Interval between two polls of the store, for cheap polls and few ranks."""
CALM_PAUSE_S = 2.0
"""Polling interval of runs that may open windows, but never stop."""
DUTY = 50
"""Least ratio of pause to poll duration, because name lookups may be slow."""
LEAD_PAUSES = 6
"""Lead of the named step, in polling intervals."""
MOST_ATTEMPTS = 5
"""Proposals per order: one that comes too late for some rank is repeated with twice the lead."""
MOST_FAILURES = 20
PATIENCE_S = 60.0
"""Timeout at the named step for an outcome that the thread has not read yet, which happens only
if a rank or the store has died meanwhile."""
# The thread may be waiting for the store; the process ends without it after this time.
CLOSING_S = 5.0


class OrderKind(Enum):
    """Orders that the companion can give to all ranks."""

    STOP = "stop"
    """End training after the named step."""
    WINDOW = "window"
    """Open a window with the named step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One order of the companion, with its reason."""

    kind: OrderKind
    reason: str = ""
    rule: str = ""
    command: tuple[str, ...] = ()

    @staticmethod
    def from_json(value: dict[str, Any]) -> Order:
        """Return the order of one line; raises ``KeyError`` or ``ValueError`` if it is none."""
        return decode(Order, {**value, "kind": value["order"]})


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """An order and its step; from ``settle`` on, ranks that do not know the outcome refuse."""

    kind: OrderKind
    step: int
    settle: int

    def to_text(self) -> str:
        """Return one line of JSON."""
        return json.dumps(encode(self))

    @staticmethod
    def from_text(text: str) -> Proposal:
        """Return the proposal that ``to_text`` wrote."""
        return decode(Proposal, json.loads(text))


@dataclass(slots=True)
class _Course:
    """A proposal that this rank has to follow, or see refused."""

    number: int
    proposal: Proposal
    order: Order | None
    """Order behind the proposal; None on a rank without an order."""
    outcome: str = ""
    is_known: threading.Event = field(default_factory=threading.Event)
    is_done: bool = False
    """True once training has reached the step."""

    def settle(self, outcome: str) -> None:
        if outcome and not self.outcome:
            self.outcome = outcome
            self.is_known.set()


class Orders:
    """Orders of one rank; training calls ``begin_step`` and ``end_step``, the thread all else."""

    def __init__(
        self,
        settings: Settings,
        guard: Guard,
        receive: Callable[[], list[dict[str, Any]]],
        launch_id: Callable[[], str],
    ) -> None:
        self._settings = settings
        self._guard = guard
        self._receive = receive
        self._launch_id = launch_id
        self._rank = settings.rank
        may_stop = settings.on_advice is OnAdvice.STOP or settings.takes_requests
        wanted_s = PAUSE_S if may_stop else CALM_PAUSE_S
        self._pause_s = max(wanted_s, self._rank.world_size / RANKS_PER_S)
        self._least_pause_s = self._pause_s
        # Median of five: one slow poll (say, a repeated name lookup) says nothing about the next.
        self._looks_s: deque[float] = deque(maxlen=5)
        self.is_wanted = may_stop or settings.every > 0
        self._link: StoreLink | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._stop: Callable[[], bool] | None = None
        self._is_polled_by_loop = False
        self._begun = self._ended = -1
        self._begun_s = 0.0
        self._step_s = 0.0
        self._course: _Course | None = None
        self._next_number = 0
        self._order: Order | None = None
        self._attempts = 0
        self._last_order: Order | None = None
        self._stopped_after: int | None = None
        self._is_reported = False
        self._is_marked = False
        self.should_stop = False

    def describe(self, host: Host) -> None:
        """Set how this host is stopped, if at all; log once if a stop would lose the run."""
        self._stop = host.stop
        if self._settings.on_advice is OnAdvice.STOP and host.stop_is_lossy:
            _log.warning("[forerun] --calibrate-on-advice=stop: %s", host.stop_is_lossy)

    def listen(self) -> None:
        """Start the thread: the first window has closed, and orders may come from now on."""
        if not self.is_wanted or self._thread is not None or self._closing.is_set():
            return
        self._link = find_link(self._rank.run_id) if self._rank.world_size > 1 else None
        self._thread = threading.Thread(
            target=self._run, name=f"{THREAD_NAME_PREFIX}orders", daemon=True
        )
        self._thread.start()

    def begin_step(self, number: int) -> bool:
        """Return True if all ranks open a window with this step; note a stop due after it."""
        if not self.is_wanted:
            return False
        now_s = time.monotonic()
        if self._begun >= 0:
            last_s = now_s - self._begun_s
            self._step_s += 0.2 * (last_s - self._step_s) if self._step_s else last_s
        # The thread sets the course before it reads this, and accepts only if the step is ahead.
        self._begun, self._begun_s = number, now_s
        course = self._course
        if course is None or course.is_done or number < course.proposal.step:
            return False
        course.is_done = True
        if not course.is_known.wait(PATIENCE_S):
            course.settle("no: unknown")
        if course.outcome != YES:
            return False
        if course.proposal.kind is OrderKind.WINDOW:
            return True
        self.should_stop = True
        return False

    def end_step(self, number: int) -> None:
        """End a step, and stop if it is the agreed one; the host itself saves and ends."""
        self._ended = number
        if self.should_stop and self._stopped_after is None and self._stop is not None:
            self._stopped_after = number
            if not self._stop():
                _log.warning(
                    "[forerun] the training loop cannot be asked to stop; training goes on"
                )

    def ask(self) -> bool:
        """Return True if the loop should stop after this step, the same on all ranks."""
        self._is_polled_by_loop = True
        if self.should_stop and self._stopped_after is None:
            self._stopped_after = self._ended
        return self.should_stop

    def close(self) -> None:
        """Stop the thread, and let it finish writing."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSING_S)

    def leave(self) -> None:
        """Disconnect a forked child, which does not have the parent's thread."""
        self._closing.set()
        self._thread = None

    def _run(self) -> None:
        failures = 0
        while not self._closing.wait(self._pause_s if self._course is None else PAUSE_S):
            begin_s = time.monotonic()
            try:
                self._turn()
            except (OSError, RuntimeError) as err:
                failures += 1
                if failures >= MOST_FAILURES:
                    _log.warning(
                        "[forerun] no stops or windows on advice: the store of the process group "
                        "does not answer: %s",
                        str(err),
                    )
                    break
            except Exception as err:
                self._guard.fault(err)
                break
            else:
                failures = 0
            self._looks_s.append(time.monotonic() - begin_s)
            self._pause_s = max(self._least_pause_s, DUTY * median(self._looks_s))
            self._mark()
        if self._course is not None:
            self._course.settle("no: the store of the process group does not answer")
        self._mark()

    def _turn(self) -> None:
        self._take_orders()
        if self._link is None:
            if self._rank.world_size == 1 and self._order is not None and self._course is None:
                self._follow_alone(self._order)
            self._finish_course()
            return
        if not (self._course and self._course.outcome):
            store = self._link.connect()
            ballots = Votes(store, "order", num_ranks=self._rank.world_size)
            if self._course is None:
                self._look(ballots)
            if self._course is not None and not self._course.outcome:
                self._ask_outcome(ballots, self._course)
        self._finish_course()

    def _take_orders(self) -> None:
        for value in self._receive():
            try:
                order = Order.from_json(value)
            except (KeyError, ValueError):
                continue
            if self._order is None or self._order.kind is not OrderKind.STOP:
                self._order, self._attempts = order, 0

    def _lead(self) -> int:
        """Return the steps from now to the named one: enough for all ranks to read the proposal."""
        if self._rank.world_size == 1:
            return 3
        lead_s = LEAD_PAUSES * self._pause_s * 2**self._attempts
        return 3 + math.ceil(lead_s / max(self._step_s, 1e-4))

    def _proposal(self, order: Order) -> Proposal:
        lead, begun = self._lead(), self._begun
        return Proposal(kind=order.kind, step=begun + lead, settle=begun + lead - lead // 4 - 1)

    def _follow_alone(self, order: Order) -> None:
        course = _Course(self._next_number, self._proposal(order), order)
        why = self._why_not(order.kind)
        course.settle(f"no: {why}" if why else YES)
        self._last_order, self._course = order, course

    def _look(self, ballots: Votes) -> None:
        """Read the next proposal; on the companion's rank, first propose a pending order."""
        number = self._next_number
        order = self._order if self._step_s else None  # without a step time the lead is unknown
        if order is not None:
            ballots.propose(number, self._proposal(order).to_text())
        text = ballots.proposal(number)
        if not text:
            return
        proposal = Proposal.from_text(text)
        if order is not None and order.kind is not proposal.kind:
            order = (
                None  # a proposal of an earlier order stands; this one waits for the next number
            )
        if order is not None:
            self._last_order = order
        course = self._course = _Course(number, proposal, order)
        why = self._why_not(proposal.kind)
        if not why and self._begun >= proposal.settle:
            why = LATE
        if why:
            course.settle(ballots.refuse(number, why))
        else:
            course.settle(ballots.accept(number))

    def _ask_outcome(self, ballots: Votes, course: _Course) -> None:
        course.settle(ballots.outcome(course.number))
        if self._begun >= course.proposal.settle:
            course.settle(ballots.refuse(course.number, LATE))

    def _why_not(self, kind: OrderKind) -> str:
        """Return why this rank cannot follow an order of this kind; empty if it can."""
        if self._guard.is_tripped:
            return f"the hooks of rank {self._rank.rank} were removed after faults"
        if kind is OrderKind.STOP and self._stop is None and not self._is_polled_by_loop:
            return f"rank {self._rank.rank} cannot save and end: its loop never asks should_stop()"
        return ""

    def _finish_course(self) -> None:
        """Report and complete the proposal once its outcome is known."""
        course = self._course
        if course is None or not course.outcome:
            return
        if course.outcome == YES:
            self._print_outcome(course)
            if not course.is_done or course.proposal.kind is OrderKind.STOP:
                return
            self._drop(course.order)
        elif refusal_reason(course.outcome) != LATE:
            self._print_outcome(course)
            self._drop(course.order)
        elif self._order is course.order:
            self._attempts += 1
            if self._attempts >= MOST_ATTEMPTS:
                self._print_outcome(course)
                self._drop(course.order)
        self._course, self._is_reported = None, False
        self._next_number = course.number + 1

    def _drop(self, order: Order | None) -> None:
        """Clear a settled order, unless a newer one has replaced it."""
        if self._order is order:
            self._order = None

    def _print_outcome(self, course: _Course) -> None:
        if self._last_order is None or self._is_reported:
            return
        self._is_reported = True
        what, after = self._last_order.reason, course.proposal.step
        if course.outcome != YES:
            refusal = refusal_reason(course.outcome)
            message = f"{course.proposal.kind.value} not followed: {refusal}; {what}"
        elif course.proposal.kind is OrderKind.STOP:
            message = f"stopping on all ranks after iteration {after + 1}: {what}"
        else:
            message = f"window reopens with iteration {after + 1}: {what}"
        print(f"[forerun] {printable(message)}", flush=True)

    def _mark(self) -> None:
        """Write the stop marker on the companion's rank, for the launcher of the next run."""
        order = self._last_order
        launch_id = self._launch_id()
        if self._stopped_after is None or order is None or self._is_marked or not launch_id:
            return
        self._is_marked = True
        value = {
            "schema": SCHEMA,
            "launch_id": launch_id,
            "run_id": self._rank.run_id,
            "iteration": self._stopped_after + 1,
            "unix_s": time.time(),
            "reason": order.reason,
            "rule": order.rule,
            "command": list(order.command),
        }
        path = launch_folder(self._settings.directory, launch_id) / MARKER
        try:
            text = json.dumps(with_iso_times(value), indent=1)
            replace_file(path, text + "\n", mode=PRIVATE)
        except OSError as err:
            _log.warning("[forerun] %s", unwritable(path, err))
