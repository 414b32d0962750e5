"""What every answer has: it shows itself as text, in a notebook and as JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__

if TYPE_CHECKING:
    from ...calib.workload import RunConfig
    from ..known import Machine
    from ..views import Part


class Told(ABC):
    """An answer.  ``str`` is what the verb prints, and ``repr`` where that is no longer than a
    screen; a notebook shows tables.

    What draws tables is imported where one is drawn: it is slow to, and programs read JSON.
    """

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """What the verb prints for programs with ``--json``: one JSON object."""

    @property
    def sentence(self) -> str:
        """The answer in a sentence."""
        return ""

    def parts(self) -> Iterable[Part]:
        """The answer for people: tables, sentences, and several lines that stand as they are."""
        return (self.sentence,)

    def __str__(self) -> str:
        from ..views import text_of

        return text_of(self.parts())

    def __repr__(self) -> str:
        return str(self)

    def _repr_markdown_(self) -> str:
        from ..views import markdown_of

        return markdown_of(self.parts())

    def _repr_html_(self) -> str:
        from ..views import html_of

        return html_of(self.parts())


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class LayoutAnswer(Told):
    """What the step model answers of one layout, or of two."""

    machine: Machine
    """The model that it was asked of."""
    left_out: tuple[str, ...] = ()
    """What a description of another run says and the model does not know."""

    @property
    def run_id(self) -> str:
        """The run, or the machine that was imported."""
        return self.machine.name

    @property
    def notes(self) -> tuple[str, ...]:
        """All that a reader should know beside it: also damaged records, and what was not
        measured."""
        return (*self.left_out, *self.machine.problems)

    @property
    @abstractmethod
    def layouts(self) -> Mapping[str, RunConfig]:
        """The layouts whose steps it is about, by their names."""

    def write_timeline(self, path: Path | str) -> None:
        """Write the steps of all layouts as a trace for Perfetto, a process each on one scale;
        compressed where the name ends in ``.gz``.  ``OSError`` where the file cannot be written."""
        # Of use here alone, and slow to import.
        from ...calib.answers import PREDICTED, step_trace
        from ...calib.records import write_json

        steps, named = self.machine.steps, self.layouts.items()
        estimates = {f"{PREDICTED}, {name}": steps.estimate(one) for name, one in named}
        write_json(Path(path), step_trace(estimates, version=__version__))
