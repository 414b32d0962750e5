"""Base times from profiles of whole layers, in place of operators.

A profile times one layer as a stack ran it on tp ranks: its launches and the all-reduces of tensor
parallelism are in it.  A layout's layer is a list of operators; the time of the layer is put on its
query-key-value product, and everything else in a layer takes none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from ..fit.estimates import Estimates, Source
from ..fit.priors import DevicePrior, device_prior
from ..importers.own_format import shape_sizes
from ..regressors.choices import first_of_least
from ..timeline.items import Floats, Item
from ..workload.collectives import GroupRole
from ..workload.operators import Operator, OperatorKind, Phase
from .base_times import BaseTimes, Conditions
from .operator_tables import OperatorTables, operator_tables

Kind = OperatorKind
_NO_TIME_S = 1e-9
"""Keeps logarithms finite where a profile has no time."""
_TENSOR_FRAC = 0.5
"""Rate of TF32 products over that of two-byte elements on the data sheet."""
_IN_LAYER = frozenset(
    {
        *(Kind.NORM, Kind.RMS_NORM, Kind.POSITION, Kind.ROTARY, Kind.CORE_ATTENTION),
        *(Kind.LINEAR_PROJ, Kind.RESIDUAL, Kind.LINEAR_FC1, Kind.ACTIVATION, Kind.LINEAR_FC2),
    }
)
_PROFILED_KINDS = _IN_LAYER | {Kind.LINEAR_QKV}
_STATED: Mapping[str, float] = {
    "floor": math.log(_NO_TIME_S),
    "compute": 0.0,
    "tp": 0.0,
    "misaligned": 0.0,
    "host_microbatch": math.log(1e-5),
}
"""What a profile of layers as they were launched leaves nothing to say about."""
_PROFILED: Mapping[str, float] = {"compute": 0.1, "backward": 0.05}
"""What a layer timed as a whole leaves open: its neighbours and its launches."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTimes:
    """Profiles of layers on one device; ``rest`` is asked for all else."""

    layers: OperatorTables
    models: Mapping[int, tuple[int, int]]
    """Heads and sequence length of the profiled model of each hidden size."""
    prior: DevicePrior
    rest: BaseTimes
    conditions: Conditions

    def has(self, kind: OperatorKind, phase: Phase) -> bool:
        """Whether it was timed apart from its layer."""
        return self.rest.has(kind, phase)

    def estimates(self, items: Sequence[Item]) -> Estimates:
        """See ``BaseTimes``."""
        found = self.rest.estimates(items)
        sources = tuple(
            Source.FITTED if isinstance(item, Operator) and item.kind in _PROFILED_KINDS else source
            for item, source in zip(items, found.sources, strict=True)
        )
        return replace(found, time_s=self._times_s(items, found.time_s), sources=sources)

    def _times_s(self, items: Sequence[Item], out: Floats) -> Floats:
        out = out.copy()
        layers: dict[int, Operator] = {}
        for place, item in enumerate(items):
            if not isinstance(item, Operator):
                if item.role is GroupRole.TP:
                    out[place] = _NO_TIME_S
            elif item.kind is Kind.LINEAR_QKV:
                layers[place] = self._layer(item)
            elif item.kind in _IN_LAYER:
                out[place] = _NO_TIME_S
            elif item.kind is Kind.LOGITS:
                out[place] = self._head_s(item)
        if layers:
            out[list(layers)] = self.layers.times_s(list(layers.values()))
        return out

    def _layer(self, product: Operator) -> Operator:
        """The layer that a query-key-value product (tokens, hidden, 3 hidden / tp) belongs to."""
        tokens, hidden, width = product.shape
        sizes = sorted(self.models)
        known = sizes[first_of_least([abs(math.log(other / hidden)) for other in sizes])]
        heads, seq = self.models[known]
        heads = max(1, round(heads * hidden / known))
        is_backward = product.phase is Phase.BACKWARD
        return Operator(
            kind=Kind.LAYER,
            phase=Phase.BACKWARD if is_backward else Phase.FORWARD,
            shape=(max(1, tokens // seq), heads, seq, hidden, max(1, round(3 * hidden / width))),
            element_nbytes=product.element_nbytes,
        )

    def _head_s(self, item: Operator) -> float:
        """Seconds of the product of a head, as TF32 runs it."""
        number = 2 if item.phase is Phase.BACKWARD else 1
        rate = _TENSOR_FRAC * self.prior.ceilings_for(2).flop_per_s
        return number * 2.0 * math.prod(item.shape) / rate


def layer_times(frames: Sequence[pd.DataFrame], *, device: str, rest: BaseTimes) -> LayerTimes:
    """Layers of canonical tables on one device.

    Of several rows of one shape the last counts: the first layer of a model is profiled apart.
    """
    prior = device_prior(device)
    rows = pd.concat(list(frames), ignore_index=True)
    rows = rows[rows["device"].map(lambda name: device_prior(str(name)).name == prior.name)]
    identity = ["device", "group", "kind", "phase", "shape", "element_nbytes"]
    rows = rows.groupby(identity, sort=False).last().reset_index()
    layers = rows[(rows["kind"] == Kind.LAYER.value) & (rows["flag"] == "")]
    sizes = shape_sizes(layers["shape"]).astype(int).tolist()
    return LayerTimes(
        layers=operator_tables((layers,), device=device),
        models={hidden: (heads, seq) for _, heads, seq, hidden, _ in sizes},
        prior=prior,
        rest=rest,
        conditions=replace(
            rest.conditions, log_centers=_STATED, log_sigmas=_PROFILED, has_tf32=False
        ),
    )
