"""Many layouts as indices into shared blocks, grouped by the shape of their pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TypeVar

import numpy as np

from ..errors import ConfigError
from ..layers.blocks import Block, BlockKind, BlockVariant, block, block_key, chunk_variants
from ..layers.sharding import shard_key
from ..layers.stage_work import gradient_uses, host_pass, p2p_call, step_operators
from ..workload.collectives import Collective, GroupRole, Placement
from ..workload.config import RunConfig
from ..workload.layout_table import LayoutTable, all_but, distinct_rows, groups
from ..workload.operators import Phase
from .block_times import BlockSums, block_sums
from .items import Floats, Ints, Item, ItemIndex, SparseRows, Sums
from .overlap import block_copies
from .programs import Pipeline

_Kind = TypeVar("_Kind", BlockKind, BlockVariant)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IssuedTransfers:
    """Transfers of each distinct stage that are issued in sequence, once in a step."""

    total: SparseRows
    last: SparseRows
    """The transfer that is issued last."""
    number: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSums:
    """Work of each distinct stage once in a step; rows are stages, columns items."""

    reduces: IssuedTransfers
    gathers: IssuedTransfers
    finishes: SparseRows
    """All-reduces over tp before the optimizer."""
    embedding: SparseRows
    """Sum of the shared embedding's gradients."""
    optimizer: SparseRows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutGroup:
    """Layouts of one pipeline shape: the same number of chunks, with the same number of blocks of
    each sort."""

    members: Ints
    """Indices of the layouts among all, shape (layouts,)."""
    pipeline: Pipeline
    counts: Floats
    """Blocks of each sort in each chunk, shape (chunks, sorts)."""
    blocks: Ints
    """Block of each layout for a sort, shape (layouts, sorts)."""
    hops: Ints
    """Item of the message after each chunk but the last, shape (layouts, chunks - 1)."""
    stages: Ints
    """Row of the stage sums, shape (stages, layouts)."""
    host_frac: Floats
    """1, or 0 if a graph replays the whole step, shape (layouts, 1)."""
    deferred_frac: float
    """Share of micro-batches whose output-table weight gradients are deferred until after the last
    pass."""
    hides_gathers_frac: float
    """Share of the update that the first chunk's gather overlaps."""
    overlaps_reduces: bool
    overlaps_gathers: bool
    gathers_ahead: bool
    """Parameters are gathered during the first forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compiled:
    """Layouts ready for any number of evaluations."""

    table: LayoutTable
    items: tuple[Item, ...]
    blocks: tuple[Block, ...]
    block_configs: tuple[RunConfig, ...]
    """One layout that each block belongs to."""
    sums: BlockSums
    stages: StageSums
    groups: tuple[LayoutGroup, ...]
    hosts: tuple[int, int, int]
    """Items of the host's part of a forward pass, of a backward pass and of a step."""
    is_host_only: bool
    """The device has no streams of its own: nothing overlaps."""

    @property
    def block_pairs(self) -> list[tuple[Block, RunConfig]]:
        """Each block with its layout."""
        return list(zip(self.blocks, self.block_configs, strict=True))


def compile_layouts(layouts: Sequence[RunConfig] | LayoutTable) -> Compiled:
    """Compile layouts to arrays. Raises ``ConfigError`` if CPU and accelerators are mixed."""
    compiler = _Compiler(LayoutTable.of(layouts))
    return compiler.compiled(compiler.groups())


def compile_blocks(pairs: Sequence[tuple[Block, RunConfig]]) -> Compiled:
    """Compile blocks, or parts of some, each with a layout that it belongs to, without stages and
    pipelines."""
    compiler = _Compiler(LayoutTable.of([pairs[0][1]]))
    compiler.made += pairs
    return compiler.compiled([])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Composition:
    """Blocks of the chunks of a layout."""

    variants: tuple[BlockVariant, ...]
    counts: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(config: RunConfig) -> _Composition:
        chunks = [_added(chunk) for chunk in _chunks(config)]
        variants = tuple(dict.fromkeys(variant for chunk in chunks for variant in chunk))
        counts = tuple(tuple(chunk[variant] for variant in variants) for chunk in chunks)
        return _Composition(variants=variants, counts=counts)


def _chunks(config: RunConfig) -> Iterator[tuple[tuple[BlockVariant, int], ...]]:
    return (chunk_variants(config, chunk) for chunk in range(config.parallelism.num_chunks))


_PIPELINE = (
    *("pp", "vp", "dp", "micro_batch_size", "global_batch_size", "microbatch_group_size"),
    *("overlaps_p2p", "overlaps_p2p_ends"),
)
_DEFERRED = ("defers_head_gradients", "head_deferral_limit", *_PIPELINE)
_COMPOSITION = (
    *("model", "pp", "vp", "chunk_layers", "recompute", "recompute_num_layers"),
    *("fp8", "wide_layers"),
)
_OVERLAPS = ("overlaps_grad_reduce", "overlaps_param_gather", "gathers_beside_update")
_SHARDS = (
    *("is_optimizer_distributed", "sharding", "regathers_weights", "keeps_grads_whole"),
    *("prefetches_backward", *_OVERLAPS, "dp", "pp", "num_optimizer_instances"),
    *("is_pipeline_before_data", "reduces_grads_in_bf16", "sharded_update_calls", "device"),
)
_BLOCKS = all_but(
    *("pp", "vp", "dp", "chunk_layers", "global_batch_size", "recompute_num_layers"),
    *("recompute_span", "optimizer_offload_frac", "is_optimizer_distributed", "sharding"),
    *("num_optimizer_instances", *_OVERLAPS),
)
_STEPS = all_but(
    *("micro_batch_size", "global_batch_size", "recompute_modules", "recompute_num_layers"),
    *("recompute", "recompute_span"),
)
_HOPS = (
    *("model", "tp", "cp", "dp", "pp", "vp", "is_sequence_parallel", "ranks_per_node"),
    *("is_pipeline_before_data", "micro_batch_size", "precision"),
)
_KindCounts = tuple[tuple[tuple[BlockKind, int], ...], ...]
"""Blocks of each chunk by kind, which determine the parameters."""


def _kind_counts(config: RunConfig) -> _KindCounts:
    by_kind = (_added((kind, count) for (kind, *_), count in chunk) for chunk in _chunks(config))
    return tuple(tuple(chunk.items()) for chunk in by_kind)


class _Compiler:
    def __init__(self, table: LayoutTable) -> None:
        devices = {
            device == "cpu" for device in table.coded(lambda c: c.device, ("device",)).values
        }
        if len(devices) > 1:
            raise ConfigError("layouts on cpu and on an accelerator together; compile them apart")
        self._table = table
        self._is_host_only = True in devices
        self._index = ItemIndex()
        place = self._index.place
        forward, backward = (host_pass(phase)[0] for phase in (Phase.FORWARD, Phase.BACKWARD))
        _, (host_step, _) = step_operators(table.base, 0)
        self._hosts = place(forward), place(backward), place(host_step)
        self._blocks: dict[Hashable, int] = {}
        self.made: list[tuple[Block, RunConfig]] = []
        self._stage_places: dict[Hashable, int] = {}
        self._stages: list[dict[str, list[int]]] = []
        """Items of each distinct stage by field of ``StageSums``, in the order of their issue."""
        self._sent: dict[Hashable, dict[str, list[int]]] = {}

    def compiled(self, groups_of_layouts: Sequence[LayoutGroup]) -> Compiled:
        made = [block for block, _ in self.made]
        copies = [block_copies(config, block.kind) for block, config in self.made]
        sums = block_sums(made, self._index, copies)
        return Compiled(
            table=self._table,
            items=self._index.items,
            blocks=tuple(made),
            block_configs=tuple(config for _, config in self.made),
            sums=sums,
            stages=self._stage_sums(),
            groups=tuple(groups_of_layouts),
            hosts=self._hosts,
            is_host_only=self._is_host_only,
        )

    def groups(self) -> list[LayoutGroup]:
        """Return the layouts by the shape of their pipeline."""
        table = self._table
        pipelines = table.coded(pipeline_of, _PIPELINE)
        compositions = table.coded(_Composition.of, _COMPOSITION)
        deferred = table.coded(lambda config: config.num_deferred_heads, _DEFERRED)
        flags = [table.numbers(name) for name in (*_OVERLAPS, "is_optimizer_distributed")]
        codes = [pipelines.codes, compositions.codes, deferred.codes, *flags]
        blocks = table.each(_itself, _BLOCKS, *self._block_codes())
        hops, stages = table.each(self._hops, _HOPS), self._steps()
        graphs = ("uses_cuda_graphs", "cuda_graph_scope")
        is_replayed = table.coded(lambda config: config.is_step_replayed, graphs)
        out = []
        for members in groups(distinct_rows(codes, len(table))[1]):
            first = int(members[0])
            pipeline, composition = pipelines.value(first), compositions.value(first)
            reduces, gathers, hides_gathers, is_distributed = (bool(one[first]) for one in flags)
            is_async = not self._is_host_only
            of_blocks = partial(self._block_places, variants=composition.variants)
            out.append(
                LayoutGroup(
                    members=members,
                    pipeline=pipeline,
                    counts=np.array(composition.counts, dtype=np.float64),
                    blocks=_gathered(blocks, members, of_blocks),
                    hops=_gathered(hops, members, _itself),
                    stages=_gathered(stages, members, _itself).T,
                    host_frac=_gathered(
                        (is_replayed.values, is_replayed.codes), members, lambda one: [not one]
                    ).astype(np.float64),
                    deferred_frac=deferred.value(first) / pipeline.num_microbatches,
                    hides_gathers_frac=is_async
                    * hides_gathers
                    * (1 - 1 / pipeline.num_virtual_stages),
                    overlaps_reduces=is_async and reduces,
                    overlaps_gathers=is_async and gathers,
                    gathers_ahead=is_async and gathers and is_distributed,
                )
            )
        return out

    def _block_places(self, config: RunConfig, *, variants: Sequence[BlockVariant]) -> list[int]:
        key = block_key(config)
        out = []
        for variant in variants:
            place = self._blocks.get((key, variant))
            if place is None:
                place = self._blocks[key, variant] = len(self.made)
                kind, is_recomputed, is_wide = variant
                made = block(config, kind, is_recomputed=is_recomputed, is_wide=is_wide)
                self.made.append((made, config))
            out.append(place)
        return out

    def _hops(self, config: RunConfig) -> list[int]:
        par = config.parallelism
        if par.num_chunks == 1:
            return []
        calls = [p2p_call(config, stage, Collective.SEND) for stage in range(par.pp)]
        return ([self._index.place(call) for call in calls] * par.vp)[: par.num_chunks - 1]

    def _block_codes(self) -> list[Ints]:
        """Return columns of what blocks depend on besides ``_BLOCKS``: their sharding, and whether
        there are other stages and other micro-batches."""
        shards = self._table.coded(shard_key, _SHARDS)
        has_others = self._table.numbers("pp") > 1, self._table.num_microbatches > 1
        return [shards.codes, *(one.astype(np.int64) for one in has_others)]

    def _steps(self) -> tuple[list[list[int]], Ints]:
        """Return the stages of each distinct layout as rows of the stage sums, and the index of
        each layout among these."""
        kinds = self._table.coded(_kind_counts, _COMPOSITION)
        firsts, places = self._table.distinct(_STEPS, kinds.codes)
        steps = [self._step(self._table.config(row), kinds.value(row)) for row in firsts.tolist()]
        return steps, places

    def _step(self, config: RunConfig, kind_counts: _KindCounts) -> list[int]:
        par, last = config.parallelism, config.parallelism.pp - 1
        # Gathering ahead, sharding of the update and its place do not change the reductions.
        is_ahead = par.overlaps_param_gather and config.model.experts is not None
        sent = (
            *(config.model, replace(par, overlaps_param_gather=is_ahead), config.precision),
            *(config.reduces_grads_in_bf16, config.fp8, config.keeps_fp8_params),
            config.wide_layers if config.keeps_fp8_params else None,
        )
        update = (
            *(par.overlaps_param_gather, config.optimizer_offload_frac),
            *(config.overlaps_optimizer_offload, config.sharded_update_calls),
            *(config.optimizer_state_nbytes, kind_counts if config.sharded_update_calls else None),
        )
        places = []
        for stage in range(last + 1):
            like = (sent, kind_counts[stage :: last + 1], stage in (0, last))
            if like not in self._sent:
                self._sent[like] = self._transfers(config, stage)
            place = self._stage_places.setdefault((like, update), len(self._stages))
            if place == len(self._stages):
                (optimizer, _), _ = step_operators(config, stage)
                update_items = [self._index.place(optimizer)]
                self._stages.append({**self._sent[like], "optimizer": update_items})
            places.append(place)
        return places

    def _transfers(self, config: RunConfig, stage: int) -> dict[str, list[int]]:
        place = self._index.place
        lists: dict[str, list[int]] = {field.name: [] for field in fields(StageSums)}
        # Equal buckets are one object: looking up its id saves most of the hashing.
        places: dict[int, int] = {}
        uses = gradient_uses(config, stage)
        for use in uses:
            if id(use) not in places:
                places[id(use)] = place(use.call)
            name = "reduces" if use.placement is Placement.GRAD_REDUCE else "gathers"
            if use.placement is Placement.GRAD_FINISH:
                name = "embedding" if use.call.role is GroupRole.EMBEDDING else "finishes"
            lists[name] += [places[id(use)]] * use.count
        return lists

    def _stage_sums(self) -> StageSums:
        def transfers(name: str) -> IssuedTransfers:
            lists = [stage[name] for stage in self._stages]
            return IssuedTransfers(
                total=_sums(lists),
                last=_sums([entries[-1:] for entries in lists]),
                number=np.array([float(max(1, len(entries))) for entries in lists]),
            )

        return StageSums(
            reduces=transfers("reduces"),
            gathers=transfers("gathers"),
            finishes=_sums([stage["finishes"] for stage in self._stages]),
            embedding=_sums([stage["embedding"] for stage in self._stages]),
            optimizer=_sums([stage["optimizer"] for stage in self._stages]),
        )


def pipeline_of(config: RunConfig) -> Pipeline:
    par = config.parallelism
    return Pipeline(
        num_stages=par.pp,
        num_microbatches=config.num_microbatches,
        num_virtual_stages=par.vp,
        microbatch_group_size=par.microbatch_group_size,
        overlaps_p2p=par.overlaps_p2p,
        overlaps_p2p_ends=par.overlaps_p2p_ends,
    )


def _itself(value: _T) -> _T:
    return value


def _gathered(
    part: tuple[Sequence[_T], Ints], members: Ints, row_of: Callable[[_T], Sequence[int]]
) -> Ints:
    """Return ``row_of`` the value of each member, shape (members, ...); values come as a list and
    the index in it of each layout."""
    values, places = part
    used, codes = np.unique(places[members], return_inverse=True)
    rows = [row_of(values[place]) for place in used.tolist()]
    return np.array(rows, dtype=np.int64)[codes]


def _added(pairs: Iterable[tuple[_Kind, int]]) -> Counter[_Kind]:
    """Add up counts by name, in the order in which names first occur."""
    out: Counter[_Kind] = Counter()
    for kind, count in pairs:
        out[kind] += count
    return out


def _sums(lists: Sequence[Sequence[int]]) -> SparseRows:
    sums = Sums()
    for entries in lists:
        row = sums.row()
        sums.extend(row, entries, [1.0] * len(entries))
    return sums.matrix()
