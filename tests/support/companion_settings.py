"""Settings that a session gives its companion about the recorded run, with a test's options."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from forerun.calib.workload.config_json import encode
from forerun.calib.workload.run_options import AutoSwitch, Goals
from forerun.hooks.process.settings import CompanionSettings, RankInfo, Settings


def companion_settings(
    directory: Path, *, num_ranks: int = 1, launch_id: str = "", num_steps: int = 0, **options: Any
) -> CompanionSettings:
    goals = Goals(**{name: options.pop(name) for name in Goals.__slots__ if name in options})
    rank = RankInfo(
        rank=num_ranks - 1, world_size=num_ranks, local_rank=0, local_world_size=1,
        run_id="golden-run",
    )  # fmt: skip
    options = {"total_steps": num_steps or None, **options}
    settings = Settings(rank=rank, directory=directory, goals=goals, **options)
    return CompanionSettings(settings=settings, launch_id=launch_id)


def started(
    directory: Path, *, launch_id: str = "", leave_after_s: float = 25.0, before: str = ""
) -> subprocess.Popen[str]:
    """Start a companion as training does, without W&B; ``before`` is code that runs first.

    It does not step back: beside tests on all cores, one that runs only where nothing else wants to
    waits for minutes.
    """
    code = (
        f"import sys, functools; {before}\n"
        "from forerun.launch.companion import program as companion\n"
        "companion._lower_priority = lambda: None\n"
        f"companion.Shutdown = functools.partial(companion.Shutdown, {leave_after_s})\n"
        "sys.exit(companion.main(sys.argv[1:]))"
    )
    settings = companion_settings(directory, launch_id=launch_id, wandb=AutoSwitch.OFF)
    (directory / "told").write_text(json.dumps(encode(settings)))
    with (directory / "told").open() as file:
        number = file.fileno()
        return subprocess.Popen(
            [sys.executable, "-c", code, "--settings-fd", str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(number,),
        )
