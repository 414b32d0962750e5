"""Comparison of a run with published ones: ``forerun normal``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...calib.differences.norms import Normal, bus_rates, near_rows, normal
from ...calib.errors import CalibrationError
from ...calib.records.step_rows import StepRow
from ...calib.units import format_frac
from ..known.runs import has_run, read
from ..known.table_files import FOLDER, published_rows, read_frame
from ..views.table import wrapped
from .run import Run


def place_among_published(run: Run) -> Normal:
    """Compare the run, or the imported machine, with published runs.

    Raises ``CalibrationError`` if no step was measured or nothing is published for its device.
    """
    machine = run.machine()
    running, name, time_s = machine.running, machine.name, machine.steps.measured_s(machine.running)
    if time_s is None:
        raise CalibrationError(f"no step of {name} was measured; record a run of steps")
    row = StepRow(table="", row_id="", config=running, measured_s=time_s, machine=name, group="")
    sources = dict(read_frame(FOLDER / "sources.csv").to_numpy().tolist())
    near = near_rows(row, machine.steps, published_rows(), sources)
    placement = replace(normal(row, published_rows()), near=near)
    if run.asked_machine is not None or not has_run(run.directory):
        return placement
    table = read(run.directory, run.asked_run_id).table
    rates = bus_rates(table, read_frame(FOLDER / "bus_bandwidths.csv"))
    return replace(placement, groups=tuple(rates.to_dict(orient="records")))


def placement_lines(placement: Normal) -> Iterator[str]:
    """Yield the text of the comparison, line by line."""
    yield from wrapped(placement.sentence)
    for number, row in enumerate(placement.near, 1):
        change = format_frac(row.rate_frac, signed=True)
        rate = f"{row.flop_per_s_per_gpu / 1e12:.0f} TFLOP/s per GPU ({change})"
        parts = " · ".join(filter(None, (row.model, rate, row.framework, row.source)))
        yield ""
        yield from wrapped(f"{number}. {parts}", "   ")
        settings_text = ", ".join(one.priced_text for one in row.settings)
        yield from wrapped(f"   they: {settings_text or 'no setting that matters'}", "   ")
        whole = format_frac(row.modelled_frac, signed=True)
        yield f"   all of theirs here, by the model: {whole}"
    for one in placement.groups:
        measured, low, high = (one[f"{end}bytes_per_s"] / 1e9 for end in ("", "low_", "high_"))
        kind = f"{one['collective']} of {one['num_ranks']} ranks on {one['num_nodes']} node(s)"
        text = f"{kind}: {measured:.0f} GB/s; published {low:.0f} to {high:.0f} ({one['source']})"
        yield from ("", *wrapped(text, "   "))
