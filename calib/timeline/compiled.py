"""Many layouts as indices into shared blocks, grouped by the shape of their pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np

from ..errors import ConfigError
from ..layers import (
    Block,
    BlockKind,
    BlockVariant,
    block,
    block_key,
    chunk_variants,
    gradient_uses,
    host_pass,
    p2p_call,
    step_operators,
)
from ..workload import (
    Collective,
    Fp8Recipe,
    GroupRole,
    ModelShape,
    Phase,
    Placement,
    Recompute,
    RunConfig,
)
from .block_times import BlockSums, block_sums
from .items import Floats, Ints, Item, ItemIndex, SparseRows, Sums
from .overlap import block_copies
from .programs import Pipeline

_Kind = TypeVar("_Kind", BlockKind, BlockVariant)


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

    configs: tuple[RunConfig, ...]
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


def compile_layouts(configs: Sequence[RunConfig], *, passes_only: bool = False) -> Compiled:
    """Compile layouts to arrays. Raises ``ConfigError`` if CPU and accelerators are mixed.

    ``passes_only`` leaves out the work of a stage that occurs once in a step.
    """
    return _Compiler(configs).compile(passes_only=passes_only)


def compile_blocks(pairs: Sequence[tuple[Block, RunConfig]]) -> Compiled:
    """Compile blocks, or parts of some, each with a layout that it belongs to, without stages and
    pipelines.

    Raises ``ConfigError`` if CPU and accelerators are mixed.
    """
    configs = [config for _, config in pairs]
    return _Compiler(configs).of_blocks(pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Composition:
    variants: tuple[BlockVariant, ...]
    counts: tuple[tuple[int, ...], ...]
    kind_counts: tuple[tuple[tuple[BlockKind, int], ...], ...]
    """Counts by kind alone, which determine the parameters."""


_GroupKey = tuple[Pipeline, _Composition, bool, bool, bool, int]


class _Compiler:
    def __init__(self, configs: Sequence[RunConfig]) -> None:
        are_host_only = {config.device == "cpu" for config in configs}
        if len(are_host_only) > 1:
            raise ConfigError("layouts on cpu and on an accelerator together; compile them apart")
        self._configs = configs
        self._is_host_only = True in are_host_only
        self._index = ItemIndex()
        self._models: dict[ModelShape, int] = {}
        self._model_numbers: dict[int, int] = {}
        self._blocks: dict[Hashable, int] = {}
        self._made: list[tuple[Block, RunConfig]] = []
        self._steps: dict[Hashable, tuple[int, ...]] = {}
        self._stage_places: dict[Hashable, int] = {}
        self._stages: list[dict[str, list[int]]] = []
        """Items of each distinct stage by field of ``StageSums``, in the order of their issue."""
        self._sent: dict[Hashable, dict[str, list[int]]] = {}
        self._hop_places: dict[Hashable, list[int]] = {}
        self._compositions: dict[Hashable, _Composition] = {}

    def compile(self, *, passes_only: bool) -> Compiled:
        hosts = self._hosts()
        self._passes_only = passes_only
        groups = [self._group(key, members) for key, members in self._grouped().items()]
        return self._compiled(hosts, groups)

    def of_blocks(self, pairs: Sequence[tuple[Block, RunConfig]]) -> Compiled:
        hosts = self._hosts()
        self._made += pairs
        return self._compiled(hosts, [])

    def _hosts(self) -> tuple[int, int, int]:
        place = self._index.place
        forward, _ = host_pass(Phase.FORWARD)
        backward, _ = host_pass(Phase.BACKWARD)
        _, (host_step, _) = step_operators(self._configs[0], 0)
        return place(forward), place(backward), place(host_step)

    def _compiled(self, hosts: tuple[int, int, int], groups: Sequence[LayoutGroup]) -> Compiled:
        made = [block for block, _ in self._made]
        copies = [block_copies(config, block.kind) for block, config in self._made]
        sums = block_sums(made, self._index, copies)
        return Compiled(
            configs=tuple(self._configs),
            items=self._index.items,
            blocks=tuple(made for made, _ in self._made),
            block_configs=tuple(config for _, config in self._made),
            sums=sums,
            stages=self._stage_sums(),
            groups=tuple(groups),
            hosts=hosts,
            is_host_only=self._is_host_only,
        )

    def _grouped(self) -> dict[_GroupKey, list[int]]:
        groups: dict[_GroupKey, list[int]] = {}
        for place, config in enumerate(self._configs):
            par = config.parallelism
            overlaps = (par.overlaps_grad_reduce, par.overlaps_param_gather)
            late = (par.gathers_beside_update, config.num_deferred_heads)
            key = (pipeline_of(config), self._composition(config), *overlaps, *late)
            groups.setdefault(key, []).append(place)
        return groups

    def _group(self, key: _GroupKey, members: list[int]) -> LayoutGroup:
        pipeline, composition, overlaps_reduces, overlaps_gathers, hides_gathers, num_deferred = key
        configs = [self._configs[place] for place in members]
        hops = np.array([self._hops(config) for config in configs], dtype=np.int64)
        is_async = not self._is_host_only
        return LayoutGroup(
            members=np.array(members),
            pipeline=pipeline,
            counts=np.array(composition.counts, dtype=np.float64),
            blocks=np.array([self._block_places(c, composition.variants) for c in configs]),
            hops=hops.reshape(len(members), pipeline.num_chunks - 1),
            stages=np.array([self._step(config, composition) for config in configs]).T,
            host_frac=np.array([[float(not config.is_step_replayed)] for config in configs]),
            deferred_frac=num_deferred / pipeline.num_microbatches,
            hides_gathers_frac=is_async * hides_gathers * (1 - 1 / pipeline.num_virtual_stages),
            overlaps_reduces=is_async and overlaps_reduces,
            overlaps_gathers=is_async and overlaps_gathers,
            gathers_ahead=is_async
            and overlaps_gathers
            and configs[0].parallelism.is_optimizer_distributed,
        )

    def _composition(self, config: RunConfig) -> _Composition:
        experts = config.model.experts
        key = (
            config.model.num_layers,
            config.model.num_prediction_layers,
            None if experts is None else experts.layer_pattern,
            config.model.layer_kinds,
            config.parallelism.pp,
            config.parallelism.vp,
            config.parallelism.chunk_layers,
            config.recompute is Recompute.FULL,
            config.recompute_num_layers,
            config.wide_layers if config.fp8 is not Fp8Recipe.NONE else None,
        )
        composition = self._compositions.get(key)
        if composition is None:
            chunks = [
                _added(chunk_variants(config, chunk))
                for chunk in range(config.parallelism.num_chunks)
            ]
            variants = tuple(dict.fromkeys(variant for chunk in chunks for variant in chunk))
            counts = tuple(tuple(chunk[variant] for variant in variants) for chunk in chunks)
            kinds = [_added((kind, n) for (kind, *_), n in chunk.items()) for chunk in chunks]
            kind_counts = tuple(tuple(chunk.items()) for chunk in kinds)
            composition = _Composition(variants=variants, counts=counts, kind_counts=kind_counts)
            self._compositions[key] = composition
        return composition

    def _block_places(self, config: RunConfig, variants: Sequence[BlockVariant]) -> list[int]:
        # A host runs ahead from one pass into the next unless a pipeline's messages stop it.
        key = (self._model(config), config.parallelism.pp > 1, *block_key(config)[1:])
        out = []
        for variant in variants:
            place = self._blocks.get((key, variant))
            if place is None:
                place = self._blocks[key, variant] = len(self._made)
                kind, is_recomputed, is_wide = variant
                made = block(config, kind, is_recomputed=is_recomputed, is_wide=is_wide)
                self._made.append((made, config))
            out.append(place)
        return out

    def _model(self, config: RunConfig) -> int:
        """Return a number for the model: hashing one takes as long as everything else of a
        layout."""
        number = self._model_numbers.get(id(config.model))
        if number is None:
            number = self._models.setdefault(config.model, len(self._models))
            self._model_numbers[id(config.model)] = number
        return number

    def _hops(self, config: RunConfig) -> list[int]:
        par = config.parallelism
        if par.num_chunks == 1:
            return []
        key = (
            self._model(config),
            *(par.tp, par.cp, par.dp, par.pp, par.is_sequence_parallel, par.ranks_per_node),
            *(par.is_pipeline_before_data, config.batch.micro_batch_size, config.precision),
        )
        places = self._hop_places.get(key)
        if places is None:
            calls = [p2p_call(config, stage, Collective.SEND) for stage in range(par.pp)]
            places = self._hop_places[key] = [self._index.place(call) for call in calls]
        return (places * par.vp)[: par.num_chunks - 1]

    def _step(self, config: RunConfig, composition: _Composition) -> tuple[int, ...]:
        if self._passes_only:
            self._stages = self._stages or [{field.name: [] for field in fields(StageSums)}]
            return (0,) * config.parallelism.pp
        # Everything that the transfers and operators of a step depend on.
        model, par = self._model(config), config.parallelism
        sent = (
            *(config.precision, config.reduces_grads_in_bf16, config.keeps_fp8_params),
            config.wide_layers if config.keeps_fp8_params else None,
            *(composition.kind_counts, config.sharded_update_calls, config.optimizer_state_nbytes),
        )
        offload = (config.optimizer_offload_frac, config.overlaps_optimizer_offload)
        key = (model, par, *sent, *offload)
        stage_places = self._steps.get(key)
        if stage_places is None:
            last = par.pp - 1
            # Gathering ahead and sharding of the update do not change the reductions.
            is_ahead = par.overlaps_param_gather and config.model.experts is not None
            transfer_key = (model, replace(par, overlaps_param_gather=is_ahead), *sent)
            places = []
            for stage in range(last + 1):
                chunks = composition.kind_counts[stage :: last + 1]
                like = (key, chunks, stage in (0, last))
                if like not in self._stage_places:
                    self._stage_places[like] = len(self._stages)
                    items = self._sent_of(config, stage, (transfer_key, chunks, stage in (0, last)))
                    (optimizer, _), _ = step_operators(config, stage)
                    self._stages.append({**items, "optimizer": [self._index.place(optimizer)]})
                places.append(self._stage_places[like])
            stage_places = self._steps[key] = tuple(places)
        return stage_places

    def _sent_of(self, config: RunConfig, stage: int, key: Hashable) -> dict[str, list[int]]:
        """Return the items of the transfers of a stage, by field of ``StageSums``."""
        items = self._sent.get(key)
        if items is None:
            items = self._sent[key] = self._transfers(config, stage)
        return items

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
