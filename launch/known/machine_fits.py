"""Fit of a directory's step model from records or imported tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...calib.answers.measured_steps import (
    config_on,
    known_elsewhere,
    remaining_layout,
    run_steps,
    steps_on,
)
from ...calib.answers.routing import with_measured_routing
from ...calib.answers.run_measurements import Measurements
from ...calib.errors import ConfigError
from ...calib.fit.priors import device_prior, is_processor
from ...calib.memory.devices import known_nbytes
from ...calib.memory.peak import memory_offset
from ...calib.records.cluster import Cluster, StatedNodes
from ...calib.records.step_rows import StepRow
from ...calib.search.results import MemoryBudget
from ...calib.steps.known_steps import KnownStep
from ...calib.steps.model import fit_steps
from ...calib.steps.step_tables import machine_times, table_steps
from ...calib.workload.config import RunConfig
from .machine import Machine
from .runs import has_run, load
from .table_files import ImportedTables, read_imported


def fit_machine(
    directory: Path,
    run_id: str | None,
    machine: str | None,
    also: Sequence[Path],
    like: Path | None,
    device: str | None,
    stated: StatedNodes | None,
) -> Machine:
    """Fit the machine of a directory; see ``machines.open_machine``."""
    imported = read_imported(directory)
    if machine is not None or (imported.steps and run_id is None and not has_run(directory)):
        if like is not None or device is not None:
            raise ConfigError(
                f"{directory} holds only imported steps, without timed operators: --like and "
                "--device need a run or probes; record one with --calibrate or forerun probe"
            )
        return _imported(imported, machine, stated)
    loaded = load(directory, run_id)
    table, problems = loaded.table, (*loaded.problems, *imported.problems)
    if device is not None:
        if also or like is not None:
            text = f"{device}: --also and --like add nothing to a device without a measurement"
            problems = (*problems, text)
        return _on_device(Measurements(table=table), device, problems, stated)
    measured = Measurements(table=table if stated is None else table.with_stated(stated))
    running = measured.recorded_config
    there = None if like is None else Measurements(table=load(like, None).table)
    added = {other: _elsewhere(other, running) for other in also}
    known = [*loaded.known, *(step for steps in added.values() for step in steps)]
    reason = f"none of it was measured on {running.device}, so it does not count"
    unused = (f"{other}: {reason}" for other, steps in added.items() if not steps)
    return Machine(
        name=measured.run_id,
        running=remaining_layout(measured.routed_config),
        steps=run_steps(measured, known, like=there),
        budget=measured.budget,
        problems=(*problems, *unused),
    )


def device_machine(config: RunConfig, stated: StatedNodes | None = None) -> Machine:
    """Return an unmeasured machine of the configuration's device, by data sheets alone.

    ``stated`` describes its nodes.
    """
    device = config.device
    cluster = Cluster(stated=stated or StatedNodes())
    config = replace(config, parallelism=cluster.with_domain_nodes(config.parallelism, device))
    return Machine(
        name=device,
        running=config,
        steps=fit_steps(machine_times(config, stated=stated)),
        budget=MemoryBudget(capacity_nbytes=known_nbytes(device)),
        is_elsewhere=True,
        problems=(_untold(device),),
    )


def _untold(device: str) -> str:
    return f"{device}: not measured; its times come from data sheets"


def _on_device(
    measured: Measurements, device: str, problems: tuple[str, ...], stated: StatedNodes | None
) -> Machine:
    """Return the run transferred to an unmeasured device; between CPU and GPU, only its layout is
    transferred."""
    config = config_on(measured, device, stated)
    config = remaining_layout(with_measured_routing(config, measured.loads))
    if is_processor(measured.device) is not is_processor(device):
        note = (
            f"{device}: not measured; estimates rest on data sheets and published rates, and "
            f"what was measured on {measured.device} does not count"
        )
        alone = device_machine(config, stated)
        return replace(alone, name=measured.run_id, problems=(*problems, note))
    return Machine(
        name=measured.run_id,
        running=config,
        steps=steps_on(measured, device, stated),
        budget=replace(measured.budget, capacity_nbytes=known_nbytes(device)),
        is_elsewhere=True,
        problems=(*problems, _untold(device)),
    )


def _imported(tables: ImportedTables, name: str | None, stated: StatedNodes | None) -> Machine:
    rows = tables.machine(name)
    if stated is not None and stated.domain:
        cluster = Cluster(stated=stated)
        rows = tuple(_joined(row, cluster) for row in rows)
    last = rows[-1]
    peaks = [(row.config, row.measured_memory_nbytes) for row in rows]
    peaks = [memory_offset(config, int(nbytes)) for config, nbytes in peaks if nbytes]
    known = [KnownStep.of(row) for row in rows]
    return Machine(
        name=last.machine,
        running=last.config,
        steps=table_steps(rows[0], known, tables.operators, tables.collectives, stated),
        budget=MemoryBudget(
            capacity_nbytes=known_nbytes(last.config.device),
            offset_nbytes=int(np.median(peaks)) if peaks else None,
        ),
        problems=tables.problems,
    )


def _joined(row: StepRow, cluster: Cluster) -> StepRow:
    layout = cluster.with_domain_nodes(row.config.parallelism, row.config.device)
    return replace(row, config=replace(row.config, parallelism=layout))


def _elsewhere(directory: Path, running: RunConfig) -> tuple[KnownStep, ...]:
    """Return steps of another directory's runs and imports on the same kind of device."""
    if not has_run(directory):
        return read_imported(directory).known(running)
    loaded = load(directory, None)
    measured = Measurements(table=loaded.table)
    if device_prior(measured.recorded_config.device).name != device_prior(running.device).name:
        return ()
    return (*loaded.known, known_elsewhere(measured, running))
