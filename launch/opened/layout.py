"""The running layout and its model, by the names that are typed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ...calib.arguments import LAYOUT_NAMES
from ...calib.records import stamped
from ...calib.search import layout_label
from ...calib.workload import ModelShape, RunConfig, encode_fields
from .told import Told

if TYPE_CHECKING:
    from ..report.table import ReportTable

_NO_TEXTS: Mapping[str, str] = {}


@dataclass(frozen=True, kw_only=True, repr=False)
class Layout(Told):
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
        whole = {"label": self.label, **self.values, "config": self.config.to_json()}
        return stamped(whole)

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in self.values.items())
        return f"Layout({said})"

    def parts(self) -> Iterator[ReportTable]:
        """A table of names and values."""
        texts = {axis.name: axis.help for axis in LAYOUT_NAMES}
        yield _named("layout", f"Layout {self.label}", self.values, texts)


@dataclass(frozen=True, kw_only=True, repr=False)
class Model(Told, ModelShape):
    """The sizes of the model that a run trains, under the names of ``ModelShape``."""

    @staticmethod
    def of(shape: ModelShape) -> Model:
        """The model of a shape."""
        return Model(**{one.name: getattr(shape, one.name) for one in fields(shape)})

    def to_json(self) -> dict[str, Any]:
        """Every size."""
        return stamped(encode_fields(self))

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in encode_fields(self).items())
        return f"Model({said})"

    def parts(self) -> Iterator[ReportTable]:
        """A table of names and values; what the model has not is left out."""
        values = {name: value for name, value in encode_fields(self).items() if value is not None}
        yield _named("model", "Model", values)


def _named(
    key: str, title: str, values: Mapping[str, Any], texts: Mapping[str, str] = _NO_TEXTS
) -> ReportTable:
    from ..report.table import table_of

    cells: dict[str, Callable[[str], str]] = {
        "name": lambda name: name,
        "value": lambda name: str(values[name]),
    }
    if texts:
        cells["what"] = lambda name: texts[name]
    return table_of(key, title, values, cells)
