"""How a run was launched, from what rank 0 noted or the companion was told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...calib.arguments import program_of, ranks_of, split_launcher
from ...calib.errors import RecordError
from ...calib.records import NAME, Launch
from ...calib.workload import Parallelism, RunConfig
from ..directory.bounded_files import read_object, words
from ..directory.run_folders import paths_of, top_of

_REQUEST = "request.json"


def launch_of_run(directory: Path, run_id: str, layout: Parallelism) -> Launch:
    """The launch of a run; empty where neither its rank 0 nor its companion left it.

    A request says the arguments alone; nodes are those of the layout then.
    """
    top, _ = top_of(directory)
    noted = _noted(top / "records" / run_id / NAME)
    if noted is not None:
        return noted
    for path in paths_of(top, _REQUEST):
        found = read_object(path) or {}
        if found.get("run_id") == run_id:
            return _on_nodes(Launch(argv=words(found.get("host_argv"))), layout)
    return Launch()


def absent_in(directory: Path, run_id: str) -> tuple[str, ...]:
    """What the program of a run lacks (``RunConfig.absent``); empty where nobody noted it."""
    noted = _noted(top_of(directory)[0] / "records" / run_id / NAME)
    return () if noted is None else noted.absent


def with_program(config: RunConfig, directory: Path, run_id: str) -> RunConfig:
    """The layout of a run with the name of its program, and what that lacks."""
    launch = launch_of_run(directory, run_id, config.parallelism)
    return replace(config, program=program_of(launch.argv), absent=launch.absent)


def launch_of_command(command: Sequence[str], layout: Parallelism) -> Launch:
    """The launch that a command line says, with or without a launcher in front.

    >>> launch_of_command(["torchrun", "--nnodes=1", "t.py", "--lr", "1"], Parallelism()).argv
    ('t.py', '--lr', '1')
    """
    launcher, rest = split_launcher(command)
    begin = len(launcher) if launcher or len(rest) < len(command) else 0
    found = Launch(launcher=tuple(launcher), argv=tuple(command[begin:]))
    return _on_nodes(found, layout, ranks_of(launcher).per_node)


def _noted(path: Path) -> Launch | None:
    value = read_object(path)
    if value is None:
        return None
    try:
        return Launch.from_json(value)
    except RecordError:  # of another version, or damaged: as if it were not there
        return None


def _on_nodes(launch: Launch, layout: Parallelism, per_node: int = 0) -> Launch:
    """On hosts of so many ranks; 0: of as many as a node of the layout has."""
    each = min(per_node or layout.ranks_per_node or layout.num_ranks, layout.num_ranks)
    return replace(launch, ranks_per_node=each, num_nodes=max(1, layout.num_ranks // each))
