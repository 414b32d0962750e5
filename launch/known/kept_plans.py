"""The plan of a machine."""

from __future__ import annotations

from dataclasses import replace

from ...calib.advice.plan import Plan, plan
from ...calib.arguments.keep import Keep
from ...calib.search.found import Effort
from ...calib.workload.config import RunConfig
from .kept_fits import Machine


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
