"""What a session tells its companion about the recorded run, with the options that a test names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.calib.workload.run_options import Goals
from forerun.hooks.process.settings import CompanionSettings, RankInfo, Settings


def companion_settings(
    directory: Path, *, num_ranks: int = 1, launch_id: str = "", **options: Any
) -> CompanionSettings:
    goals = Goals(**{name: options.pop(name) for name in Goals.__slots__ if name in options})
    rank = RankInfo(
        rank=num_ranks - 1, world_size=num_ranks, local_rank=0, local_world_size=1,
        run_id="golden-run",
    )  # fmt: skip
    settings = Settings(rank=rank, directory=directory, goals=goals, **options)
    return CompanionSettings(settings=settings, launch_id=launch_id)
