"""What the verbs know of a machine, and the plan that is made of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...calib.advice import Plan, plan
from ...calib.arguments import Keep
from ...calib.search import Effort
from ...calib.steps import FittedSteps
from ...calib.workload import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Machine:
    """What a directory says of the steps of any layout."""

    name: str
    """The run, or the machine that was imported."""
    own: RunConfig
    """The layout that others are held against."""
    steps: FittedSteps
    memory_capacity_nbytes: int | None
    memory_offset_nbytes: int | None
    """What a measured peak had beyond its estimate; None where none was measured."""
    is_elsewhere: bool = False
    """True where nothing was measured on its device; ``own`` is the run as it would be there."""
    problems: tuple[str, ...] = ()
    basis: str = ""
    """The source of its times, in words, where no run of the user was measured; else empty."""

    def runs(self, config: RunConfig) -> bool:
        """True where a layout does the work of the run on this machine, so that both times may be
        compared."""
        return not self.is_elsewhere and config.does_work_of(self.own)


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
    found = plan(
        config,
        machine.steps,
        num_ranks=num_ranks,
        memory_capacity_nbytes=memory_capacity_nbytes or machine.memory_capacity_nbytes,
        memory_offset_nbytes=machine.memory_offset_nbytes,
        is_running=machine.runs(config),
        keep=keep,
        effort=effort,
    )
    is_unmeasured = bool(machine.basis)
    is_saved = not is_unmeasured and config.model.bare == machine.own.model.bare
    return replace(found, has_checkpoints=is_saved, is_unmeasured=is_unmeasured)
