"""A predicted run as a script for ``sbatch``, with the time that it needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from ...calib.advice import Candidate
from ...calib.arguments import MEETING, LaunchLine, launch_line, ranks_on_each
from ...calib.errors import ConfigError
from ...calib.fit.priors import is_processor
from ...calib.forecast import WholeRun
from ...calib.memory import Verdict
from ...calib.records import Launch
from ...calib.shell import quoted
from ...calib.workload import RunConfig
from ..wrapper.log_lines import one_line
from ..wrapper.slurm import time_option
from .row_command import BREAK

_START_S = 1800.0
"""For containers, data, compilation and a checkpoint, before the first step."""
_NOT_OF_A_NAME = re.compile(r"[^\w.-]")
_LENGTH = ("--train-iters", "--train-samples")
_RENDEZVOUS = (
    '--nnodes "$SLURM_JOB_NUM_NODES"',
    '--rdzv-id "$SLURM_JOB_ID"',
    "--rdzv-backend c10d",
    '--rdzv-endpoint "$SLURMD_NODENAME:29500"',
)
"""As in ``recipes/slurm.sbatch``: ``torchrun`` on each node, which meet on the first."""


def batch_script(
    layout: Candidate, run: WholeRun, launch: Launch, described: RunConfig, said: Sequence[str]
) -> str:
    """The script; ``ConfigError`` where nothing can start it, or the run has no single length."""
    config, par = layout.config, layout.config.parallelism
    line = launch_line(launch, described, config)
    each = ranks_on_each(launch, described.parallelism, par) or par.num_ranks
    each = min(each, par.num_ranks)
    why = "; ".join(line.refused) or "it does not fit in memory"
    if layout.verdict is Verdict.DOES_NOT_FIT or line.refused:
        raise ConfigError(f"--sbatch: {layout.label} cannot run ({why}); choose another layout")
    if par.num_ranks % each:
        raise ConfigError(f"--sbatch: {par.num_ranks} ranks fill no nodes of {each}; change --gpus")
    if (own := config.cadence.train_iters) and own != run.num_steps:
        raise ConfigError(
            f"--tokens asks for {run.num_steps:,} steps, and the line for {own:,}; leave one out"
        )
    program = _NOT_OF_A_NAME.sub("_", PurePath(next(iter(launch.argv), "train")).stem)
    options = {"job-name": program, "nodes": par.num_ranks // each, "ntasks-per-node": 1}
    options |= {} if is_processor(config.device) else {"gpus-per-node": each}
    options["time"] = time_option(run.high_s + _START_S)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{name}={value}" for name, value in options.items()),
            *(f"# {one_line(text.removeprefix('# '))}" for text in (*said, *run.lines)),
            f"# --time: the upper 95 % end of the run, and {_START_S / 60:.0f} minutes to start.",
            "set -eu",
            *([f"cd -- {quoted(launch.folder)}"] if launch.folder else []),
            _command(line, run.num_steps),
            "",
        ]
    )


def _command(line: LaunchLine, num_steps: int) -> str:
    """The launch under ``srun``; its own words on where nodes meet make way for Slurm's."""
    start = [one for one in line.start if one.name not in {*MEETING, "--nnodes", "--standalone"}]
    place = next((n for n, one in enumerate(start) if one.name == "--nproc-per-node"), 0)
    if not place:
        raise ConfigError("--sbatch writes launches of torchrun; give the run's line with it")
    kept = (*start, *line.program)
    blanks = dict.fromkeys(word.blank for one in kept for word in one.words if word.blank)
    length = [] if any(one.name in _LENGTH for one in kept) else [f"--train-iters {num_steps}"]
    words = [f"{name}={quoted(value)}" for name, value in line.environment.items()]
    shell = [one.shell for one in kept]
    shell[place:place] = _RENDEZVOUS
    first = " ".join(["exec", *(["env", *words] if words else []), "srun --kill-on-bad-exit=1"])
    lines = [f": {blank.text}" for blank in blanks]
    return "\n".join([*lines, BREAK.join([first, *shell, *length])])
