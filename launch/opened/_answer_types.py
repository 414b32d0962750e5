"""Printable answers: text, JSON and notebook forms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...calib.workload.config import RunConfig

if TYPE_CHECKING:
    from ..known.machine import Machine
    from ..views.table import Part


class PrintableAnswer(ABC):
    """Answer with text, JSON and notebook forms.  ``str`` is what the verb prints; ``repr`` is that
    cut to a screen; a notebook shows tables.

    The table printer is imported on use: it is slow to import, and programs read JSON.
    """

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that the verb prints with ``--json``."""

    @property
    def sentence(self) -> str:
        """Answer in one sentence."""
        return ""

    def parts(self) -> Iterable[Part]:
        """Return the answer for people: tables, sentences, and preformatted lines."""
        return (self.sentence,)

    def __str__(self) -> str:
        from ..views.table import text_of

        return text_of(self.parts())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from ..views.table import html_of

        return html_of(self.parts())


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class LayoutAnswer(PrintableAnswer):
    """Step-model answer on one or two layouts."""

    machine: Machine
    """Step model that gave the answer."""
    description_notes: tuple[str, ...] = ()
    """Settings of another run's description that the model does not cover."""

    @property
    def run_id(self) -> str:
        """Run id, or name of the imported machine."""
        return self.machine.name

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the reader, including damaged records and anything not measured."""
        return (*self.description_notes, *self.machine.problems)

    @property
    @abstractmethod
    def layouts(self) -> Mapping[str, RunConfig]:
        """Layouts whose steps the answer covers, by name."""

    def write_timeline(self, path: Path | str) -> None:
        """Write the steps of all layouts as a Perfetto trace, one process each on a common scale;
        compressed if the name ends in ``.gz``.  Raises ``OSError`` if the file cannot be
        written."""
        # Slow to import, and used only here.
        from ...calib.answers.step_traces import PREDICTED, step_trace
        from ...calib.records.files import write_json

        steps, named = self.machine.steps, self.layouts.items()
        estimates = {f"{PREDICTED}, {name}": steps.estimate(one) for name, one in named}
        write_json(Path(path), step_trace(estimates, version=__version__))
