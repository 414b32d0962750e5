"""Registry of sinks.  To add one, write a module next to this one and a line in ``SINKS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ...calib.records import UnsentValues
from ...calib.shell import printable
from ...hooks.process import CompanionSettings
from .prometheus_sink import open_prometheus
from .sink import Sink
from .slurm_sink import open_slurm
from .tensorboard_sink import open_tensorboard
from .trainjob_sink import open_trainjob
from .wandb_sink import open_wandb

OpenSink = Callable[[CompanionSettings], Sink]
SINKS: dict[str, OpenSink] = {
    "W&B": open_wandb,
    "TensorBoard": open_tensorboard,
    "Prometheus": open_prometheus,
    "TrainJob": open_trainjob,
    "Slurm": open_slurm,
}
"""Openers by the sink's name in the log."""


class AllSinks(Sink):
    """Forwards to all registered sinks; a failure of one is logged and disables it."""

    def __init__(
        self,
        companion_settings: CompanionSettings,
        notify: Callable[[str], object],
        sinks: Mapping[str, OpenSink] = SINKS,
    ) -> None:
        self._notify = notify
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
