"""The place of a run among published ones that are alike, the nearest of them, and the price of
each setting of theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pandas as pd

from ..advice import AXES, axis_value, changed, single_choices
from ..errors import CalibrationError, ConfigError
from ..fit import device_prior
from ..forecast import peak_flop_per_s, throughput
from ..layers import model_flop_per_token, model_name
from ..network import bus_factor
from ..records import StepRow, Trait
from ..samples import SampleTable
from ..steps import FittedSteps, degree_correlations, degrees_of, same_layout
from ..units import MIB, format_frac
from ..workload import Collective, Encoded, Fp8Recipe, RunConfig, encode
from .settings import SettingChange, leaf_texts, part_of, setting_name

_LEAST = 3
"""Rows below which less alike ones count too."""
_NUM_NEAR = 3
_SIZES = 4.0
"""How many times smaller or larger, in FLOP per token, a model of like size is."""
_OF_TABLES = ("device", "has_open_widths")
"""Differ by how a table was written."""
_LEAST_FRAC = 5e-4
"""Effects below are not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedSetting(SettingChange):
    """A setting of a published run in place of this run's own."""

    rate_frac: float | None
    """Change of this run's FLOP/s by its model; None where the setting cannot run by itself."""

    @property
    def priced_text(self) -> str:
        """As part of a sentence about the published run."""
        frac = self.rate_frac
        worth = "not by itself" if frac is None else format_frac(frac, signed=True)
        return f"{self.text} ({worth})"


@dataclass(frozen=True, slots=True, kw_only=True)
class NearRow:
    """A published run that is like this one."""

    row_id: str
    model: str
    framework: str
    source: str
    flop_per_s_per_gpu: float
    rate_frac: float
    """Its rate over this run's, less 1."""
    modelled_frac: float
    """The same by the model of this run: what all its settings are worth here."""
    settings: tuple[PricedSetting, ...]
    """The largest effect first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Normal(Encoded):
    """The place of a run among published ones."""

    JSON: ClassVar[str] = "schema sentence slower_frac *"
    schema: ClassVar[int] = 1

    run_id: str
    flop_per_s_per_gpu: float
    mfu_frac: float
    num_slower: int
    """Published runs alike whose MFU is lower."""
    num_alike: int
    alike: str
    """Traits that they share with the run."""
    near: tuple[NearRow, ...] = ()
    groups: tuple[dict[str, Any], ...] = ()
    """Rows of ``bus_rates``."""

    @property
    def sentence(self) -> str:
        """The answer."""
        slower = f"faster than {100 * self.num_slower / self.num_alike:.0f} % of"
        if not self.num_slower:
            slower = "slower than each of"
        return (
            f"{self.flop_per_s_per_gpu / 1e12:.0f} TFLOP/s per GPU, {100 * self.mfu_frac:.1f} % "
            f"MFU: {slower} {self.num_alike} published runs ({self.alike})"
        )

    @property
    def slower_frac(self) -> float:
        """Share of the published runs alike that are slower."""
        return self.num_slower / self.num_alike


def normal(run: StepRow, published: Sequence[StepRow]) -> Normal:
    """A run among published ones, of which it is none; without the nearest of them.

    Raises ``CalibrationError`` where nothing is published of its kind of device.
    """
    rows, words = alike_rows(run.config, _others(run, published))
    mine, *rates = (throughput(row.config, row.measured_s) for row in (run, *rows))
    mfu = mine.mfu_frac or 0.0
    return Normal(
        run_id=run.machine,
        flop_per_s_per_gpu=mine.flop_per_s_per_gpu,
        mfu_frac=mfu,
        num_slower=sum((rate.mfu_frac or 0.0) < mfu for rate in rates),
        num_alike=len(rows),
        alike=words,
    )


def near_rows(
    run: StepRow, steps: FittedSteps, published: Sequence[StepRow], sources: Mapping[str, str]
) -> tuple[NearRow, ...]:
    """The published rows that are nearest to a run, priced by its model; ``sources`` by table."""
    rows, _ = alike_rows(run.config, _others(run, published))
    near = _nearest(run.config, rows)[:_NUM_NEAR]
    return tuple(_near(run, row, steps, sources) for row in near)


def modelled_nearest(config: RunConfig, steps: FittedSteps, published: Sequence[StepRow]) -> str:
    """The published runs of its device that are nearest to a described one, and how much slower or
    faster each was modelled than it was measured; empty where none is published."""
    name = device_prior(config.device).name
    device_rows = [
        row
        for row in published
        if device_prior(row.config.device).name == name and Trait.SOCKET_NETWORK not in row.traits
    ]
    if not device_rows:
        return ""
    rows, words = alike_rows(config, device_rows)
    firsts: dict[str, StepRow] = {}
    for row in _nearest(config, rows):
        firsts.setdefault(row.group, row)
    near = [*firsts.values()][:_NUM_NEAR]
    errors = [float(steps.median_times([row.config])[0]) / row.measured_s - 1 for row in near]
    errors_text = ", ".join(
        f"{row.group} {format_frac(off, signed=True)}"
        for row, off in zip(near, errors, strict=True)
    )
    return (
        f"nearest of {len(rows)} published runs ({words}), modelled against measured: {errors_text}"
    )


def _nearest(config: RunConfig, rows: Sequence[StepRow]) -> list[StepRow]:
    """The rows most alike in their degrees, of equals those with fewer settings that differ."""
    apart = degree_correlations(degrees_of([config]), degrees_of([row.config for row in rows]))[
        0
    ].round(6)
    counts = [len(_choices(config, row.config)) for row in rows]
    order = sorted(range(len(rows)), key=lambda place: (-apart[place], counts[place]))
    return [rows[place] for place in order]


def _others(run: StepRow, published: Sequence[StepRow]) -> list[StepRow]:
    """Rows that are not the run itself."""
    layout = same_layout(run.config)
    return [
        row
        for row in published
        if same_layout(row.config) != layout or abs(row.measured_s / run.measured_s - 1) > 1e-4
    ]


def alike_rows(config: RunConfig, published: Sequence[StepRow]) -> tuple[list[StepRow], str]:
    """The rows that are most alike and enough to have a place among, and what they share: device,
    width of products, dense or experts, and size; with fewer than ``_LEAST`` less of these, at last
    the peak of the device alone.  Rates are compared as MFU, each over its own peak."""
    ours = _traits(config, config)
    known = [(row, _traits(row.config, config)) for row in published]
    for number in range(len(ours), 0, -1):
        rows = [row for row, traits in known if traits[:number] == ours[:number]]
        if len(rows) >= _LEAST:
            return rows, ", ".join(ours[:number])
    peak = peak_flop_per_s(config)
    if rows := [
        r for r, t in known if t[0] == ours[0] or (peak and peak_flop_per_s(r.config) == peak)
    ]:
        return rows, f"GPUs with the peak of {ours[0]}"
    there = ", ".join(sorted({traits[0] for _, traits in known}))
    raise CalibrationError(
        f"{config.device}: no run on such a device is published; there are those of {there}"
    )


def _traits(config: RunConfig, run: RunConfig) -> tuple[str, ...]:
    """Device, width of products, kind of model, and whether that is of the size of a run's."""
    bits = 8 * config.precision.nbytes
    if config.fp8 is not Fp8Recipe.NONE:
        bits = 4 if config.fp8 is Fp8Recipe.NVFP4 else 8
    kind = "dense" if config.model.experts is None else "experts"
    ratio = model_flop_per_token(config.model) / model_flop_per_token(run.model)
    size = "like size" if 1 / _SIZES <= ratio <= _SIZES else ""
    return device_prior(config.device).name.upper(), f"{bits}-bit", kind, size


def _near(run: StepRow, row: StepRow, steps: FittedSteps, sources: Mapping[str, str]) -> NearRow:
    """A row with its settings in place of the run's own, one at a time."""
    settings = _priced(run.config, row.config, steps)
    whole = replace(row.config, device=run.config.device)
    rate = _flop_per_s(row.config, row.measured_s)
    return NearRow(
        row_id=row.row_id,
        model=row.group,
        framework=row.config.framework,
        source=sources.get(row.table, row.table),
        flop_per_s_per_gpu=rate,
        rate_frac=rate / _flop_per_s(run.config, run.measured_s) - 1,
        modelled_frac=_modelled(whole, steps) / _modelled(run.config, steps) - 1,
        settings=tuple(sorted(settings, key=lambda one: -abs(one.rate_frac or 0.0))),
    )


def _modelled(config: RunConfig, steps: FittedSteps) -> float:
    """FLOP/s by the model; one layout at a time, since those timed together share an engine."""
    return _flop_per_s(config, float(steps.median_times([config])[0]))


def _flop_per_s(config: RunConfig, step_time_s: float) -> float:
    return throughput(config, step_time_s).flop_per_s_per_gpu


def _priced(config: RunConfig, other: RunConfig, steps: FittedSteps) -> Iterator[PricedSetting]:
    """Every setting of another run that matters, alone in place of this run's own."""
    base_flop_per_s = _modelled(config, steps)
    for name, values in _choices(config, other).items():
        frac = None
        with suppress(ConfigError):
            frac = _modelled(changed(config, values, like=other), steps) / base_flop_per_s - 1
        if frac is None or abs(frac) > _LEAST_FRAC:
            yield PricedSetting(
                part=part_of((name,)),
                name=setting_name(name),
                first=_shown(config, other, name),
                second=_shown(other, config, name),
                rate_frac=frac,
            )


def _choices(config: RunConfig, other: RunConfig) -> dict[str, dict[str, object]]:
    """Settings with values; a batch that grows with the ranks goes with them, and the length of
    samples is none of the model."""
    choices = single_choices(config, other)
    each = [c.batch.global_batch_size / c.parallelism.num_ranks for c in (config, other)]
    if {"gpus", "global_batch_size"} <= choices.keys() and each[0] == each[1]:
        choices["gpus"] |= choices.pop("global_batch_size")
    if choices.pop("model", None):
        ours, theirs = config.model, other.model
        choices["seq_length"] = {"model": replace(ours, seq_length=theirs.seq_length)}
        choices["model"] = {"model": replace(theirs, seq_length=ours.seq_length)}
    return {name: values for name, values in choices.items() if name not in _OF_TABLES}


def _shown(config: RunConfig, other: RunConfig, name: str) -> str:
    """The value of a setting beside another run's; of models of one name what tells them apart."""
    if name in AXES:
        return axis_value(config, name)
    if name != "model":
        return leaf_texts(config.to_json()).get(name, "none")
    if model_name(config) != model_name(other):
        return model_name(config)
    ours, theirs = leaf_texts(encode(config.model)), leaf_texts(encode(other.model))
    return ", ".join(f"{setting_name(n)} {t}" for n, t in ours.items() if theirs.get(n) != t)


_LARGE_NBYTES = 64 * MIB
"""Payloads from which on latency no longer counts."""
_KEY = ["collective", "num_ranks", "num_nodes"]


def bus_rates(table: SampleTable, published: pd.DataFrame) -> pd.DataFrame:
    """The rows of ``published`` that are of the kind of a group of the newest run, and in
    ``bytes_per_s`` its best rate at large payloads."""
    rows = table.collectives.rename(columns={"kind": "collective"})
    is_timed = (rows["run_id"] == table.run_id) & ~rows["is_bound"] & (rows["time_s"] > 0)
    rows = rows[is_timed & (rows["nbytes"] >= _LARGE_NBYTES)]
    names = zip(rows["collective"], rows["num_ranks"], strict=True)
    factors = [bus_factor(Collective(name), ranks) for name, ranks in names]
    rows = rows.assign(bytes_per_s=factors * rows["nbytes"] / rows["time_s"])
    best = rows.groupby(_KEY, as_index=False)["bytes_per_s"].max()
    device = device_prior(str(table.newest("runs")["device"].iloc[0])).name
    return best.merge(published[published["device"] == device], on=_KEY)
