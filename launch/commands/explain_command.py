"""``forerun explain``: why a layout takes what it takes, and why it is faster than another."""

from __future__ import annotations

import argparse

from ...calib.advice.explain import Explanation
from ...calib.advice.explain import explain as make_explanation
from ...calib.advice.named_layouts import named_layout
from ...calib.advice.plan import plan as make_plan
from ...calib.errors import ConfigError
from ...calib.search.found import TOP
from ...calib.workload.config import RunConfig
from ...calib.workload.model_shape import at_least_one, at_most
from ..known.machines import Machine
from ..report.explain_text import explanation_lines
from .answer_commands import described, machine_of
from .outcome import ExitCode, print_json, tell
from .search_effort import search_effort


def explain(args: argparse.Namespace) -> int:
    """Print the terms of a step, or of the difference of two."""
    if args.gpus is not None:
        at_least_one("--gpus", args.gpus)
        at_most("--gpus", args.gpus)
    machine = machine_of(args, args.device)
    named = _Named(args, machine)
    found = make_explanation(
        named.layout(args.layout), named.layout(args.other) if args.other else None, machine.steps
    )
    if args.json:
        print_json({"run_id": machine.name, **found.to_json()})
    else:
        tell(*machine.problems)
        for line in explanation_lines(found):
            print(line)
    if args.svg is not None:
        _draw(args, found)
    return ExitCode.ANSWER


class _Named:
    """Layouts by name; a plan is made where a row of it is asked for."""

    def __init__(self, args: argparse.Namespace, machine: Machine) -> None:
        self._machine = machine
        self._num_ranks: int = args.gpus or 0
        self._running = described(args, machine.own, args.gpus or 0) or machine.own
        self._rows: tuple[RunConfig, ...] | None = None

    def layout(self, text: str) -> RunConfig:
        if not text.strip().isdecimal():
            return named_layout(text, self._running, self._num_ranks)
        number, rows = int(text), self._planned()
        if not 1 <= number <= len(rows):
            raise ConfigError(f"row {number} is not in the plan, which has rows 1 to {len(rows)}")
        return rows[number - 1]

    def _planned(self) -> tuple[RunConfig, ...]:
        if self._rows is None:
            with search_effort(TOP) as effort:
                found = make_plan(
                    self._running,
                    self._machine.steps,
                    num_ranks=self._num_ranks or self._running.parallelism.num_ranks,
                    memory_capacity_nbytes=self._machine.memory_capacity_nbytes,
                    memory_offset_nbytes=self._machine.memory_offset_nbytes,
                    effort=effort,
                )
            self._rows = tuple(candidate.config for candidate in found.candidates)
        return self._rows


def _draw(args: argparse.Namespace, found: Explanation) -> None:
    # Of use here alone, and slow to import.
    from ...calib.records.json_files import write_text
    from ..report.waterfall import waterfall_svg

    write_text(args.svg, waterfall_svg(found))
    tell(f"waterfall written to {args.svg}")
