"""Splits of the ranks as columns: degrees, virtual stages, layers of stages and micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..arguments.short_names import LayoutConstraint
from ..layers.recompute import RecomputeOption
from ..workload.config import RunConfig
from ..workload.layout_table import Column, LayoutTable
from ..workload.model_shape import at_least_one
from ..workload.parallelism import Parallelism
from .space import (
    MOST_CONTEXT,
    MOST_VIRTUAL,
    States,
    has_segments,
    num_nodes,
    plain_layout,
    recomputes,
    shardings,
    splits,
    states,
)

Ints = NDArray[np.int64]
COLUMNS = ("tp", "cp", "ep", "etp", "pp", "vp", "dp", "micro", "is_split", "split", "deep")
"""``is_split``: sequence parallelism; ``split`` and ``deep`` index the splits of layers and the
shardings."""
_SHARDING = (
    *("is_optimizer_distributed", "sharding", "num_optimizer_instances"),
    *("overlaps_grad_reduce", "overlaps_param_gather"),
)
"""Fields that ``shardings`` set."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """All splits of the ranks that Megatron's rules allow, without recompute; a cell's variants
    share its row."""

    table: LayoutTable
    cut: Mapping[str, int]
    """Number of combinations that each rule excludes after the rules before it."""

    def __len__(self) -> int:
        return len(self.table)

    def layout(self, place: int) -> RunConfig:
        """Return the layout of a cell without recompute; raises ``ConfigError`` if it cannot
        run."""
        return self.table.config(place)

    @property
    def plain(self) -> LayoutTable:
        """The cells without sharding of weights and gradients."""
        columns = {n: c for n, c in self.table.columns.items() if n not in _SHARDING}
        return replace(self.table, columns=columns)

    @property
    def num_nodes(self) -> Ints:
        """Number of nodes that the replicas of each cell span."""
        values, places = self.table.each(num_nodes, ("tp", "cp", "pp", "dp"))
        return np.array(values, dtype=np.int64)[places]

    def subset(self, members: Ints) -> Cells:
        """Return the cells with indices ``members``."""
        return replace(self, table=self.table.take(members))


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
        columns = dict(zip(COLUMNS, table.T, strict=True))
        fields = {name: columns[name] for name in ("tp", "cp", "ep", "pp", "vp", "dp")}
        par, etp = self._config.parallelism, columns["etp"]
        fields["etp"] = np.where((etp == par.etp) | (etp != columns["tp"]), etp, 0)
        fields["micro_batch_size"] = columns["micro"]
        fields["is_sequence_parallel"] = columns["is_split"] > 0
        fields["overlaps_tp"] = fields["is_sequence_parallel"] & par.overlaps_tp
        return Cells(
            table=LayoutTable(
                base=plain_layout(self._config, self._shardings[0]),
                columns={
                    **{name: Column.of_numbers(one) for name, one in fields.items()},
                    "chunk_layers": Column(values=tuple(self._splits), codes=columns["split"]),
                    **{
                        name: Column(
                            values=tuple(
                                one.get(name, getattr(par, name)) for one in self._shardings
                            ),
                            codes=columns["deep"],
                        )
                        for name in _SHARDING
                    },
                },
                num_rows=len(table),
            ),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """States and recompute of the variants of a cell, which are all combinations of these."""

    states: tuple[States, ...]
    recomputes: tuple[RecomputeOption, ...]

    def __len__(self) -> int:
        return len(self.states) * len(self.recomputes)


def choices_of(cells: Cells, keep: LayoutConstraint | None = None) -> Column[Choices]:
    """Return the ``Choices`` that ``keep`` allows in each cell, of cells built with the same
    ``keep``."""
    table, nodes, keep = cells.table, cells.num_nodes, keep or LayoutConstraint()
    replicas = table.numbers("dp") * table.numbers("cp")
    expert_tp = np.where(table.numbers("etp") > 0, table.numbers("etp"), table.numbers("tp"))
    expert_dp = table.numbers("tp") * replicas // (table.numbers("ep") * expert_tp)
    has_instances = (replicas % nodes == 0) & (expert_dp % nodes == 0)
    # Cells equal in these have the same choices; a constraint may depend on more fields.
    names = ("pp", "vp", "chunk_layers", *_SHARDING)
    if keep.axes or cells.table.base.absent:
        names = (*names, "tp", "ep", "etp")
    return table.coded(
        lambda layout: _choices(layout, keep), names, replicas > 1, nodes, has_instances
    )


def _choices(layout: RunConfig, keep: LayoutConstraint) -> Choices:
    recompute_options, state_choices = recomputes(layout), states(layout, num_nodes(layout))
    if keep.axes:
        of_states = keep.without(_RECOMPUTE_AXIS)
        of_recompute = keep.without(*keep.axes.keys() - {_RECOMPUTE_AXIS})
        state_choices = tuple(one for one in state_choices if of_states.allows(one.of(layout)))
        recompute_options = tuple(
            one for one in recompute_options if of_recompute.allows(one.applied_to(layout))
        )
    return Choices(states=state_choices, recomputes=recompute_options)


def num_variants(choices: Column[Choices]) -> int:
    """Return the number of variants of cells with these ``Choices``."""
    sizes = np.array([len(one) for one in choices.values], dtype=np.int64)
    return int(sizes[choices.codes].sum())
