"""Answers that show themselves, and the forecast and decision that a run last published."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...calib.arguments import LAYOUT_NAMES
from ...calib.errors import RecordError
from ...calib.records import LONGEST_S, Action, action_text, stamped
from ...calib.search import layout_label
from ...calib.units import format_time
from ...calib.workload import ModelShape, RunConfig, encode_fields
from ..store import ForecastFile

if TYPE_CHECKING:
    from ..known import Machine
    from ..views import Part, ReportTable


class PrintableAnswer(ABC):
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
class LayoutAnswer(PrintableAnswer):
    """What the step model answers of one layout, or of two."""

    machine: Machine
    """The model that it was asked of."""
    description_notes: tuple[str, ...] = ()
    """What a description of another run says and the model does not know."""

    @property
    def run_id(self) -> str:
        """The run, or the machine that was imported."""
        return self.machine.name

    @property
    def notes(self) -> tuple[str, ...]:
        """All that a reader should know beside it: also damaged records, and what was not
        measured."""
        return (*self.description_notes, *self.machine.problems)

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


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class _PublishedAnswer(PrintableAnswer):
    """What an object of JSON says."""

    run_id: str
    whole: Mapping[str, Any] = field(default_factory=dict)
    """All that was said."""

    def to_json(self) -> dict[str, Any]:
        """All that was said."""
        return stamped(self.whole)


def _value(whole: Mapping[str, Any], name: str, kind: str) -> Any:
    """A number or a text; raises ``RecordError`` where it is missing or of another kind."""
    given = whole.get(name)
    is_right = isinstance(given, str) if kind == "str" else isinstance(given, (int, float))
    if not is_right or isinstance(given, bool):
        raise RecordError(
            f"the run has no readable {name}; delete the file that it is in, and the records are "
            "analysed again"
        )
    return given


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class RunForecast(_PublishedAnswer, ForecastFile):
    """When the run ends.  Intervals are 90 %; ``p95`` has 5 % beyond it."""

    gpu_hours: float | None = None
    """Of this launch to its end; None on processors that have no price."""
    cost: float | None = None
    energy_j: float | None = None
    ended_unix_s: float | None = None
    """The end itself, where it has come."""

    @staticmethod
    def of(run_id: str, whole: Mapping[str, Any], ended_unix_s: float | None) -> RunForecast:
        """What ``forecast.json`` says; ``RecordError`` where it is damaged."""
        named = {one.name: _value(whole, one.name, "float") for one in fields(ForecastFile)}
        for name in ("gpu_hours", "cost", "energy_j"):
            named[name] = None if whole.get(name) is None else _value(whole, name, "float")
        whole = {**whole, "run_id": run_id}
        return RunForecast(run_id=run_id, whole=whole, ended_unix_s=ended_unix_s, **named)

    @property
    def finish_p50(self) -> datetime:
        """The end as likely before as after, in UTC."""
        return _moment(self.finish_p50_unix_s)

    @property
    def finish_p95(self) -> datetime:
        """The end that 5 % lie beyond, in UTC."""
        return _moment(self.finish_p95_unix_s)

    @property
    def sentence(self) -> str:
        """When it ends, or ended, and what was done by when that was said."""
        from ...calib.answers import format_moment  # slow to import

        if self.ended_unix_s is not None:
            return f"ended {format_moment(self.ended_unix_s, 0.0)}"
        steps = self.steps_done + self.steps_left
        # With their dates: a session may be of another day.
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
    """What is advised, and why."""

    action: str
    """``continue``, which lines tell as go on; ``stop``; ``abstain``: too little is known."""
    confidence: float
    """What a rule has to be sure of before it speaks for stopping."""

    @staticmethod
    def of(run_id: str, whole: Mapping[str, Any]) -> RunDecision:
        """What ``decision.json`` says; ``RecordError`` where it is damaged."""
        return RunDecision(
            run_id=run_id,
            whole={**whole, "run_id": run_id},
            action=_value(whole, "action", "str"),
            confidence=_value(whole, "confidence", "float"),
        )

    @property
    def is_stop(self) -> bool:
        """True where the advice is to stop."""
        return self.action == Action.STOP.value

    @property
    def reasons(self) -> tuple[str, ...]:
        """What each rule says, in words."""
        texts = (row.get("text") for row in self._rows("reasons") if isinstance(row, dict))
        return tuple(text for text in texts if isinstance(text, str))

    @property
    def command(self) -> tuple[str, ...]:
        """The launch with the layout that would be worth a restart; empty where none is."""
        return tuple(map(str, self._rows("command")))

    @property
    def sentence(self) -> str:
        """The advice and its reasons."""
        why = "; ".join(self.reasons)
        return f"decision: {action_text(self.action)}" + (f" ({why})" if why else "")

    def _rows(self, name: str) -> list[Any]:
        rows = self.whole.get(name)
        return rows if isinstance(rows, list) else []


def _moment(unix_s: float) -> datetime:
    return datetime.fromtimestamp(min(max(unix_s, 0.0), 2 * LONGEST_S), timezone.utc)


class _NamedValues(PrintableAnswer):
    """Values by their names: a call in ``repr``, a table for people."""

    @property
    @abstractmethod
    def values(self) -> Mapping[str, Any]:
        """Values by name, in the order in which they are shown."""

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.values.items())
        return f"{type(self).__name__}({arguments})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Layout(_NamedValues):
    """A layout by its short names (``calib/arguments/short_names.py``), and whole in ``config``."""

    config: RunConfig
    gpus: int
    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    etp: int
    dp: int
    sp: str
    mbs: int
    """Micro-batch, samples."""
    gbs: int
    """Samples of a step."""
    seq: int
    """Tokens of a sample."""
    recompute: str
    sharding: str
    instances: int

    @staticmethod
    def of(config: RunConfig) -> Layout:
        """The layout of a run."""
        values: dict[str, Any] = {axis.name: axis.read(config) for axis in LAYOUT_NAMES}
        return Layout(config=config, **values)

    @property
    def label(self) -> str:
        """In short, as ``TP4 PP2 mbs2``."""
        return layout_label(self.config)

    @property
    def values(self) -> dict[str, int | str]:
        """By short name."""
        return {axis.name: getattr(self, axis.name) for axis in LAYOUT_NAMES}

    def to_json(self) -> dict[str, Any]:
        """Label, short names, and the whole configuration."""
        return stamped({"label": self.label, **self.values, "config": self.config.to_json()})

    def parts(self) -> Iterator[ReportTable]:
        """A table of names and values."""
        from ..views import table_of

        yield table_of(
            "layout",
            f"Layout {self.label}",
            LAYOUT_NAMES,
            {
                "name": lambda axis: axis.name,
                "value": lambda axis: str(self.values[axis.name]),
                "what": lambda axis: axis.help,
            },
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Model(_NamedValues, ModelShape):
    """The sizes of the model that a run trains, under the names of ``ModelShape``."""

    @staticmethod
    def of(shape: ModelShape) -> Model:
        """The model of a shape."""
        return Model(**{one.name: getattr(shape, one.name) for one in fields(shape)})

    @property
    def values(self) -> Mapping[str, Any]:
        """Every size."""
        return encode_fields(self)

    def to_json(self) -> dict[str, Any]:
        """Every size."""
        return stamped(self.values)

    def parts(self) -> Iterator[ReportTable]:
        """A table of names and values; what the model has not is left out."""
        from ..views import table_of

        rows = [(name, str(value)) for name, value in self.values.items() if value is not None]
        cells = {"name": lambda pair: pair[0], "value": lambda pair: pair[1]}
        yield table_of("model", "Model", rows, cells)
