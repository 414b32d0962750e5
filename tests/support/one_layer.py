"""Activation bytes of one layer of one layout, from the columns that hold those of many."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.calib.layers.blocks import BlockKind
from forerun.calib.memory._module_memory import Modules
from forerun.calib.workload.config import RunConfig
from forerun.calib.workload.layout_table import LayoutTable


@dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """Bytes that a layer retains, and those beyond them at the peak of its backward pass."""

    input_nbytes: float
    """Bytes that it retains if all of it is recomputed."""
    saved_nbytes: float
    working_nbytes: float
    recompute_working_nbytes: float


def layer_activations(config: RunConfig, kind: BlockKind) -> LayerActivations:
    """Return the bytes of a layer under the layout's own recompute."""
    modules, layers = Modules(LayoutTable.of([config])).take(np.zeros(1, dtype=np.int64))
    layer = layers[kind]
    return LayerActivations(
        input_nbytes=float(np.atleast_1d(modules.layer_input)[0]),
        saved_nbytes=float(layer.saved[0]),
        working_nbytes=float(layer.working[0]),
        recompute_working_nbytes=float(layer.recompute_working[0]),
    )
