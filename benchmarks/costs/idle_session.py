"""A session outside its window, as most steps of a run find it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forerun.calib.workload import WandbMode
from forerun.hooks.process import RankInfo, Settings
from forerun.hooks.session import Session

_READER = (sys.executable, "-c", "import sys; [line for line in sys.stdin]")


@contextmanager
def idle_session(*, is_last: bool) -> Iterator[Session]:
    """Of one of two ranks, with the pipe to a companion that only reads on the last one."""
    rank = int(is_last)
    place = {"rank": rank, "world_size": 2, "local_rank": rank, "local_world_size": 2}
    with tempfile.TemporaryDirectory() as home:
        session = Session(
            Settings(
                rank=RankInfo(**place, run_id="timer"),
                steps=0,
                every=10**9,
                directory=Path(home),
                wandb=WandbMode.OFF,
                companion_command=_READER if is_last else (),
            )
        )
        yield session
        session.finish()
