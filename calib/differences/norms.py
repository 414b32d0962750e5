"""Rank of a run among similar published ones, the nearest of them, and the effect of each of their
settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pandas as pd

from ..advice.axes import changed, single_choices
from ..errors import CalibrationError, ConfigError
from ..fit.priors import device_prior
from ..forecast.rates import peak_flop_per_s, throughput
from ..layers.model_size import model_flop_per_token, model_name
from ..network.groups import bus_factor
from ..plain_json import JsonObject
from ..records.step_rows import StepRow
from ..samples.table import SampleTable
from ..steps.known_steps import same_layout, similarity
from ..steps.model import FittedSteps
from ..units import MIB, format_frac
from ..workload.choices import AXES, axis_value
from ..workload.collectives import Collective
from ..workload.config import Fp8Recipe, RunConfig
from ..workload.config_json import Encoded, encode, encode_fields, encoded
from ._settings import SettingChange, leaf_texts, part_of, setting_name

_LEAST = 3
"""Fewest similar rows; with less, the criteria are relaxed."""
_NUM_NEAR = 3
_SIZES = 4.0
"""Largest ratio of FLOP per token between models of similar size."""
_OF_TABLES = ("device", "has_open_widths")
"""Fields that depend on how a table was written."""
_LEAST_FRAC = 5e-4
"""Smallest effect that is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedSetting(SettingChange):
    """A setting of a published run in place of this run's."""

    rate_frac: float | None
    """Modelled change of this run's FLOP/s; None if the setting cannot run on its own."""

    @property
    def priced_text(self) -> str:
        """The setting and its effect, as part of a sentence about the published run."""
        frac = self.rate_frac
        worth = "not by itself" if frac is None else format_frac(frac, signed=True)
        return f"{self.text} ({worth})"


@dataclass(frozen=True, slots=True, kw_only=True)
class NearRow:
    """A published run that is similar to this one."""

    row_id: str
    model: str
    framework: str
    source: str
    flop_per_s_per_gpu: float
    rate_frac: float
    """FLOP/s over this run's, minus 1."""
    modelled_frac: float
    """Modelled FLOP/s with all its settings over this run's, minus 1."""
    settings: tuple[PricedSetting, ...]
    """Settings that differ, largest effect first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Normal(Encoded):
    """Rank of a run among published ones."""

    schema: ClassVar[int] = 1

    run_id: str
    flop_per_s_per_gpu: float
    mfu_frac: float
    num_slower: int
    """Number of similar published runs with lower MFU."""
    num_alike: int
    alike: str
    """Traits that the similar runs share with this one."""
    near: tuple[NearRow, ...] = ()
    groups: tuple[dict[str, Any], ...] = ()
    """Rows of ``bus_rates``."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(
            schema=self.schema,
            sentence=self.sentence,
            slower_frac=self.slower_frac,
            **encode_fields(self),
        )

    @property
    def sentence(self) -> str:
        """Rate, MFU and rank in one sentence."""
        slower = f"faster than {100 * self.num_slower / self.num_alike:.0f} % of"
        if not self.num_slower:
            slower = "slower than each of"
        return (
            f"{self.flop_per_s_per_gpu / 1e12:.0f} TFLOP/s per GPU, {100 * self.mfu_frac:.1f} % "
            f"MFU: {slower} {self.num_alike} published runs ({self.alike})"
        )

    @property
    def slower_frac(self) -> float:
        """Share of similar published runs that are slower."""
        return self.num_slower / self.num_alike


def normal(run: StepRow, published: Sequence[StepRow]) -> Normal:
    """Return the rank of a run among published ones other than itself, without ``near`` rows.

    Raises ``CalibrationError`` if no run on its kind of device is published.
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
    """Return the published rows nearest to a run, with modelled effects; ``sources`` by table."""
    rows, _ = alike_rows(run.config, _others(run, published))
    near = _nearest(run.config, rows)[:_NUM_NEAR]
    return tuple(_near(run, row, steps, sources) for row in near)


def modelled_nearest(config: RunConfig, steps: FittedSteps, published: Sequence[StepRow]) -> str:
    """Return the nearest published runs on the device with their modelled over measured step, in
    words; empty if none is published."""
    name = device_prior(config.device).name
    device_rows = [row for row in published if device_prior(row.config.device).name == name]
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
    """Return the rows by similarity of degrees, ties by fewer settings that differ."""
    apart = similarity([config], [row.config for row in rows])[0].round(6)
    counts = [len(_choices(config, row.config)) for row in rows]
    order = sorted(range(len(rows)), key=lambda place: (-apart[place], counts[place]))
    return [rows[place] for place in order]


def _others(run: StepRow, published: Sequence[StepRow]) -> list[StepRow]:
    """Return the rows that are not the run itself."""
    layout = same_layout(run.config)
    return [
        row
        for row in published
        if same_layout(row.config) != layout or abs(row.measured_s / run.measured_s - 1) > 1e-4
    ]


def alike_rows(config: RunConfig, published: Sequence[StepRow]) -> tuple[list[StepRow], str]:
    """Return similar rows and the traits that they share with the run.

    Traits are device, width of products, dense or experts, and size; with fewer than ``_LEAST``
    rows, the last ones are dropped, and finally only the device's peak has to agree.  Rates are
    compared as MFU, each relative to its own peak.
    """
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
    # Sailor's tables call a GH200 with 96 GB so.
    there = ", ".join(sorted({t[0].replace("GH-96", "GH200") for _, t in known}))
    raise CalibrationError(
        f"{config.device}: no run on such a device is published; there are those of {there}"
    )


def _traits(config: RunConfig, run: RunConfig) -> tuple[str, ...]:
    """Return device, width of products, kind of model, and if its size is similar to ``run``'s."""
    bits = 8 * config.precision.nbytes
    if config.fp8 is not Fp8Recipe.NONE:
        bits = 4 if config.fp8 is Fp8Recipe.NVFP4 else 8
    kind = "dense" if config.model.experts is None else "experts"
    ratio = model_flop_per_token(config.model) / model_flop_per_token(run.model)
    size = "like size" if 1 / _SIZES <= ratio <= _SIZES else ""
    return device_prior(config.device).name.upper(), f"{bits}-bit", kind, size


def _near(run: StepRow, row: StepRow, steps: FittedSteps, sources: Mapping[str, str]) -> NearRow:
    """Return a row with the effect of each of its settings on the run."""
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
    """Return modelled FLOP/s, one layout at a time, since those timed together share an engine."""
    return _flop_per_s(config, float(steps.median_times([config])[0]))


def _flop_per_s(config: RunConfig, step_time_s: float) -> float:
    return throughput(config, step_time_s).flop_per_s_per_gpu


def _priced(config: RunConfig, other: RunConfig, steps: FittedSteps) -> Iterator[PricedSetting]:
    """Yield each setting of another run that matters, with its effect on its own in this run."""
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
    """Return the settings that differ, with values.

    A batch in proportion to the ranks changes together with them; sequence length is separate from
    the model.
    """
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
    """Return the value of a setting; for models of one name, the fields that differ."""
    if name in AXES:
        return axis_value(config, name)
    if name != "model":
        return leaf_texts(config.to_json()).get(name, "none")
    if model_name(config) != model_name(other):
        return model_name(config)
    ours, theirs = leaf_texts(encode(config.model)), leaf_texts(encode(other.model))
    return ", ".join(f"{setting_name(n)} {t}" for n, t in ours.items() if theirs.get(n) != t)


_LARGE_NBYTES = 64 * MIB
"""Smallest payload for which latency is negligible."""
_KEY = ["collective", "num_ranks", "num_nodes"]


def bus_rates(table: SampleTable, published: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of ``published`` that match a group of the newest run, with that group's best
    bus bandwidth at large payloads in ``bytes_per_s``."""
    rows = table.collectives.rename(columns={"kind": "collective"})
    is_timed = (rows["run_id"] == table.run_id) & ~rows["is_bound"] & (rows["time_s"] > 0)
    rows = rows[is_timed & (rows["nbytes"] >= _LARGE_NBYTES)]
    names = zip(rows["collective"], rows["num_ranks"], strict=True)
    factors = [bus_factor(Collective(name), ranks) for name, ranks in names]
    rows = rows.assign(bytes_per_s=factors * rows["nbytes"] / rows["time_s"])
    best = rows.groupby(_KEY, as_index=False)["bytes_per_s"].max()
    device = device_prior(table.device).name
    return best.merge(published[published["device"] == device], on=_KEY)
