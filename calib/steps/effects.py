"""What layers of some layouts have in common beyond the constants of the machine."""

from __future__ import annotations

from collections.abc import Mapping

from ..workload.config import RunConfig

LAUNCH = "launch"
Effect = tuple[str, int, int, int, int]
"""What layers of some layouts share: its name, hidden size, sequence length, tp and micro-batch."""
EFFECT_SIGMA_LOG: Mapping[str, float] = {
    LAUNCH: 0.08,
    "width": 0.08,
    "tp": 0.05,
    "micro_batch": 0.03,
    "cell": 0.04,
}
"""How far layers lie from the global constants, in logs: launches by tp and micro-batch, their
work by hidden size and sequence, by tp, by micro-batch and by all of them.  Chosen on the public
tables; the same for all."""


def effects_of(config: RunConfig) -> tuple[Effect, ...]:
    """The effects on a layout's layers; another width has others."""
    model, tp = config.model, config.parallelism.tp
    micro = config.batch.micro_batch_size
    width = (model.hidden_size, model.seq_length)
    return (
        (LAUNCH, *width, tp, micro),
        ("width", *width, 0, 0),
        ("tp", *width, tp, 0),
        ("micro_batch", *width, 0, micro),
        ("cell", *width, tp, micro),
    )
