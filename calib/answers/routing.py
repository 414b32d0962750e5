"""Imbalance of tokens routed to experts, and its cost as a share of the step.

The cost is from the step model: the growth of its step with the tokens of the busiest rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pandas as pd

from ..samples.table import SampleTable, newest_window
from ..steps.model import FittedSteps
from ..units import format_frac
from ..workload.config import RunConfig
from ..workload.model_shape import RankLoad
from ..workload.ranks import position
from ..workload.routing import RoutingSource, routing_source
from ..workload.routing import imbalance as imbalance_of

_FAR = (2.0, 4.0)
"""Imbalances between which the slope is taken, beyond usual ones: published workloads have 1.3 to
3.1."""
_WORTH_TELLING = 0.02
"""Smallest excess over the mean that is reported; counting tokens in pairs of whole rows leaves
less than this anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRouting:
    """Imbalance: tokens on the busiest rank over the mean of its group, in the newest window.

    ``by_window`` has the imbalance of each window, oldest first; ``by_layer`` that of the newest
    window by layer of a stage.  ``steady`` is that of the sums over all passes: equal to
    ``imbalance`` if the busiest rank is always the same, 1 if all ranks take turns.
    """

    imbalance: float
    steady: float
    busiest_rank: int
    by_window: tuple[float, ...]
    by_layer: Mapping[int, float]
    num_counted: int = 0
    """Ranks whose passes were counted one by one; the others have sums only, from which ``steady``
    and ``busiest_rank`` are."""
    num_ranks: int = 0


def measured_routing(table: SampleTable) -> MeasuredRouting | None:
    """Return the routing of the newest run; None if no experts on several ranks received tokens."""
    rows = table.newest("routing")
    rows = rows[rows.groupby("window")["num_rows"].transform("sum") > 0]
    if rows.empty:
        return None
    newest = newest_window(rows)
    by_rank = newest.groupby("rank", sort=True)["num_rows"].sum()
    in_group = newest.drop_duplicates("rank").set_index("rank")["ranks"].reindex(by_rank.index)
    # Rows that arrived at each rank, ranks without records too.
    sums = newest_window(table.newest("ranks"))
    everyone = sums[sums["routed_rows"] > 0].set_index("rank")["routed_rows"].sort_index()
    if len(everyone) > len(by_rank):
        layout = table.config().parallelism
        by_rank = everyone
        in_group = pd.Series([position(layout, int(str(r))).stage for r in everyone.index])
        in_group.index = everyone.index
    shares = (by_rank / by_rank.groupby(in_group).transform("mean")).fillna(1.0)
    return MeasuredRouting(
        imbalance=_imbalance(newest),
        steady=float(shares.max()),
        busiest_rank=int(str(shares.idxmax())),
        by_window=tuple(_imbalance(part) for _, part in rows.groupby("window", sort=True)),
        by_layer={
            int(str(layer)): _imbalance(part)
            for layer, part in newest.groupby("layer", sort=True)
            if part["num_rows"].sum() > 0
        },
        num_counted=newest["rank"].nunique(),
        num_ranks=len(by_rank),
    )


def measured_loads(table: SampleTable) -> tuple[RankLoad, ...]:
    """Return the newest window's load of the busiest rank, for each number of ranks.

    The most uneven stage counts, as the others wait for it.
    """
    rows = newest_window(table.newest("loads"))
    rows = rows[rows["num_rows"] > 0]
    mean = rows["num_rows"] / rows["num_ranks"]
    rows = rows.assign(
        in_pass=rows["num_most"] / mean,
        in_layers=rows["num_fullest"] * rows["num_microbatches"] / mean,
    )
    loads = rows.groupby("num_ranks", sort=True)[["in_pass", "in_layers"]].max().clip(lower=1.0)
    return tuple(
        RankLoad(num_ranks=int(str(number)), in_pass=float(in_pass), in_layers=float(in_layers))
        for number, in_pass, in_layers in loads.itertuples()
    )


def with_measured_routing(config: RunConfig, loads: tuple[RankLoad, ...]) -> RunConfig:
    """Return the layout with measured loads of experts; unchanged if there are none."""
    experts = config.model.experts
    if experts is None or not loads:
        return config
    return replace(config, model=replace(config.model, experts=replace(experts, measured=loads)))


def _imbalance(rows: pd.DataFrame) -> float:
    """Return the imbalance over all groups; each rank's row has the maximum of its group."""
    return float(rows["num_most"].sum() / rows["num_rows"].sum())


def imbalance_cost_frac(steps: FittedSteps, config: RunConfig, imbalance: float) -> float | None:
    """Return the share of the step that even routing would save, 0 to 1; None without routing.

    Work and bytes at the experts grow with the tokens of the busiest rank, so that step time is
    linear in the imbalance.  The slope is taken at imbalances where the step model extrapolates:
    near the run's sizes each number of tokens was measured only once or twice, and the model
    follows the noise of these samples.  A step can at most grow in proportion to the tokens.

    ``config`` is the running layout: an imbalance holds for one expert-parallel degree only.
    """
    par = config.parallelism
    if config.model.experts is None or par.ep * par.expert_tp == 1:
        return None
    cost_s, whole_s = _cost_s(steps, config, imbalance)
    return cost_s / whole_s


def routed_s(steps: FittedSteps, config: RunConfig) -> float:
    """Return the seconds of the modelled step that others wait for the rank with the most tokens; 0
    if no tokens were counted."""
    experts, ep = config.model.experts, config.parallelism.ep
    if experts is None or routing_source(experts, ep) is not RoutingSource.MEASURED:
        return 0.0
    return _cost_s(steps, config, imbalance_of(experts, ep))[0]


def _cost_s(steps: FittedSteps, config: RunConfig, imbalance: float) -> tuple[float, float]:
    """Return the seconds that even routing would save, and those of the step."""
    near, far = _FAR
    configs = (with_imbalance(config, near), with_imbalance(config, far), config)
    near_s, far_s, whole_s = steps.predict(configs).time_s.tolist()
    slope_s = max(0.0, (far_s - near_s) / (far - near))
    return min(slope_s * (imbalance - 1.0), whole_s * (1.0 - 1.0 / imbalance)), whole_s


def with_imbalance(config: RunConfig, imbalance: float) -> RunConfig:
    """Return the layout with this imbalance and no dropped tokens."""
    experts = config.model.experts
    if experts is None:
        return config
    uneven = replace(
        experts,
        imbalance=max(1.0, imbalance),
        measured=(),
        is_balance_forced=False,
        capacity_factor=0.0,
        is_padded_to_capacity=False,
    )
    return replace(config, model=replace(config.model, experts=uneven))


def _drift(routing: MeasuredRouting) -> str:
    """Return the change of the imbalance over the windows in words; empty if it was steady."""
    values = routing.by_window
    if max(values) - min(values) < _WORTH_TELLING * values[0]:
        return ""
    text = f", {values[0]:.2f} at first"
    inner = values[1:-1]
    if inner and max(inner) > max(values[0], values[-1]) * (1.0 + _WORTH_TELLING):
        text += f", at most {max(inner):.2f}"
    if inner and min(inner) < min(values[0], values[-1]) / (1.0 + _WORTH_TELLING):
        text += f", at least {min(inner):.2f}"
    return text


def routing_line(routing: MeasuredRouting | None, cost_frac: float | None) -> str:
    """Return the routing as a line; empty if tokens are practically even.

    >>> found = MeasuredRouting(
    ...     imbalance=1.4, steady=1.3, busiest_rank=3, by_window=(1.25, 1.4),
    ...     by_layer={0: 1.1, 1: 1.7},
    ... )
    >>> [*map(print, routing_line(found, 0.14).split("; "))]
    routing: busiest rank 1.40 x the mean, 1.25 at first
    rank 3, layer 1: 1.70 x · imbalance costs 14.0 % of the step
    [None, None]
    """
    if routing is None or routing.imbalance < 1.0 + _WORTH_TELLING:
        return ""
    text = f"routing: busiest rank {routing.imbalance:.2f} x the mean"
    text += _drift(routing)
    steady = routing.steady >= 1.0 + _WORTH_TELLING
    who = f"rank {routing.busiest_rank}" if steady else "no rank in particular"
    layer, worst = max(routing.by_layer.items(), key=lambda pair: pair[1])
    text += f"; {who}, layer {layer}: {worst:.2f} x"
    if routing.num_ranks > routing.num_counted:
        text += f" (counted on {routing.num_counted} of {routing.num_ranks} ranks)"
    if cost_frac is not None:
        text += f" · imbalance costs {format_frac(cost_frac)} of the step"
    return text
