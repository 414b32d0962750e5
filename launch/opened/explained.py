"""Why a layout takes what it takes, and why it is faster than another: ``forerun explain``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ...calib.advice import Candidate, Explanation, explain, named_layout
from ...calib.errors import ConfigError
from ...calib.records import stamped
from ...calib.search import TOP
from ...calib.steps import FittedSteps
from ...calib.workload import RunConfig, at_least_one, at_most
from ..known.machine import Machine, plan_on
from ..report.explain_text import explanation_lines
from .layout import Layout
from .other_run import OtherRun
from .told import Told
from .traced import write_trace

if TYPE_CHECKING:
    from .planned import Searching

Named: TypeAlias = "str | int | Layout | Candidate"
"""A layout: as a plan prints it (``TP4 PP2``), as a change of the running one (``tp4 pp2``),
``running``, a row of the plan, or one that an answer holds."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ExplainAnswer(Told):
    """The terms of a step, or of the difference of two."""

    run_id: str
    found: Explanation
    steps: FittedSteps
    """The model that it was asked of."""
    left_out: tuple[str, ...] = ()
    """What a description of another run says and the model does not know."""
    problems: tuple[str, ...] = ()
    """Damaged records, and what was not measured."""

    @property
    def notes(self) -> tuple[str, ...]:
        """All that a reader should know beside it."""
        return (*self.left_out, *self.problems)

    @property
    def sentence(self) -> str:
        """Where most of the step goes, or what decides between the two."""
        return self.found.sentence

    def to_json(self) -> dict[str, Any]:
        """As ``forerun explain --json``."""
        return stamped({"run_id": self.run_id, **self.found.to_json()})

    def write_svg(self, path: Path | str) -> None:
        """Draw the terms as a waterfall into a file."""
        # Of use here alone, and slow to import.
        from ...calib.records import write_text
        from ..drawing.waterfall import waterfall

        write_text(Path(path), waterfall(self.found).alone())

    def write_timeline(self, path: Path | str) -> None:
        """Write the step, or both, as a trace for Perfetto on one scale."""
        layouts = {"A": self.found.one.estimate.config}
        if self.found.difference is not None:
            layouts["B"] = self.found.difference.other.estimate.config
        write_trace(path, self.steps, layouts)

    def parts(self) -> Iterator[str]:
        """All lines, as they stand."""
        yield "\n".join(explanation_lines(self.found))


def explained(
    machine_on: Callable[[], Machine],
    one: Named,
    other: Named | None,
    num_ranks: int | None,
    described: OtherRun,
    searching: Searching,
) -> ExplainAnswer:
    """The terms of a layout's step, or of what it takes more than another's.

    Raises ``ConfigError`` where a name is none, a row is not there, or a layout cannot run.
    """
    if num_ranks is not None:
        at_least_one("--gpus", num_ranks)
        at_most("--gpus", num_ranks)
    machine = machine_on()
    machine, running, notes = described.of(machine, num_ranks or 0)
    names = _Names(machine, running, num_ranks or 0, searching)
    config = names.layout(one)
    against = None if other is None else names.layout(other)
    return ExplainAnswer(
        run_id=machine.name,
        found=explain(config, against, machine.steps),
        steps=machine.steps,
        left_out=notes,
        problems=machine.problems,
    )


class _Names:
    """Layouts by name; a plan is made where a row of it is asked for."""

    def __init__(
        self, machine: Machine, running: RunConfig, num_ranks: int, searching: Searching
    ) -> None:
        self._machine, self._running = machine, running
        self._num_ranks, self._searching = num_ranks, searching
        self._rows: tuple[RunConfig, ...] | None = None

    def layout(self, named: Named) -> RunConfig:
        if isinstance(named, Layout | Candidate):
            return named.config
        text = str(named)
        if not text.strip().isdecimal():
            return named_layout(text, self._running, self._num_ranks)
        number, rows = int(text), self._planned()
        if number == 0:  # as tables of layouts number the one that runs
            return self._running
        if not 1 <= number <= len(rows):
            raise ConfigError(f"row {number} is not in the plan; give one from 0 to {len(rows)}")
        return rows[number - 1]

    def _planned(self) -> tuple[RunConfig, ...]:
        if self._rows is None:
            with self._searching(TOP) as effort:
                num_ranks = self._num_ranks or self._running.parallelism.num_ranks
                found = plan_on(self._machine, self._running, num_ranks, effort=effort)
            self._rows = tuple(candidate.config for candidate in found.candidates)
        return self._rows
