"""Prometheus sink: newest values as a text file for node exporter's textfile collector.

Names and units follow Prometheus's conventions: base units, ``_ratio`` for a fraction of 1.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...calib.records.files import CREATED_BY, replace_file
from ...calib.records.run_values import RUN_VALUES
from ...hooks.process.settings import CompanionSettings
from .sink import LatestValues, Sink

EVERY_S = 3.0
_ENDS = (
    ("unix_s", "timestamp_seconds", 1.0),
    ("_per_s", "_per_second", 1.0),
    ("_per_s_per_gpu", "_per_second_per_gpu", 1.0),
    ("_s", "_seconds", 1.0),
    ("_h", "_seconds", 3600.0),
    ("_frac", "_ratio", 1.0),
)
"""Our suffix, theirs, and the factor from our unit to theirs; the first match applies."""


def open_prometheus(companion_settings: CompanionSettings) -> Sink:
    """Return the sink of the requested file, replaced at most every ``EVERY_S`` seconds."""
    if companion_settings.settings.prometheus is None:
        return Sink("")
    path = companion_settings.settings.prometheus.expanduser().absolute()
    labels = _labels(
        run_id=companion_settings.settings.rank.run_id, launch=companion_settings.launch_id
    )
    return LatestValues(
        str(path),
        lambda values: replace_file(path, exposition(values, labels)),
        every_s=EVERY_S,
        name="prometheus",
    )


def exposition(values: Mapping[str, float], labels: str) -> str:
    """Return the file's text: help, type and value of each name.

    >>> print(exposition({"step_time_s": 1.5}, '{launch="l"}'), end="")
    # created_by: forerun
    # HELP forerun_step_time_seconds Time of the step, from its start to the next one's.
    # TYPE forerun_step_time_seconds gauge
    forerun_step_time_seconds{launch="l"} 1.5
    """
    lines = [f"# {CREATED_BY}"]
    for name, value in values.items():
        theirs, factor = prometheus_name(name)
        meaning = RUN_VALUES[name].meaning if name in RUN_VALUES else name
        lines += [
            f"# HELP {theirs} {meaning}",
            f"# TYPE {theirs} gauge",
            f"{theirs}{labels} {value * factor!r}",
        ]
    return "\n".join(lines) + "\n"


def prometheus_name(name: str) -> tuple[str, float]:
    """Return Prometheus's name for one of ours, and the factor from our unit to the base unit.

    >>> prometheus_name("eta_h"), prometheus_name("mfu_frac")
    (('forerun_eta_seconds', 3600.0), ('forerun_mfu_ratio', 1.0))
    """
    for end, theirs, factor in _ENDS:
        if name.endswith(end):
            return f"forerun_{name.removesuffix(end)}{theirs}", factor
    return f"forerun_{name}", 1.0


def _labels(**labels: str) -> str:
    return "{" + ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
