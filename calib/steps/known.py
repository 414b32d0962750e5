"""Layouts whose step was measured, and how alike others are to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..records import StepRow
from ..timeline import Floats, Ints
from ..workload import Cadence, RunConfig

MEASURED_SIGMA_LOG = 0.01
"""Scatter of a step that somebody reports: 1 %."""
SHARED_FRAC = 0.8
"""Of what the constants leave, as a variance: the rest is each measurement's own."""
_REACH = 4.0
"""Doublings over which the correlation falls to 1/e.  3 to 8 do equally well on public tables."""
_WEIGHTS = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5])
"""Of a doubling of each degree; those that follow from the size of a job count half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownStep:
    """A layout and its step."""

    config: RunConfig
    time_s: float
    sigma_log: float = MEASURED_SIGMA_LOG
    """How well the level of the steps was measured."""
    site: str = ""
    """Where else it was measured: another cluster, release or day, whose level as a whole may be
    another one.  Empty: where it is asked."""

    @staticmethod
    def of(row: StepRow, site: str = "") -> KnownStep:
        """What a row of a table says."""
        return KnownStep(config=row.config, time_s=row.measured_s, site=site)


def same_layout(config: RunConfig) -> RunConfig:
    """Equal for runs whose steps are the same work, whatever they do beside their steps.

    Routing drifts: as it was counted it is no part of a layout.
    """
    par, model = config.parallelism, config.model
    if model.experts is not None and model.experts.measured:
        model = replace(model, experts=replace(model.experts, measured=()))
    if par.ranks_per_node >= par.num_ranks:
        par = replace(par, ranks_per_node=0)  # one node, said or not
    return replace(config, model=model, parallelism=par, cadence=Cadence(), unmodelled=())


def same_but_for_batch(one: RunConfig, other: RunConfig) -> bool:
    """True where two runs have one layout and differ at most in the global batch.

    Batches are compared last: not every layout takes the batch of another.
    """
    first, second = same_layout(one), same_layout(other)
    return (
        first.parallelism == second.parallelism
        and first.batch.micro_batch_size == second.batch.micro_batch_size
        and replace(first, batch=second.batch) == second
    )


def measured_places(known: Sequence[KnownStep]) -> dict[RunConfig, tuple[int, ...]]:
    """The places of each layout's steps among those that are known; steps of other sites tell of
    the constants alone."""
    places: dict[RunConfig, tuple[int, ...]] = {}
    for place, step in enumerate(known):
        if not step.site:
            layout = same_layout(step.config)
            places[layout] = (*places.get(layout, ()), place)
    return places


def similarity(configs: Sequence[RunConfig], others: Sequence[RunConfig]) -> Floats:
    """Correlations of what the constants leave of two steps, shape (configs, others).

    0.8 exp(-d / reach), d the distance in doublings of the degrees.

    >>> from ..workload import Batch, ModelShape, Parallelism
    >>> gpt = ModelShape(num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> one, other = (RunConfig(model=gpt, parallelism=Parallelism(tp=tp, dp=4),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8)) for tp in (1, 2))
    >>> similarity([one], [one, other]).round(3).tolist()
    [[0.8, 0.623]]
    """
    return alike(degrees_of(configs), degrees_of(others))


SPANNED = ("tp", "cp", "ep", "dp", "pp")
"""Names of the constants of the kinds of groups that ``unseen_across`` tells of."""


def unseen_across(configs: Sequence[RunConfig], known: Sequence[RunConfig]) -> NDArray[np.bool_]:
    """Which kinds of groups span nodes in a layout and in none that is known, shape (configs, 5).

    >>> from ..workload import Batch, ModelShape, Parallelism
    >>> gpt = ModelShape(num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> one, other = (RunConfig(model=gpt, parallelism=Parallelism(pp=pp, dp=4, ranks_per_node=4),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8)) for pp in (1, 2))
    >>> dict(zip(SPANNED, unseen_across([other], [one])[0].tolist()))["pp"]
    True
    """
    return _across(configs) & ~_across(known).any(axis=0)


def _across(configs: Sequence[RunConfig]) -> NDArray[np.bool_]:
    """Which kinds of groups span nodes, shape (configs, 5)."""
    found = []
    for config in configs:
        par = config.parallelism
        block, num_local = par.tp * par.cp, par.ranks_per_node or par.num_ranks
        extents = (par.tp, block, par.ep * par.expert_tp, block * par.dp, block * par.dp * par.pp)
        degrees = (par.tp, par.cp, par.ep, par.dp, par.pp)
        found.append([d > 1 and e > num_local for d, e in zip(degrees, extents, strict=True)])
    return np.array(found, dtype=bool).reshape(-1, len(SPANNED))


def correlations(configs: Sequence[RunConfig], running: RunConfig | None = None) -> Floats:
    """Of what the constants leave of each step, shape (configs, configs).

    With ``running``, once the step of that layout is known.
    """
    found = similarity(configs, configs)
    np.fill_diagonal(found, 1.0)
    if running is not None:
        told = similarity(configs, [running])
        found -= told @ told.T
    return found


def degrees_of(configs: Sequence[RunConfig]) -> Floats:
    """What tells layouts apart, a row for each: weighted logs of base 2."""
    sizes = []
    for config in configs:
        par, model = config.parallelism, config.model
        sizes.append(
            (
                *(par.tp, par.pp, par.cp, par.ep, config.batch.micro_batch_size, par.vp),
                *(par.dp, model.hidden_size, model.num_layers, model.seq_length),
            )
        )
    return degrees_of_columns(np.array(sizes).reshape(-1, len(_WEIGHTS)))


def degrees_of_columns(sizes: Ints) -> Floats:
    """The same of layouts as columns: tp, pp, cp, ep, micro-batch, vp, dp, hidden size, layers and
    sequence."""
    return np.log2(sizes) * _WEIGHTS


def alike(degrees: Floats, others: Floats) -> Floats:
    """Correlations of what the constants leave of two steps, shape (layouts, others)."""
    apart = degrees[:, np.newaxis] - others[np.newaxis]
    return SHARED_FRAC * np.exp(-np.sqrt(np.einsum("cod,cod->co", apart, apart)) / _REACH)
