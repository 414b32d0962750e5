"""Registry of sinks.

To add one, write a module next to this one and a line in ``SINKS``, or in a package elsewhere an
entry point of the group ``forerun.sinks``, whose name is the sink's in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ...calib.records.run_values import UnsentValues
from ...calib.shell import printable
from ...hooks.process.settings import CompanionSettings
from ...leaves import leaf
from .sink import Sink

OpenSink = Callable[[CompanionSettings], Sink]
SINKS: dict[str, str] = {
    "W&B": ".wandb_sink:open_wandb",
    "TensorBoard": ".tensorboard_sink:open_tensorboard",
    "Prometheus": ".prometheus_sink:open_prometheus",
    "TrainJob": ".trainjob_sink:open_trainjob",
    "Slurm": ".slurm_sink:open_slurm",
}
"""Module and opener by the sink's name in the log."""
GROUP = "forerun.sinks"


def registered_sinks() -> dict[str, OpenSink]:
    """Return the openers of all sinks, those of other packages last; a name of ours stays ours."""
    found = {name: leaf(place, __package__ or "") for name, place in SINKS.items()}
    with suppress(Exception):  # an installation elsewhere may be damaged
        for one in entry_points(group=GROUP):
            found.setdefault(one.name, partial(_load, one))
    return {name: opener for name, opener in found.items() if opener is not None}


def _load(entry_point: EntryPoint, companion_settings: CompanionSettings) -> Sink:
    return entry_point.load()(companion_settings)


class AllSinks(Sink):
    """Forwards to all registered sinks; a failure of one is logged and disables it."""

    def __init__(
        self,
        companion_settings: CompanionSettings,
        notify: Callable[[str], object],
        sinks: Mapping[str, OpenSink] | None = None,
    ) -> None:
        self._notify = notify
        sinks = registered_sinks() if sinks is None else sinks
        self._open = dict.fromkeys(sinks, Sink())
        for name, opener in sinks.items():
            self._guard(name, partial(self._begin, name, opener, companion_settings))
        self._unsent = UnsentValues()
        destinations = {name: sink.where for name, sink in self._open.items() if sink.where}
        super().__init__(" · ".join(f"{name}: {where}" for name, where in destinations.items()))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values to all sinks, without constants already sent."""
        new_values = self._unsent.of(values)
        self._each(lambda sink: sink.step(step, new_values))

    def tables(self, step: int, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        self._each(lambda sink: sink.tables(step, tables))

    def score(self, summary: Mapping[str, Any]) -> None:
        self._each(lambda sink: sink.score(summary))

    def alert(self, title: str, text: str) -> None:
        self._each(lambda sink: sink.alert(printable(title), printable(text)))

    def close(self, summary: Mapping[str, Any]) -> None:
        self._each(lambda sink: sink.close(summary))

    def _each(self, act: Callable[[Sink], object]) -> None:
        for name in self._open:
            self._guard(name, partial(act, self._open[name]))

    def _begin(self, name: str, opener: OpenSink, companion_settings: CompanionSettings) -> None:
        self._open[name] = sink = opener(companion_settings)
        sink.notify = lambda text: self._notify(f"{name}: {text}")

    def _guard(self, name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as err:  # sinks raise their own error types, for networks and files
            self._open[name] = Sink()
            self._notify(f"{name} is off: {err}")
