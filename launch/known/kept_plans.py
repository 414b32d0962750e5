"""The plan of a machine, searched once and kept beside the fit that it was made with."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

from ...calib.advice.plan import Plan, plan
from ...calib.answers import plain_models
from ...calib.arguments.keep import Keep
from ...calib.search.found import Effort
from ...calib.workload.config import RunConfig
from .kept_files import KeptFile
from .kept_fits import DAMAGED, Machine


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

    A plan is read back where all that it was asked for and all that its fit stands on is the same.
    ``memory_capacity_nbytes``: of a device (None: as the machine's own).
    """
    capacity_nbytes = memory_capacity_nbytes or machine.memory_capacity_nbytes
    kept = _kept(machine, (config, num_ranks, keep, capacity_nbytes, effort.top))
    if kept is not None and (known := _read(kept)) is not None:
        return known
    found = plan(
        config,
        machine.steps,
        num_ranks=num_ranks,
        memory_capacity_nbytes=capacity_nbytes,
        memory_offset_nbytes=machine.memory_offset_nbytes,
        is_running=machine.runs(config),
        keep=keep,
        effort=effort,
    )
    is_unmeasured = bool(machine.basis)
    is_saved = not is_unmeasured and config.model.bare == machine.own.model.bare
    found = replace(found, has_checkpoints=is_saved, is_unmeasured=is_unmeasured)
    # What was cut short is the best of another moment.
    if kept is not None and not effort.is_stopped():
        with suppress(TypeError):
            kept.write(json.dumps(plain_models.plain(found)).encode())
    return found


def _kept(machine: Machine, asked: tuple[object, ...]) -> KeptFile | None:
    """None where nothing is kept of the machine, or the question has no plain form."""
    if machine.kept is None:
        return None
    try:
        return machine.kept.beside("planned", [plain_models.plain(asked)])
    except TypeError:
        return None


def _read(kept: KeptFile) -> Plan | None:
    body = kept.read()
    if body is None:
        return None
    try:
        found = plain_models.made(json.loads(body))
    except DAMAGED:
        return None
    return found if isinstance(found, Plan) else None
