"""What the session tells its companion."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..directory.publishing import Place

if TYPE_CHECKING:
    from ...calib.answers.analysis import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Where and what to answer."""

    directory: Path
    run_id: str
    settings: dict[str, Any]
    launch_id: str = ""

    @property
    def place(self) -> Place:
        """Where answers go."""
        return Place(directory=self.directory, launch_id=self.launch_id, run_id=self.run_id)

    @property
    def asked_since_unix_s(self) -> float:
        """What was asked before is of an earlier launch; 0.0 after a restart, which follows it."""
        get = self.settings.get
        return 0.0 if get("num_restarts") else float(get("started_unix_s") or 0.0)

    @property
    def request(self) -> Request:
        """The user's wishes in the form that the core takes; the clock is read by the caller."""
        # Slow to import, and the companion waits with that until a window has closed.
        from ...calib.answers.analysis import Request

        get = self.settings.get
        return Request(
            now_unix_s=0.0,
            deadline_unix_s=get("deadline_unix_s"),
            budget_hours=get("budget_hours"),
            restart_cost_s=float(get("restart_cost_s", 600.0)),
            mtbf_hours=get("mtbf_hours"),
            num_restarts=int(get("num_restarts") or 0),
            price_per_gpu_hour=get("price_per_gpu_hour"),
            limit_unix_s=get("limit_unix_s"),
            confidence=float(get("confidence", 0.9)),
            gpus=tuple(get("gpus") or ()),
            host_argv=tuple(get("host_argv") or ()),
        )
