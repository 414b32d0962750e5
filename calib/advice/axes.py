"""Layouts with some choices taken from another."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from ..errors import ConfigError
from ..workload.choices import AXES, CHOICES, OTHER, axis_value
from ..workload.config import Batch, RunConfig
from ..workload.parallelism import Parallelism
from ..workload.pipeline_layout import uneven_layers

_BATCH, _DEGREES = ({one.name for one in fields(part)} for part in (Batch, Parallelism))
_NO_CHOICE = {"parallelism", "batch", "unmodelled", "cadence"}


def differing_axes(one: RunConfig, other: RunConfig) -> tuple[str, ...]:
    """Return the axes on which two layouts differ, in the order of ``AXES``."""
    return tuple(axis for axis in AXES if _taken(one, axis) != _taken(other, axis))


def single_choices(one: RunConfig, other: RunConfig) -> dict[str, dict[str, object]]:
    """Return the choices of ``other`` that differ, with the values for ``changed``.

    A choice is an axis if its text differs, else each of its fields on its own.
    """
    choices: dict[str, dict[str, object]] = {}
    for axis in differing_axes(one, other):
        ours, theirs = _taken(one, axis), _taken(other, axis)
        if axis_value(one, axis) != axis_value(other, axis):
            choices[axis] = theirs
        else:
            each = {name: {name: theirs[name]} for name in theirs if theirs[name] != ours[name]}
            choices |= each
    return choices


def with_axes_of(config: RunConfig, other: RunConfig, axes: Collection[str]) -> RunConfig:
    """Return ``config`` with the choices of ``other`` on some axes, see ``changed``.

    Layers are split over stages as in the layout that the number of stages is from.
    """
    taken: dict[str, Any] = {}
    for axis in axes:
        taken |= _taken(other, axis)
    return changed(config, taken, like=other)


def changed(
    config: RunConfig, values: Mapping[str, object], *, like: RunConfig | None = None
) -> RunConfig:
    """Return the layout with other values of some fields; dp follows from the number of ranks.

    Layers are split over stages as in ``like``, else as before, if the number of stages is the
    same, else evenly except for the last stage, as always if ``chunk_layers`` is None.  Raises
    ``ConfigError`` if the layout cannot run.
    """
    taken: dict[str, Any] = dict(values)
    par = config.parallelism
    ranks = taken.pop("num_ranks", par.num_ranks)
    batch = {name: taken.pop(name) for name in _BATCH & taken.keys()}
    degrees = {name: taken.pop(name) for name in _DEGREES & taken.keys()}
    tp, cp, pp, vp = (degrees.get(name, getattr(par, name)) for name in ("tp", "cp", "pp", "vp"))
    if ranks % (tp * cp * pp):
        raise ConfigError(f"{ranks} ranks do not split over tp {tp} x cp {cp} x pp {pp}")
    degrees["dp"] = ranks // (tp * cp * pp)
    stated = degrees.pop("chunk_layers", ())
    known = () if stated is None else (like or config, config)
    is_stated = stated is not None and len(stated) == pp * vp > 1
    degrees["chunk_layers"] = stated if is_stated else _chunk_layers(config, known, pp, vp)
    if tp == 1:
        degrees["is_sequence_parallel"] = False
    return replace(
        config,
        parallelism=replace(par, **degrees),
        batch=replace(config.batch, **batch),
        **taken,
    )


def _taken(config: RunConfig, axis: str) -> dict[str, Any]:
    """Return the fields of an axis with their values; no two axes share a field name."""
    values: dict[str, Any] = {}
    if axis == OTHER:
        named = {name for one in CHOICES for name in one.fields} | _NO_CHOICE
        compared = [one.name for one in fields(config) if one.compare]
        values = {name: getattr(config.parallelism, name) for name in sorted(_DEGREES - named)}
        values |= {name: getattr(config, name) for name in compared if name not in named}
    for one in CHOICES:
        if one.axis_name == axis:
            values |= one.values(config)
    return values


def _chunk_layers(
    config: RunConfig, known: Collection[RunConfig], pp: int, vp: int
) -> tuple[int, ...]:
    for one in known:
        par = one.parallelism
        if (par.pp, par.vp) == (pp, vp):
            return par.chunk_layers
    return uneven_layers(config.model.num_layers, pp) if vp == 1 else ()
