"""What every answer has: it shows itself as text, in a notebook and as JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..report.table import ReportTable


class Told(ABC):
    """An answer.  ``str`` is what the verb prints, and ``repr`` where that is no longer than a
    screen; a notebook shows tables.

    What draws tables is imported where one is drawn: it is slow to, and programs read JSON.
    """

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """What the verb prints for programs with ``--json``: one JSON object."""

    @abstractmethod
    def parts(self) -> Iterable[ReportTable | str]:
        """The answer for people: tables, lines, and several lines that stand as they are."""

    def __str__(self) -> str:
        from .drawn import text_of

        return text_of(self.parts())

    def __repr__(self) -> str:
        return str(self)

    def _repr_markdown_(self) -> str:
        from .drawn import markdown_of

        return markdown_of(self.parts())

    def _repr_html_(self) -> str:
        from .drawn import html_of

        return html_of(self.parts())
