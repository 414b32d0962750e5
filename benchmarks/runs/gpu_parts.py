"""Events against kernels: each operator's time by events and by the sum of its kernels."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from forerun.calib.fit import calibrate
from forerun.calib.records import OperatorRecord, RunRecords, TraceRecord
from forerun.calib.samples import build_table
from forerun.calib.workload import Phase

SHORT_S = 20e-6
"""Seconds; operators below this are mostly launch time: shown, not judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number, its bar (None: shown only), and whether it is met."""

    name: str
    value: float
    bar: float | None = None
    note: str = ""

    @property
    def is_met(self) -> bool:
        """True if there is no bar or the value does not pass it."""
        return self.bar is None or self.value <= self.bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Results of one part."""

    title: str
    figures: tuple[Figure, ...]
    rows: tuple[tuple[str, ...], ...] = ()
    """A table; its first row is the head."""
    notes: tuple[str, ...] = field(default=())


def kineto_part(run: RunRecords) -> Part:
    """Compare each operator by events with the sum of its kernels."""
    table = build_table(run)
    records = [record for rank_records in run.records.values() for record in rank_records]
    events = _by_operator(r for r in records if isinstance(r, OperatorRecord))
    kernels = _by_operator(r for r in records if isinstance(r, TraceRecord))
    if not kernels:
        names = [r.name for r in records if getattr(r, "name", "").startswith("trace")]
        raise ValueError(f"nothing was traced: {', '.join(names) or 'no reason given'}")
    rows, errors = [("operator", "events", "kernels", "difference")], []
    for key in sorted(events.keys() & kernels.keys()):
        by_event, by_kernel = events[key], kernels[key]
        if by_event >= SHORT_S:
            errors.append(abs(by_event / by_kernel - 1))
        difference = f"{by_event / by_kernel - 1:+.1%}"
        rows.append((key, f"{by_event * 1e6:.1f} us", f"{by_kernel * 1e6:.1f} us", difference))
    shared = sorted(events.keys() & kernels.keys())
    total = sum(events[k] for k in shared) / sum(kernels[k] for k in shared) - 1
    fracs = calibrate(table, device=table.config().device).weight_fracs
    shares = ", ".join(f"{kind.value} {share:.2f}" for kind, share in fracs.items())
    return Part(
        title="Events against Kineto, by operator",
        figures=(
            Figure(
                name="largest difference", value=max(errors, default=0.0), bar=0.03,
                note=f"of {len(errors)} operators of {SHORT_S * 1e6:.0f} us or more",
            ),
            Figure(name="all operators together", value=abs(total), bar=0.03),
        ),
        rows=tuple(rows),
        notes=(f"weight gradient's share of the backward phase: {shares}",),
    )  # fmt: skip


def _by_operator(records: Iterable[OperatorRecord | TraceRecord]) -> dict[str, float]:
    """Return median seconds by operator, with both gradients of a linear added."""
    gradients = (Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT)
    runs: dict[tuple, int] = defaultdict(int)
    for n, r in enumerate(records):
        is_part = r.phase in gradients
        phase = Phase.BACKWARD if is_part else r.phase
        name = f"{r.kind.value} {phase.value} {'x'.join(map(str, r.shape))}"
        # Both gradients follow each other, layer by layer; all others are separate runs.
        place = (r.step, r.microbatch, r.layer) if is_part else n
        runs[name, place] += r.duration_ns
    times: dict[str, list[int]] = defaultdict(list)
    for (name, _), duration_ns in runs.items():
        times[name].append(duration_ns)
    return {
        name: statistics.median(operator_times_ns) / 1e9
        for name, operator_times_ns in times.items()
    }
