"""A fault as one row of the table, and record rows that many faults expect."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fault_injections import Arrange, at
from fault_runs import RUN_ID, Rows
from fault_training import MegatronTraining, Moment, Training

WINDOW = (3, 6)
ALL = Rows(steps=tuple(range(7)), whole=WINDOW, windows=(0,))
NO_OPERATORS = Rows(steps=ALL.steps, windows=(0,))
NOTHING = Rows()
TWO_IN_ONE = Rows(steps=ALL.steps, whole=(6,), partial=(3,), windows=(0,))
"""The first hooked step has the passes of two, and is flagged as rerun."""
NOTHING_HOOKED = Rows(steps=ALL.steps, faulted=WINDOW, windows=(0,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row of the table.  ``act`` is the user's and happens without us too."""

    name: str
    rows: Rows
    status: tuple[int, ...] = (0,)
    loop: type[Training] = MegatronTraining
    num_ranks: int = 1
    act: Moment | None = None
    arrange: Arrange | None = None
    strike: Moment | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    is_control: bool = False

    def put_in_place(self, training: Training) -> None:
        """Inject faults that precede training, and start the session as ``--calibrate`` does."""
        if self.arrange is not None:
            self.arrange(training)
        from forerun.hooks.process.settings import RankInfo, Settings
        from forerun.hooks.start import start

        rank = RankInfo(
            rank=training.rank,
            world_size=self.num_ranks,
            local_rank=training.rank,
            local_world_size=self.num_ranks,
            run_id=RUN_ID,
        )
        out = training.folder / "out"
        if self.loop is MegatronTraining:
            start(Settings(rank=rank, steps=4, directory=out, **self.settings))
        else:
            training.memory["settings"] = {"rank": rank, "steps": 4, "directory": out}


def shell(script: str) -> dict[str, Any]:
    """Return settings of a companion that runs ``script``."""
    return {"companion_command": ("/bin/sh", "-c", script)}


LISTEN = """
import json, os, sys
with os.fdopen(int(sys.argv[-1])) as settings:
    folder = json.load(settings)["settings"]["directory"]
os.makedirs(folder, exist_ok=True)
with open(os.path.join(folder, "events.txt"), "wb") as events:
    events.write(sys.stdin.buffer.read())
"""


def listening() -> dict[str, Any]:
    """Return settings of a companion that writes all events to its settings' directory."""
    return {"companion_command": (sys.executable, "-c", LISTEN)}


def hooked(name: str, do: Callable[[Any], object], *, rank: int = 0) -> Moment:
    """Return the moment ``name`` of the first hooked step."""
    return at(3, name, do, rank=rank)
