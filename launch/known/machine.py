"""What the verbs know of a machine: its steps, a plan on it, and how its run was launched."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ...calib.advice import Plan, plan
from ...calib.arguments import Keep, program_of, ranks_of, split_launcher
from ...calib.errors import RecordError
from ...calib.records import NAME, Launch
from ...calib.search import Effort
from ...calib.steps import FittedSteps
from ...calib.workload import Parallelism, RunConfig
from ..store import command_words, newest_of_run, read_object, top_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Machine:
    """What a directory says of the steps of any layout."""

    name: str
    """The run, or the machine that was imported."""
    running: RunConfig
    """The layout that others are held against."""
    steps: FittedSteps
    memory_capacity_nbytes: int | None
    memory_offset_nbytes: int | None
    """What a measured peak had beyond its estimate; None where none was measured."""
    is_elsewhere: bool = False
    """True where nothing was measured on its device; ``running`` is the run as it would be there."""
    problems: tuple[str, ...] = ()
    basis: str = ""
    """The source of its times, in words, where no run of the user was measured; else empty."""

    def runs(self, config: RunConfig) -> bool:
        """True where a layout does the work of the run on this machine, so that both times may be
        compared."""
        return not self.is_elsewhere and config.does_work_of(self.running)


def plan_on(
    machine: Machine,
    config: RunConfig,
    num_ranks: int,
    *,
    effort: Effort,
    keep: Keep | None = None,
    memory_capacity_nbytes: int | None = None,
) -> Plan:
    """The best layouts of a machine against one that runs; see ``plan``.

    ``memory_capacity_nbytes``: of a device (None: as the machine's own).
    """
    machine_plan = plan(
        config,
        machine.steps,
        num_ranks=num_ranks,
        memory_capacity_nbytes=memory_capacity_nbytes or machine.memory_capacity_nbytes,
        memory_offset_nbytes=machine.memory_offset_nbytes,
        is_running=machine.runs(config),
        keep=keep,
        effort=effort,
    )
    is_saved = not machine.basis and config.model.bare == machine.running.model.bare
    return replace(machine_plan, has_checkpoints=is_saved, is_unmeasured=bool(machine.basis))


def launch_of_run(directory: Path, run_id: str, layout: Parallelism) -> Launch:
    """The launch of a run; empty where neither its rank 0 nor its companion left it.

    A request says the arguments alone; nodes are those of the layout then.
    """
    if (noted := _noted(directory, run_id)) is not None:
        return noted
    request = newest_of_run(directory, "request.json", run_id)
    if request is None:
        return Launch()
    return _on_nodes(Launch(argv=command_words(request.get("host_argv"))), layout)


def absent_in(directory: Path, run_id: str) -> tuple[str, ...]:
    """What the program of a run lacks (``RunConfig.absent``); empty where nobody noted it."""
    noted = _noted(directory, run_id)
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
    launch = Launch(launcher=tuple(launcher), argv=tuple(command[begin:]))
    return _on_nodes(launch, layout, ranks_of(launcher).per_node)


def _noted(directory: Path, run_id: str) -> Launch | None:
    value = read_object(top_of(directory)[0] / "records" / run_id / NAME)
    with suppress(RecordError):  # of another version, or damaged: as if it were not there
        return None if value is None else Launch.from_json(value)
    return None


def _on_nodes(launch: Launch, layout: Parallelism, per_node: int = 0) -> Launch:
    """On hosts of so many ranks; 0: of as many as a node of the layout has."""
    each = min(per_node or layout.ranks_per_node or layout.num_ranks, layout.num_ranks)
    return replace(launch, ranks_per_node=each, num_nodes=max(1, layout.num_ranks // each))
