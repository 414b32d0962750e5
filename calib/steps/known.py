"""Layouts whose step was measured, and how alike others are to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..samples.step_rows import StepRow
from ..timeline.items import Floats
from ..workload.config import Cadence, RunConfig

MEASURED_SIGMA_LOG = 0.01
_SHARED_FRAC = 0.8
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
    """Equal for runs whose steps are the same work, whatever they do beside their steps."""
    par = config.parallelism
    if par.ranks_per_node >= par.num_ranks:
        par = replace(par, ranks_per_node=0)  # one node, said or not
    return replace(config, parallelism=par, cadence=Cadence(), unmodelled=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Remainder:
    """What the constants leave of one layout's measured steps."""

    residual_log: float
    """Measured over modelled step, log, mean of the layout's steps."""
    sigma_log: float
    """How well that is known."""


def remainders(
    known: Sequence[KnownStep], residuals: Sequence[float]
) -> dict[RunConfig, Remainder]:
    """By layout; steps of one layout in inverse proportion to their variances.

    Steps of other sites tell of the constants alone.
    """
    places: dict[RunConfig, list[int]] = {}
    for place, step in enumerate(known):
        if step.site:
            continue
        places.setdefault(same_layout(step.config), []).append(place)
    found = {}
    for layout, held in places.items():
        own = np.array([known[place].sigma_log for place in held]) ** -2.0
        logs = np.array([residuals[place] for place in held])
        found[layout] = Remainder(
            residual_log=float(own @ logs / own.sum()), sigma_log=float(own.sum() ** -0.5)
        )
    return found


def likeness(configs: Sequence[RunConfig], others: Sequence[RunConfig]) -> Floats:
    """Correlations of what the constants leave of two steps, shape (configs, others).

    0.8 exp(-d / reach), d the distance in doublings of the degrees; another recipe, release or kind
    of model counts as one doubling.

    >>> from ..workload.config import Batch, ModelShape, Parallelism
    >>> gpt = ModelShape(num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> one, other = (RunConfig(model=gpt, parallelism=Parallelism(tp=tp, dp=4),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8)) for tp in (1, 2))
    >>> likeness([one], [one, other]).round(3).tolist()
    [[0.8, 0.623]]
    """
    if not configs or not others:
        return np.zeros((len(configs), len(others)))
    apart = _degrees(configs)[:, np.newaxis] - _degrees(others)[np.newaxis]
    squares = np.einsum("cod,cod->co", apart, apart)
    for ours, theirs in zip(_kinds(configs), _kinds(others), strict=True):
        codes = {value: code for code, value in enumerate(dict.fromkeys((*ours, *theirs)))}
        left, right = ([codes[value] for value in side] for side in (ours, theirs))
        squares += np.not_equal.outer(left, right)
    return _SHARED_FRAC * np.exp(-np.sqrt(squares) / _REACH)


def correlations(configs: Sequence[RunConfig], running: RunConfig | None = None) -> Floats:
    """Of what the constants leave of each step, shape (configs, configs).

    With ``running``, once the step of that layout is known.
    """
    found = likeness(configs, configs)
    np.fill_diagonal(found, 1.0)
    if running is not None:
        told = likeness(configs, [running])
        found -= told @ told.T
    return found


def _degrees(configs: Sequence[RunConfig]) -> Floats:
    values = [
        (
            config.parallelism.tp,
            config.parallelism.pp,
            config.parallelism.cp,
            config.parallelism.ep,
            config.batch.micro_batch_size,
            config.parallelism.vp,
            config.parallelism.dp,
            config.model.hidden_size,
            config.model.num_layers,
            config.model.seq_length,
        )
        for config in configs
    ]
    return np.log2(np.array(values, dtype=np.float64)) * _WEIGHTS


def _kinds(configs: Sequence[RunConfig]) -> tuple[tuple[object, ...], ...]:
    return tuple(
        zip(
            *(
                (
                    config.fp8,
                    config.recompute,
                    config.framework,
                    config.model.experts is None,
                    config.parallelism.is_sequence_parallel,
                )
                for config in configs
            ),
            strict=True,
        )
    )
