"""A session outside its window, the state of most steps of a run."""

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
    """Yield the session of one of two ranks; the last one has a pipe to a read-only companion."""
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
