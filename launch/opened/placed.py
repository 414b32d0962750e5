"""Whether a run is as fast as published ones: ``forerun normal``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...calib.differences.bus_rates import bus_rates
from ...calib.differences.normal import Normal, normal
from ...calib.errors import CalibrationError
from ...calib.records.step_rows import StepRow
from ..known.published_rows import FOLDER, published_rows
from ..known.runs import has_run, read
from ..known.table_files import read_frame
from ..report.explain_text import wrapped
from .run import Run


def placed(run: Run) -> Normal:
    """The run, or the machine that was imported, among published runs.

    Raises ``CalibrationError`` where no step was measured, or nothing is published of its device.
    """
    machine = run.machine()
    own, name, time_s = machine.own, machine.name, machine.steps.measured_s(machine.own)
    if time_s is None:
        raise CalibrationError(f"no step of {name} was measured; record a run of steps")
    row = StepRow(table="", row_id="", config=own, measured_s=time_s, machine=name, group="")
    sources = dict(read_frame(FOLDER / "sources.csv").to_numpy().tolist())
    found = normal(row, machine.steps, published_rows(), sources)
    if run.asked_machine is not None or not has_run(run.directory):
        return found
    table = read(run.directory, run.asked_run_id).table
    rates = bus_rates(table, read_frame(FOLDER / "bus_bandwidths.csv"))
    return replace(found, groups=tuple(rates.to_dict(orient="records")))


def placed_lines(found: Normal) -> Iterator[str]:
    """Everything that is said, line by line."""
    yield from wrapped(found.sentence)
    for number, row in enumerate(found.near, 1):
        rate = f"{row.flop_per_s_per_gpu / 1e12:.0f} TFLOP/s per GPU ({_effect(row.rate_frac)})"
        parts = " · ".join(filter(None, (row.model, rate, row.framework, row.source)))
        told = ", ".join(f"{one.text} ({_effect(one.rate_frac)})" for one in row.settings)
        yield ""
        yield from wrapped(f"{number}. {parts}", "   ")
        yield from wrapped(f"   they: {told or 'no setting that matters'}", "   ")
        yield f"   all of theirs here, by the model: {_effect(row.modelled_frac)}"
    for one in found.groups:
        ends = (one[f"{end}bytes_per_s"] / 1e9 for end in ("", "low_", "high_"))
        own, low, high = (f"{rate:.0f}" for rate in ends)
        kind = f"{one['collective']} of {one['num_ranks']} ranks on {one['num_nodes']} node(s)"
        text = f"{kind}: {own} GB/s; published {low} to {high} ({one['source']})"
        yield from ("", *wrapped(text, "   "))


def _effect(frac: float | None) -> str:
    """A change of a rate.

    >>> _effect(0.142), _effect(-0.031), _effect(None)
    ('+14.2 %', '-3.1 %', 'not by itself')
    """
    return "not by itself" if frac is None else f"{100 * frac:+.1f} %"
