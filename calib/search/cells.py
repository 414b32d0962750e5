"""Splits of the ranks as columns: degrees, virtual stages, layers of stages and micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..arguments import LayoutConstraint
from ..workload import Batch, Parallelism, RunConfig, at_least_one
from .space import (
    MOST_CONTEXT,
    MOST_VIRTUAL,
    has_segments,
    num_nodes,
    recomputes,
    shardings,
    splits,
    states,
    with_degrees,
)

Ints = NDArray[np.int64]
COLUMNS = ("tp", "cp", "ep", "etp", "pp", "vp", "dp", "micro", "is_split", "split", "deep")
"""``is_split``: sequence parallelism; ``split`` and ``deep`` index ``Cells.splits`` and
``Cells.shardings``.  A further column is ``number``: the order of cells for breaking ties."""
_LARGE = 2**62


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """All splits of the ranks that Megatron's rules allow; a cell's variants share its row."""

    config: RunConfig
    num_ranks: int
    columns: Mapping[str, Ints]
    splits: tuple[tuple[int, ...], ...]
    """Layers of stages; () if even."""
    shardings: tuple[Mapping[str, object], ...]
    cut: Mapping[str, int]
    """Number of combinations that each rule excludes after the rules before it."""

    def __len__(self) -> int:
        return len(self.columns["tp"])

    def layout(self, place: int, *, is_plain: bool = False) -> RunConfig:
        """Return the layout of a cell without recompute; raises ``ConfigError`` if it cannot run.

        ``is_plain``: without sharding of weights and gradients in any case.
        """
        row = {name: int(self.columns[name][place]) for name in COLUMNS}
        if is_plain:
            row["deep"] = 0
        par = self.config.parallelism
        changes = {
            **self.shardings[row["deep"]],
            **{name: row[name] for name in ("tp", "cp", "ep", "pp", "vp", "dp")},
            "etp": row["etp"] if par.etp == row["etp"] or row["etp"] != row["tp"] else 0,
            "chunk_layers": self.splits[row["split"]],
            "is_sequence_parallel": bool(row["is_split"]),
        }
        batch = Batch(
            micro_batch_size=row["micro"],
            global_batch_size=self.config.batch.global_batch_size,
        )
        return with_degrees(self.config, batch, changes)

    def plain_layouts(self) -> list[RunConfig]:
        """Return one layout per cell, without recompute, weights and gradients not sharded."""
        return [self.layout(place, is_plain=True) for place in range(len(self))]

    def distinct(self, *columns: NDArray[np.int64 | np.bool_]) -> tuple[Ints, Ints]:
        """Return the first cell of each distinct combination of columns, and the index of each
        cell's combination among them."""
        if not len(self):
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        _, firsts, places = np.unique(_joined(columns), return_index=True, return_inverse=True)
        return firsts, places

    @property
    def num_microbatches(self) -> Ints:
        """Number of micro-batches of each cell."""
        samples = self.config.batch.global_batch_size
        return samples // (self.columns["dp"] * self.columns["micro"])

    @property
    def num_nodes(self) -> Ints:
        """Number of nodes that the replicas of each cell span."""
        columns, per_node = self.columns, self.config.parallelism.ranks_per_node
        if not per_node:
            return np.ones(len(self), dtype=np.int64)
        keys = [columns[name] for name in ("tp", "cp", "pp", "dp")]
        firsts, places = self.distinct(*keys)
        return np.array([num_nodes(self.layout(one)) for one in firsts.tolist()], dtype=int)[places]

    def subset(self, members: Ints) -> Cells:
        """Return the cells with indices ``members``."""
        columns = {name: column[members] for name, column in self.columns.items()}
        return replace(self, columns=columns)


def _joined(columns: Sequence[NDArray[np.int64 | np.bool_]]) -> Ints:
    """Return an integer key for each combination, as sorting these is far faster than rows."""
    joined, span = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        values = np.asarray(column, dtype=np.int64)
        least = int(values.min())
        width = int(values.max()) - least + 1
        if span > _LARGE // width:
            joined = np.unique(joined, return_inverse=True)[1]
            span = len(joined)
        joined = joined * width + (values - least)
        span *= width
    return joined


def groups(places: Ints) -> Iterator[Ints]:
    """Yield the indices of each value, in ascending order of values."""
    order = np.argsort(places, kind="stable")
    bounds = np.flatnonzero(np.diff(places[order])) + 1
    yield from (part for part in np.split(order, bounds) if len(part))


def cells_of(config: RunConfig, num_ranks: int, keep: LayoutConstraint | None = None) -> Cells:
    """Return the splits of ``num_ranks`` ranks that can run the model and its global batch.

    ``keep`` restricts axes to some of their values.  Raises ``ConfigError`` if ``num_ranks`` is
    below 1.
    """
    at_least_one("gpus", num_ranks)
    return _Builder(config, num_ranks, keep or LayoutConstraint()).build()


class _Builder:
    def __init__(self, config: RunConfig, num_ranks: int, keep: LayoutConstraint) -> None:
        self._config, self._num_ranks, self._keep = config, num_ranks, keep
        self._cut: Counter[str] = Counter()
        self._splits: dict[tuple[int, ...], int] = {(): 0}
        self._shardings = shardings(config)
        running = config.parallelism.num_optimizer_instances
        self._instances = np.array(
            [one.get("num_optimizer_instances", running) for one in self._shardings], dtype=np.int64
        )
        self._batches: dict[tuple[int, int], Ints] = {}

    def build(self) -> Cells:
        parts = [self._product(degrees) for degrees in self._degrees()]
        table = np.concatenate([np.empty((0, len(COLUMNS)), dtype=np.int64), *parts])
        return Cells(
            config=self._config,
            num_ranks=self._num_ranks,
            columns={
                **dict(zip(COLUMNS, table.T, strict=True)),
                "number": np.arange(len(table)),
            },
            splits=tuple(self._splits),
            shardings=self._shardings,
            cut=dict(self._cut),
        )

    def _allowed(self, axis: str, values: Sequence[int]) -> list[int]:
        """Return the values of an axis that the constraint allows."""
        wanted = self._keep.axes.get(axis)
        return [value for value in values if wanted is None or value in wanted]

    def _passes(self, rule: str, *, is_met: bool, number: int = 1) -> bool:
        if not is_met:
            self._cut[rule] += number
        return is_met

    def _degrees(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield tp, cp, pp, dp and sequence parallelism."""
        ranks = self._num_ranks
        for tp in self._allowed("tp", divisors(ranks)):
            if not self._is_tp_allowed(tp):
                continue
            for cp in self._allowed("cp", divisors(ranks // tp)):
                if not self._is_cp_allowed(tp, cp):
                    continue
                for pp in self._allowed("pp", divisors(ranks // (tp * cp))):
                    dp = ranks // (tp * cp * pp)
                    if self._allowed("dp", [dp]) and self._is_dp_allowed(pp, dp):
                        for is_split in self._is_split(tp, cp):
                            yield tp, cp, pp, dp, is_split

    def _is_tp_allowed(self, tp: int) -> bool:
        model, experts = self._config.model, self._config.model.experts
        heads, groups = model.num_attention_heads, model.num_query_groups
        shared = experts.shared_ffn_hidden_size if experts is not None else 0
        return (
            self._passes(f"tp does not divide {heads} heads", is_met=heads % tp == 0)
            and self._passes(
                f"tp and {groups} query groups do not divide",
                is_met=groups % tp == 0 or tp % groups == 0,
            )
            and self._passes(
                "tp does not divide the widths of the MLP",
                is_met=model.ffn_hidden_size % tp == 0 and shared % tp == 0,
            )
            and self._passes(
                f"tp does not divide a vocabulary of {model.vocab_size}",
                is_met=model.vocab_size % tp == 0,
            )
        )

    def _is_cp_allowed(self, tp: int, cp: int) -> bool:
        config = self._config
        model, par = config.model, config.parallelism
        is_running = cp in (1, par.cp)
        heads = min(model.num_attention_heads, model.num_query_groups)
        # Other degrees are left out, as with the running ones the product may exceed the ranks.
        around = Parallelism(cp=cp, context_comm=par.context_comm, context_inner=par.context_inner)
        exchanged = around.exchanged_cp
        return (
            self._passes("cp on a CPU", is_met=is_running or config.device != "cpu")
            and self._passes(f"cp above {MOST_CONTEXT}", is_met=is_running or cp <= MOST_CONTEXT)
            and self._passes(
                f"2 x cp does not divide the sequence of {model.seq_length}",
                is_met=cp == 1 or model.seq_length % (2 * cp) == 0,
            )
            and self._passes(
                "tp x cp does not divide the heads, as the exchange a2a needs",
                is_met=exchanged == 1 or (heads % (tp * exchanged) == 0 and cp % exchanged == 0),
            )
        )

    def _is_dp_allowed(self, pp: int, dp: int) -> bool:
        layers, samples = self._config.model.num_layers, self._config.batch.global_batch_size
        return self._passes(f"pp above {layers} layers", is_met=pp <= layers) and self._passes(
            f"dp does not divide the global batch of {samples}", is_met=samples % dp == 0
        )

    def _is_split(self, tp: int, cp: int) -> list[bool]:
        """Return sequence parallelism off and on; experts over tp need it on."""
        local = self._config.model.seq_length // cp
        is_able = self._passes("tp does not divide the local sequence", is_met=local % tp == 0)
        choices = [False] if tp == 1 or self._config.model.experts is None else []
        choices += [True] if tp > 1 and is_able else []
        wanted = self._keep.axes.get("sp")
        return [one for one in choices if wanted is None or ("on" if one else "off") in wanted]

    def _product(self, degrees: tuple[int, int, int, int, int]) -> Ints:
        """Return rows of one set of degrees: expert degrees x batches and stages x sharding."""
        tp, cp, pp, dp, _ = degrees
        experts = self._experts(tp, tp * cp * dp)
        batches = self._batch_table(pp, dp)
        is_deep = pp == 1 and dp * cp > 1
        deep = [place for place in range(len(self._shardings)) if place == 0 or is_deep]
        rows = len(experts) * len(batches) * len(deep)
        out = np.empty((rows, len(COLUMNS)), dtype=np.int64)
        e, b, d = (
            one.ravel()
            for one in np.meshgrid(
                np.arange(len(experts)), np.arange(len(batches)), deep, indexing="ij"
            )
        )
        names = {name: place for place, name in enumerate(COLUMNS)}
        for name, value in zip(("tp", "cp", "pp", "dp", "is_split"), degrees, strict=True):
            out[:, names[name]] = value
        e, b = e.astype(int), b.astype(int)
        out[:, [names["ep"], names["etp"]]] = experts[e]
        out[:, [names["micro"], names["vp"], names["split"]]] = batches[b]
        out[:, names["deep"]] = d
        instances = self._instances[d]
        expert_dp = tp * cp * dp // out[:, [names["ep"], names["etp"]]].prod(axis=1)
        is_even = (cp * dp % instances == 0) & (expert_dp % instances == 0)
        self._passes(
            "copies of FSDP do not divide the replicas",
            is_met=bool(is_even.all()),
            number=int((~is_even).sum()),
        )
        return out[is_even]

    def _experts(self, tp: int, num_ranks: int) -> Ints:
        """Return expert parallelism and expert tp over the ranks of a stage, shape (pairs, 2)."""
        experts, par = self._config.model.experts, self._config.parallelism
        if experts is None:
            return np.array([[1, tp]])
        pairs = []
        for ep in self._allowed("ep", divisors(experts.num_experts)):
            for etp in self._allowed("etp", sorted({*divisors(tp), par.expert_tp})):
                is_even = experts.ffn_hidden_size % etp == 0 and num_ranks % (ep * etp) == 0
                if self._passes("ep x etp does not divide the ranks of a stage", is_met=is_even):
                    pairs.append((ep, etp))
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)

    def _batch_table(self, pp: int, dp: int) -> Ints:
        """Return micro-batch, virtual stages and split, shape (choices, 3)."""
        if (pp, dp) not in self._batches:
            rows = list(self._stages(pp, dp))
            self._batches[pp, dp] = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return self._batches[pp, dp]

    def _stages(self, pp: int, dp: int) -> Iterator[tuple[int, int, int]]:
        config = self._config
        samples = config.batch.global_batch_size // dp
        places = [self._splits.setdefault(one, len(self._splits)) for one in splits(config, pp)]
        each, rest = divmod(config.model.num_layers, pp)
        virtual = (
            [v for v in divisors(each) if 1 < v <= MOST_VIRTUAL] if pp > 1 and not rest else ()
        )
        is_fixed = bool(config.model.layer_kinds) and not has_segments(config)
        if is_fixed or (pp == 2 and not config.parallelism.overlaps_p2p):
            virtual = ()
        for micro in self._allowed("mbs", divisors(samples)):
            number = samples // micro
            if self._allowed("vpp", [1]):
                yield from ((micro, 1, place) for place in places)
            is_able = self._passes(
                "interleaving needs a number of micro-batches that pp divides",
                is_met=number % pp == 0,
                number=len(virtual),
            )
            if is_able:
                yield from ((micro, vp, 0) for vp in self._allowed("vpp", virtual))


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


_RECOMPUTE_AXIS = "recompute"
"""Axis of recompute; all others that vary in a cell concern its states."""


def num_variants(cells: Cells, keep: LayoutConstraint | None = None) -> int:
    """Return the number of variants that ``keep`` allows, of cells built with the same ``keep``."""
    columns, keep = cells.columns, keep or LayoutConstraint()
    replicas = columns["dp"] * columns["cp"]
    expert_dp = columns["tp"] * replicas // (columns["ep"] * columns["etp"])
    nodes = cells.num_nodes
    has_instances = (replicas % nodes == 0) & (expert_dp % nodes == 0)
    # Layouts equal in these have as many variants; a constraint may depend on more fields.
    names, spread = ("pp", "vp", "split", "deep"), nodes > 1
    if keep.axes:
        names, spread = (*names, "tp", "ep", "etp"), nodes
    keys = [*(columns[name] for name in names), replicas > 1, spread, has_instances]
    firsts, places = cells.distinct(*keys)
    numbers = [_of_cell(cells.layout(first), keep) for first in firsts.tolist()]
    return int(np.bincount(places) @ np.array(numbers)) if numbers else 0


def _of_cell(layout: RunConfig, keep: LayoutConstraint) -> int:
    """Return the number of variants of a cell, as recompute and states are independent."""
    recompute_options, state_choices = recomputes(layout), states(layout, num_nodes(layout))
    if not keep.axes:
        return len(recompute_options) * len(state_choices)
    of_states = keep.without(_RECOMPUTE_AXIS)
    of_recompute = keep.without(*keep.axes.keys() - {_RECOMPUTE_AXIS})
    num_recomputes = sum(
        of_recompute.allows(recompute.applied_to(layout)) for recompute in recompute_options
    )
    return num_recomputes * sum(of_states.allows(choice.of(layout)) for choice in state_choices)
