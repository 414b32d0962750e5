"""Machine as the verbs use it: its step model, plans on it, and the launch of its run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ...calib.advice.planning import Plan, plan
from ...calib.arguments.launchers import ranks_of, split_front
from ...calib.arguments.megatron_command import program_of, split_launcher
from ...calib.arguments.short_names import LayoutConstraint
from ...calib.errors import RecordError
from ...calib.records.run_values import NAME, Launch
from ...calib.search.results import Effort, MemoryBudget
from ...calib.steps.model import FittedSteps
from ...calib.workload.config import RunConfig
from ...calib.workload.parallelism import Parallelism
from ..store.run_folders import command_words, newest_of_run, read_object, top_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Machine:
    """Step model for any layout, from the data of a directory."""

    name: str
    """Run id, or name of the imported machine."""
    running: RunConfig
    """Layout that others are compared with."""
    steps: FittedSteps
    budget: MemoryBudget
    is_elsewhere: bool = False
    """True if nothing was measured on its device; ``running`` is then the run transferred to it."""
    problems: tuple[str, ...] = ()
    basis: str = ""
    """Source of its times, in words, if no run of the user was measured; else empty."""
    has_layout: bool = True
    """False if nobody described the layout of ``running``."""

    def runs(self, config: RunConfig) -> bool:
        """True if a layout does the same work as the run on this machine, so that their times are
        comparable."""
        return not self.is_elsewhere and config.does_work_of(self.running)


def plan_on(
    machine: Machine,
    config: RunConfig,
    num_ranks: int,
    *,
    effort: Effort,
    keep: LayoutConstraint | None = None,
    memory_capacity_nbytes: int | None = None,
) -> Plan:
    """Rank layouts on a machine against the running one; see ``plan``.

    ``memory_capacity_nbytes`` is that of one device (None: the machine's).  On a machine without a
    run, ``config`` is a row of the plan only if it was described, on as many ranks.
    """
    budget = machine.budget
    if memory_capacity_nbytes:
        budget = replace(budget, capacity_nbytes=memory_capacity_nbytes)
    is_row = machine.has_layout and config.parallelism.num_ranks == num_ranks
    return plan(
        config,
        machine.steps,
        num_ranks=num_ranks,
        budget=budget,
        is_running=machine.runs(config),
        is_listed=is_row or not machine.basis,
        has_checkpoints=not machine.basis and config.model.bare == machine.running.model.bare,
        is_unmeasured=bool(machine.basis),
        keep=keep,
        effort=effort,
    )


def launch_of_run(directory: Path, run_id: str, layout: Parallelism) -> Launch:
    """Return the launch of a run; empty if neither its rank 0 nor its companion recorded it.

    The companion's request has only the arguments; nodes are then those of the layout.
    """
    if (noted := _noted(directory, run_id)) is not None:
        return noted
    request = newest_of_run(directory, "request.json", run_id)
    if request is None:
        return Launch()
    return _on_nodes(Launch(argv=command_words(request.get("host_argv"))), layout)


def absent_in(directory: Path, run_id: str) -> tuple[str, ...]:
    """Return what the program of a run lacks (``RunConfig.absent``); empty if not recorded."""
    noted = _noted(directory, run_id)
    return () if noted is None else noted.absent


def with_program(config: RunConfig, directory: Path, run_id: str) -> RunConfig:
    """Return the run's configuration with the name of its program and what that lacks."""
    launch = launch_of_run(directory, run_id, config.parallelism)
    return replace(config, program=program_of(launch.argv), absent=launch.absent)


def launch_of_command(command: Sequence[str], layout: Parallelism) -> Launch:
    """Return the launch described by a command line, with or without a launcher.

    >>> launch_of_command(["torchrun", "--nnodes=1", "t.py", "--lr", "1"], Parallelism()).argv
    ('t.py', '--lr', '1')
    """
    launcher, rest = split_launcher(command)
    begin = len(launcher) if launcher or len(rest) < len(command) else 0
    environment, words = split_front(launcher)
    launch = Launch(launcher=words, argv=tuple(command[begin:]), environment=environment)
    return _on_nodes(launch, layout, ranks_of(launcher).per_node)


def _noted(directory: Path, run_id: str) -> Launch | None:
    value = read_object(top_of(directory)[0] / "records" / run_id / NAME)
    with suppress(RecordError):  # written by another version, or damaged: treat as absent
        return None if value is None else Launch.from_json(value)
    return None


def _on_nodes(launch: Launch, layout: Parallelism, per_node: int = 0) -> Launch:
    """Place a launch on nodes of ``per_node`` ranks; 0: as many as in a node of the layout."""
    each = min(per_node or layout.ranks_per_node or layout.num_ranks, layout.num_ranks)
    return replace(launch, ranks_per_node=each, num_nodes=max(1, layout.num_ranks // each))
