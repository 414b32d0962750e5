"""Activation bytes of layers in many layouts, under each recompute setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from ..layers.recompute import RecomputeOption
from ..workload.config import RunConfig
from ..workload.layout_table import Ints
from ._states import Floats, Number
from .activations import LayerPart, SavedTensor, is_offloaded, is_stashed, picks_operators

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerBytes:
    """Activation bytes of one layer and one micro-batch on one rank."""

    saved: Floats
    """Bytes retained from forward to backward, under a recompute by module."""
    working: Floats
    """Bytes beyond ``saved`` at the peak of the layer's backward pass."""
    recompute_working: Floats
    """Bytes beyond the layer's input at that peak, if the whole layer is recomputed first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartBytes:
    """Bytes of a part of a layer, of the same shape each."""

    saved: Floats
    in_mlp: Floats
    """Bytes beyond ``saved`` in the MLP's backward pass."""
    in_attention: Floats
    """Those in attention's backward pass, less the bytes that the MLP has freed by then."""
    copied: Floats
    """Bytes in host memory: those of this layer are back, those of the next being fetched."""

    @staticmethod
    def of(parts: Sequence[LayerPart], settings: Sequence[RunConfig]) -> PartBytes:
        """Return the bytes of a part in some layouts, under the recompute of each of ``settings``,
        shape (settings, layouts)."""
        sizes = np.array([[saved.nbytes for saved in one.tensors] for one in parts], dtype=float).T
        in_mlp = np.array([one.in_mlp for one in parts])
        in_attention = np.array([one.in_attention for one in parts])
        picked = np.array([one.picked_nbytes for one in parts])
        rows = [
            _under(one, parts[0].tensors, sizes, in_mlp, in_attention, picked) for one in settings
        ]
        saved, mlp, attention, copied = (np.array(column) for column in zip(*rows, strict=True))
        return PartBytes(saved=saved, in_mlp=mlp, in_attention=attention, copied=copied)

    def take(self, settings: Ints, places: Ints) -> PartBytes:
        """Return the bytes of some layouts, by setting and place."""
        return PartBytes(**columns(self, settings * self.saved.shape[1] + places))

    def __add__(self, other: PartBytes) -> PartBytes:
        names = (one.name for one in fields(PartBytes))
        return PartBytes(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def layer(self, input_nbytes: Number) -> LayerBytes:
        """Return the bytes of a layer that has no other parts."""
        working = np.maximum(self.in_mlp, self.in_attention) + 2 * self.copied
        return LayerBytes(
            saved=self.saved,
            working=working,
            # A layer that is recomputed as a whole drops and copies no tensor by itself.
            recompute_working=self.saved - input_nbytes + working,
        )


def columns(record: DataclassInstance, places: Ints) -> dict[str, Floats]:
    """Return the entries of a record's arrays at some places, and its plain numbers, by name."""
    numbers = {one.name: getattr(record, one.name) for one in fields(record)}
    return {
        name: value.ravel()[places] if isinstance(value, np.ndarray) else value
        for name, value in numbers.items()
    }


def _under(
    config: RunConfig,
    tensors: Sequence[SavedTensor],
    sizes: Floats,
    in_mlp: Floats,
    in_attention: Floats,
    picked: Floats,
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the fields of ``PartBytes`` under the recompute of a layout, shape (layouts,) each."""
    modules = RecomputeOption.from_config(config).parts

    def total(is_counted: Callable[[SavedTensor], bool]) -> Floats:
        nbytes = np.zeros(sizes.shape[1])
        for saved, row in zip(tensors, sizes, strict=True):
            if is_counted(saved):
                nbytes = nbytes + row
        return nbytes

    def is_dropped(saved: SavedTensor) -> bool:
        return not modules.isdisjoint(saved.modules)

    copied = total(lambda saved: is_offloaded(config, saved, modules))
    saved = total(lambda one: not is_dropped(one) and not is_offloaded(config, one, modules))
    freed = total(lambda saved: saved.part == "mlp")
    if modules and picks_operators(config):
        everything = total(lambda saved: True)
        more = np.maximum(everything - picked, 0.0)
        return picked, more + in_mlp, more + in_attention - freed, copied
    # In the backward pass, the dropped tensors of a part are back while that part runs.
    back = total(lambda saved: is_dropped(saved) and saved.part == "mlp")
    experts = config.model.experts
    if experts is not None and experts.stash_factor:
        # The large buffers from which pages are filled are those of the active layer alone.
        paged = total(lambda saved: is_stashed(config, saved, modules))
        in_mlp = in_mlp + paged * experts.rank_capacity_factor / experts.stash_factor
    return saved, in_mlp + back, in_attention - freed + total(is_dropped), copied
