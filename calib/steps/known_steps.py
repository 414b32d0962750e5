"""Layouts whose step was measured, and the similarity of others to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ..records.step_rows import StepRow
from ..timeline.items import Floats
from ..workload.config import Cadence, RunConfig
from ..workload.layout_table import LayoutTable
from ..workload.model_shape import ModelShape
from .launches import LaunchTimes

MEASURED_SIGMA_LOG = 0.01
"""Scatter of a reported step: 1 %."""
SHARED_FRAC = 0.8
"""Share of the residual variance that similar layouts have in common; the rest is each
measurement's own."""
_REACH = 4.0
"""Doublings over which the correlation falls to 1/e. 3 to 8 do equally well on public tables."""
_WEIGHTS = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5])
"""Weight of a doubling of each degree; those determined by the size of a job count half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownStep:
    """A layout and its measured step."""

    config: RunConfig
    time_s: float
    sigma_log: float = MEASURED_SIGMA_LOG
    """Deviation of the measured level of the steps."""
    site: str = ""
    """Another cluster, release or day on which it was measured, whose level may differ as a whole.
    Empty for the machine that estimates are made for."""
    launches: LaunchTimes = field(default_factory=dict)
    """Launch times that its run's operators showed."""

    @staticmethod
    def of(row: StepRow, site: str = "") -> KnownStep:
        """Return the known step of a table's row."""
        return KnownStep(config=row.config, time_s=row.measured_s, site=site)


def same_layout(config: RunConfig) -> RunConfig:
    """Normalise a run: equal results mean equal work in a step, whatever else the runs do.

    Measured routing drifts, and is not part of a layout.
    """
    par, model = config.parallelism, config.model
    if model.experts is not None and model.experts.measured:
        model = replace(model, experts=replace(model.experts, measured=()))
    if par.ranks_per_node >= par.num_ranks:
        par = replace(par, ranks_per_node=0)  # one node, stated or not
    return replace(config, model=model, parallelism=par, cadence=Cadence(), unmodelled=())


def same_but_for_batch(one: RunConfig, other: RunConfig) -> bool:
    """Return True if two runs have one layout and differ at most in the global batch.

    Batches are compared last: not every layout takes the batch of another.
    """
    first, second = same_layout(one), same_layout(other)
    return (
        first.parallelism == second.parallelism
        and first.batch.micro_batch_size == second.batch.micro_batch_size
        and replace(first, batch=second.batch) == second
    )


def measured_places(known: Sequence[KnownStep]) -> dict[RunConfig, tuple[int, ...]]:
    """Return the indices of each layout's steps among the known ones; steps of other sites only
    inform the constants."""
    places: dict[RunConfig, tuple[int, ...]] = {}
    for place, step in enumerate(known):
        if not step.site:
            layout = same_layout(step.config)
            places[layout] = (*places.get(layout, ()), place)
    return places


def similarity(
    layouts: Sequence[RunConfig] | LayoutTable, others: Sequence[RunConfig] | LayoutTable
) -> Floats:
    """Return correlations of the residuals of two steps from the constants, shape (layouts,
    others).

    The formula is 0.8 exp(-d / reach), with d the distance in doublings of the degrees.

    >>> from ..workload.config import Batch
    >>> from ..workload.model_shape import ModelShape
    >>> from ..workload.parallelism import Parallelism
    >>> gpt = ModelShape(num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> one, other = (RunConfig(model=gpt, parallelism=Parallelism(tp=tp, dp=4),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8)) for tp in (1, 2))
    >>> similarity([one], [one, other]).round(3).tolist()
    [[0.8, 0.623]]
    """
    apart = degrees_of(layouts)[:, np.newaxis] - degrees_of(others)[np.newaxis]
    return SHARED_FRAC * np.exp(-np.sqrt(np.einsum("cod,cod->co", apart, apart)) / _REACH)


SPANNED = ("tp", "cp", "ep", "dp", "pp")
"""Constants of the group kinds in the columns of ``unseen_across``."""


def unseen_across(configs: Sequence[RunConfig], known: Sequence[RunConfig]) -> NDArray[np.bool_]:
    """Return the kinds of groups that span nodes in a layout but in no known one, shape (configs,
    5).

    >>> from ..workload.config import Batch
    >>> from ..workload.model_shape import ModelShape
    >>> from ..workload.parallelism import Parallelism
    >>> gpt = ModelShape(num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> one, other = (RunConfig(model=gpt, parallelism=Parallelism(pp=pp, dp=4, ranks_per_node=4),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8)) for pp in (1, 2))
    >>> dict(zip(SPANNED, unseen_across([other], [one])[0].tolist()))["pp"]
    True
    """
    return _across(configs) & ~_across(known).any(axis=0)


def _across(configs: Sequence[RunConfig]) -> NDArray[np.bool_]:
    """Return the kinds of groups that span nodes, shape (configs, 5)."""
    flags = []
    for config in configs:
        par = config.parallelism
        block, num_local = par.tp * par.cp, par.ranks_per_node or par.num_ranks
        extents = (par.tp, block, par.ep * par.expert_tp, block * par.dp, block * par.dp * par.pp)
        degrees = (par.tp, par.cp, par.ep, par.dp, par.pp)
        flags.append([d > 1 and e > num_local for d, e in zip(degrees, extents, strict=True)])
    return np.array(flags, dtype=bool).reshape(-1, len(SPANNED))


def correlations(configs: Sequence[RunConfig], running: RunConfig | None = None) -> Floats:
    """Return correlations of the steps' residuals from the constants, shape (configs, configs).

    With ``running``, they are conditioned on the step of that layout.
    """
    correlation = similarity(configs, configs)
    np.fill_diagonal(correlation, 1.0)
    if running is not None:
        running_similarity = similarity(configs, [running])
        correlation -= running_similarity @ running_similarity.T
    return correlation


DEGREES = ("tp", "pp", "cp", "ep", "micro_batch_size", "vp", "dp")
"""Fields that distinguish layouts of one model."""


def degrees_of(layouts: Sequence[RunConfig] | LayoutTable) -> Floats:
    """Return the features that distinguish layouts, one row each: weighted logs of base 2 of their
    degrees and of the model's sizes."""
    table = LayoutTable.of(layouts)
    models = table.coded(lambda config: _sizes(config.model), ("model",))
    degrees = np.stack([table.numbers(name) for name in DEGREES], axis=1)
    return np.log2(np.hstack([degrees, np.array(models.values)[models.codes]])) * _WEIGHTS


def _sizes(model: ModelShape) -> tuple[int, ...]:
    return model.hidden_size, model.num_layers, model.seq_length
