"""Which base times speak for a row: layer profiles, operator tables, or priors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pandas as pd

from ..samples.step_rows import StepRow, Trait
from ..workload.operators import OperatorKind
from .base_times import BaseTimes, FittedTimes, table_times
from .layer_profiles import layer_times
from .operator_tables import operator_tables
from .transfer_tables import network_of, transfer_tables


def times_key(row: StepRow) -> Hashable:
    """Rows with equal keys have equal base times."""
    config = row.config
    return config.device, row.machine, config.is_attention_fused, _is_socket(row)


def row_times(
    row: StepRow,
    operators: Sequence[pd.DataFrame] = (),
    collectives: Sequence[pd.DataFrame] = (),
) -> BaseTimes:
    """Base times of the machine that a row ran on, from canonical tables where there are any.

    A profile of whole layers goes before operators.  Without tables all comes from the priors of
    the device, and of the network where the machine's name tells it.
    """
    device, is_fused = row.config.device, row.config.is_attention_fused
    network = network_of(row.machine, device)
    profiles = [t for t in operators if (t["kind"] == OperatorKind.LAYER.value).any()]
    if operators and not profiles:
        return table_times(
            operators,
            collectives,
            device=device,
            is_attention_fused=is_fused,
            network=network,
            is_flagged_used=_is_socket(row),
        )
    rest = FittedTimes(
        operators=operator_tables((), device=device),
        transfers=transfer_tables(collectives, device=device, network=network),
        is_attention_fused=is_fused,
    )
    return layer_times(profiles, device=device, rest=rest) if profiles else rest


def _is_socket(row: StepRow) -> bool:
    """Samples of transfers that carry a flag for sockets are the right ones then."""
    return Trait.SOCKET_NETWORK in row.traits
