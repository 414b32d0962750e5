"""A plan as a table of pandas and as a chart of matplotlib, where that is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pandas as pd

from ...calib.errors import ConfigError

if TYPE_CHECKING:
    from .one_plan import OnePlan

_OPENED = ("throughput", "memory")
"""Objects of a layout's JSON whose names become columns."""
_LEFT_OUT = ("routing", "source_frac", "options")


def plan_frame(plans: Sequence[OnePlan], top: int) -> pd.DataFrame:
    """A row for each layout of each plan, row 0 of each the running one, by the names of JSON."""
    return pd.DataFrame([*_rows(plans, top)])


def _rows(plans: Sequence[OnePlan], top: int) -> Iterator[dict[str, Any]]:
    for one in plans:
        shown = (one.plan.own, *one.plan.candidates[:top])
        for number, candidate in enumerate(shown):
            value: dict[str, Any] = candidate.to_json()
            opened = {key: held for name in _OPENED for key, held in value.pop(name).items()}
            plain = {name: held for name, held in value.items() if name not in _LEFT_OUT}
            yield {"device": one.device, "row": number, **plain, **opened}


def plan_plot(found: pd.DataFrame, axes: Any = None) -> Any:
    """Steps with their intervals, of several plans the first row of each; the axes.

    Raises ``ConfigError`` where matplotlib is not installed.
    """
    try:
        pyplot = import_module("matplotlib.pyplot")
    except ImportError as err:
        raise ConfigError(
            "plot() needs matplotlib, which is not installed; pip install matplotlib, or draw what "
            "to_frame() has"
        ) from err
    axes = pyplot.subplots()[1] if axes is None else axes
    is_one = (found["row"] == 0).sum() == 1
    found = found[(found["verdict"] != "does not fit") & (is_one | (found["row"] == 1))]
    ends = [found["step_time_s"] - found["low_s"], found["high_s"] - found["step_time_s"]]
    places = range(len(found))
    axes.errorbar(found["step_time_s"], places, xerr=ends, fmt="o")
    names = found["label"] if is_one else found["device"] + ", " + found["num_ranks"].astype(str)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel("step (s) with its 90 % interval")
    return axes
