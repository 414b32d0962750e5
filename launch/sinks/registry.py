"""The sinks that there are.  A new one is a file beside this, and a line in ``SINKS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ...calib.records import Unsent
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
"""By the name that the log has for them."""


class AllSinks(Sink):
    """Every sink of the registry behind one door; what goes wrong in one is a line in the log."""

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
        self._unsent = Unsent()
        destinations = {name: sink.where for name, sink in self._open.items() if sink.where}
        super().__init__(" · ".join(f"{name}: {where}" for name, where in destinations.items()))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """To all of them the same, without constants that they have."""
        new_values = self._unsent.of(values)
        self._each(lambda sink: sink.step(step, new_values))

    def tables(self, step: int, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        self._each(lambda sink: sink.tables(step, tables))

    def score(self, summary: Mapping[str, Any]) -> None:
        self._each(lambda sink: sink.score(summary))

    def alert(self, title: str, text: str) -> None:
        self._each(lambda sink: sink.alert(title, text))

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
        except Exception as err:  # a sink has errors of its own, of networks and files alike
            self._open[name] = Sink()
            self._notify(f"{name} is off: {err}")
