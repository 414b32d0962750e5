"""A model as Megatron's options, for command lines of whole runs."""

from __future__ import annotations

from forerun.calib.arguments.megatron_values import as_options, model_values
from forerun.calib.workload.config import RunConfig


def model_options(config: RunConfig) -> tuple[str, ...]:
    """Return the options of model, precision and cadence."""
    values = as_options(model_values(config))
    return tuple(word for option, words in values for word in (option, *words))
