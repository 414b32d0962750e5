"""Printable answers, and the forecast and decision that a run last published."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ... import __version__
from ...calib.errors import ForerunError, RecordError
from ...calib.forecast.evaluation import Ended
from ...calib.forecast.forecast_record import Forecast
from ...calib.records.iso_times import LONGEST_S, Action, action_text, stamped
from ...calib.units import format_time
from ...calib.workload.choices import NAMED_CHOICES, AxisValue, layout_label
from ...calib.workload.config import RunConfig
from ...calib.workload.config_json import decode, encode_fields
from ...calib.workload.model_shape import ModelShape

if TYPE_CHECKING:
    from ..known.machine import Machine
    from ..views.table import Part, ReportTable

_Published = TypeVar("_Published", bound="_PublishedAnswer")


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


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class _PublishedAnswer(PrintableAnswer):
    """Answer read from a published JSON object."""

    what: ClassVar[str]

    run_id: str
    whole: Mapping[str, Any] = field(default_factory=dict)
    """Complete JSON object."""

    @classmethod
    def of(cls: type[_Published], run_id: str, whole: Mapping[str, Any]) -> _Published:
        """Read the content of a published file; ``RecordError`` if it is damaged."""
        stated = {**whole, "run_id": run_id}
        try:
            return decode(cls, {**stated, "whole": stated})
        except ForerunError as err:
            raise RecordError(
                f"run {run_id} has no readable {cls.what} ({err}); delete the file that it is in, "
                "and the records are analysed again"
            ) from err

    def to_json(self) -> dict[str, Any]:
        """Return the complete JSON object."""
        return stamped(self.whole)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class RunForecast(_PublishedAnswer, Forecast):
    """Forecast of the run's end.  Intervals are 90 %; ``p95`` is exceeded with 5 % probability."""

    what: ClassVar[str] = "forecast"

    ended: Ended | None = None
    """How the run ended; None while it goes on."""

    @property
    def finish_p50(self) -> datetime:
        """Median of the end, in UTC."""
        return _moment(self.finish_p50_unix_s)

    @property
    def finish_p95(self) -> datetime:
        """95th percentile of the end, in UTC."""
        return _moment(self.finish_p95_unix_s)

    @property
    def sentence(self) -> str:
        """End of the run, forecast or actual, and the progress at the time of the forecast."""
        from ...calib.answers.finish_line import ended_text, format_moment  # slow to import

        if self.ended is not None:
            return ended_text(self.ended)
        steps = self.steps_done + self.steps_left
        # With dates, since a session may be read on another day.
        p50, p95 = (
            format_moment(end, 0.0) for end in (self.finish_p50_unix_s, self.finish_p95_unix_s)
        )
        words = [
            f"ends {p50} (by {p95} with 95 %)",
            f"{format_time(self.remaining_s)} left after step {self.steps_done:,} of {steps:,}",
            f"step {format_time(self.step_time_s)}",
        ]
        if self.gpu_hours is not None:
            words.append(f"{self.gpu_hours:.3g} GPU-hours")
        if self.cost is not None:
            words.append(f"cost {self.cost:,.2f}")
        return " · ".join(words)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class RunDecision(_PublishedAnswer):
    """Advice and its reasons."""

    what: ClassVar[str] = "decision"

    action: str
    """``continue``, printed as go on; ``stop``; or ``abstain``: too little is known."""
    confidence: float
    """Probability that a rule requires before it advises stopping."""

    @property
    def is_stop(self) -> bool:
        """True if the advice is to stop."""
        return self.action == Action.STOP.value

    @property
    def reasons(self) -> tuple[str, ...]:
        """Text of each rule."""
        texts = (row.get("text") for row in self._rows("reasons") if isinstance(row, dict))
        return tuple(text for text in texts if isinstance(text, str))

    @property
    def command(self) -> tuple[str, ...]:
        """Launch command with the layout worth a restart; empty if none is."""
        return tuple(map(str, self._rows("command")))

    @property
    def sentence(self) -> str:
        """Advice and its reasons."""
        why = "; ".join(self.reasons)
        return f"decision: {action_text(self.action)}" + (f" ({why})" if why else "")

    def _rows(self, name: str) -> list[Any]:
        rows = self.whole.get(name)
        return rows if isinstance(rows, list) else []


def _moment(unix_s: float) -> datetime:
    return datetime.fromtimestamp(min(max(unix_s, 0.0), 2 * LONGEST_S), timezone.utc)


class _NamedValues(PrintableAnswer):
    """Named values: a call in ``repr``, a table for people."""

    @property
    @abstractmethod
    def values(self) -> Mapping[str, Any]:
        """Values by name, in display order."""

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.values.items())
        return f"{type(self).__name__}({arguments})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Layout(_NamedValues):
    """Layout by the short names of its choices, such as ``tp``; complete in ``config``."""

    config: RunConfig

    def __getattr__(self, name: str) -> Any:
        """Return the value of the choice with this short name."""
        known = {one.name: one for one in NAMED_CHOICES}
        if name not in known:
            raise AttributeError(f"a layout has no {name}; it has {', '.join(known)}")
        return known[name].read(self.config)

    def __dir__(self) -> list[str]:
        """Return the names of all attributes, for completion in a notebook."""
        return [*super().__dir__(), *self.values]

    @property
    def label(self) -> str:
        """Short label, such as ``TP4 PP2 mbs2``."""
        return layout_label(self.config)

    @property
    def values(self) -> dict[str, AxisValue]:
        """Values by short name."""
        return {one.name: one.read(self.config) for one in NAMED_CHOICES}

    def to_json(self) -> dict[str, Any]:
        """Return label, short names and the complete configuration."""
        return stamped({"label": self.label, **self.values, "config": self.config.to_json()})

    def parts(self) -> Iterator[ReportTable]:
        """Yield a table of names and values."""
        from ..views.table import table_of

        yield table_of(
            "layout",
            f"Layout {self.label}",
            NAMED_CHOICES,
            {
                "name": lambda axis: axis.name,
                "value": lambda axis: str(self.values[axis.name]),
                "what": lambda axis: axis.help,
            },
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Model(_NamedValues, ModelShape):
    """Sizes of the model that a run trains, by the names of ``ModelShape``."""

    @staticmethod
    def of(shape: ModelShape) -> Model:
        """Return the model of a shape."""
        return Model(**{one.name: getattr(shape, one.name) for one in fields(shape)})

    @property
    def values(self) -> Mapping[str, Any]:
        """All sizes, by name."""
        return encode_fields(self)

    def to_json(self) -> dict[str, Any]:
        """Return all sizes, by name."""
        return stamped(self.values)

    def parts(self) -> Iterator[ReportTable]:
        """Yield a table of names and values, without sizes that the model does not have."""
        from ..views.table import table_of

        rows = [(name, str(value)) for name, value in self.values.items() if value is not None]
        cells = {"name": lambda pair: pair[0], "value": lambda pair: pair[1]}
        yield table_of("model", "Model", rows, cells)
