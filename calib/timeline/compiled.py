"""Many layouts as indices into the blocks that they share, by the shape of their pipeline."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from ..errors import ConfigError
from ..workload.blocks import Block, BlockSort, block, chunk_sorts
from ..workload.collectives import Collective, GroupRole, Placement
from ..workload.config import Recompute, RunConfig
from ..workload.operators import OperatorKind, Phase
from ..workload.stage_work import gradient_uses, hop_call, host_pass, step_operators
from .block_times import BlockSums, block_sums
from .items import Floats, Ints, Item, ItemIndex, Sums
from .programs import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfers:
    """Transfers of each stage of each layout that are issued one after another, once in a step."""

    total: csr_array
    """Rows are layouts x stages."""
    last: csr_array
    """The one that is issued last."""
    number: Floats
    is_overlapped: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutGroup:
    """Layouts of one pipeline shape: as many chunks of as many blocks of each sort."""

    members: Ints
    """Places of the layouts among all, shape (layouts,)."""
    pipeline: Pipeline
    counts: Floats
    """Blocks of each sort in each chunk, shape (chunks, sorts)."""
    blocks: Ints
    """Which block each layout has for a sort, shape (layouts, sorts)."""
    hops: Ints
    """Item of the message after each chunk but the last, shape (layouts, chunks - 1)."""
    reduces: Transfers
    gathers: Transfers
    gathers_ahead: bool
    """Parameters are gathered beside the first forward pass."""
    finishes: csr_array
    """All-reduces over tp before the optimizer; rows are layouts x stages."""
    embedding: csr_array
    """Sum of the shared embedding's gradients; rows are layouts."""
    optimizer: Ints
    """Item, shape (layouts, stages)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compiled:
    """Layouts ready for any number of evaluations."""

    configs: tuple[RunConfig, ...]
    items: tuple[Item, ...]
    blocks: tuple[Block, ...]
    block_configs: tuple[RunConfig, ...]
    """A layout that each block belongs to."""
    sums: BlockSums
    groups: tuple[LayoutGroup, ...]
    host_forward: int
    host_backward: int
    host_step: int
    is_host_only: bool
    """The device has no streams of its own: nothing overlaps."""


def compile_layouts(configs: Sequence[RunConfig]) -> Compiled:
    """The layouts as arrays.  Raises ``ConfigError`` where CPU and accelerators are mixed."""
    is_host_only = {config.device == "cpu" for config in configs}
    if len(is_host_only) > 1:
        raise ConfigError("layouts on cpu and on an accelerator together; compile them apart")
    return _Compiler(configs, is_host_only=True in is_host_only).compile()


def block_key(config: RunConfig) -> tuple[Hashable, ...]:
    """Everything that a block depends on."""
    par = config.parallelism
    is_selective = config.recompute is Recompute.SELECTIVE
    return (
        config.model,
        par.tp,
        par.cp,
        par.ep,
        par.etp,
        par.context_comm,
        par.is_sequence_parallel,
        par.overlaps_tp,
        par.ranks_per_node,
        par.pp > 1,
        config.batch.micro_batch_size,
        config.precision,
        config.fp8,
        config.is_attention_fused,
        config.is_loss_fused,
        config.recompute_modules or is_selective if is_selective else None,
    )


def _step_key(config: RunConfig) -> tuple[Hashable, ...]:
    """Everything that the transfers and operators of a step depend on."""
    return (
        config.model,
        config.parallelism,
        config.precision,
        config.reduces_grads_in_bf16,
        config.keeps_fp8_params,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageItems:
    """Items of one stage with their number, in the order of their issue."""

    reduces: tuple[tuple[int, int], ...]
    gathers: tuple[tuple[int, int], ...]
    finishes: tuple[tuple[int, int], ...]
    embedding: tuple[tuple[int, int], ...]
    optimizer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Composition:
    sorts: tuple[BlockSort, ...]
    counts: tuple[tuple[int, ...], ...]


class _Compiler:
    def __init__(self, configs: Sequence[RunConfig], *, is_host_only: bool) -> None:
        self._configs = configs
        self._is_host_only = is_host_only
        self._index = ItemIndex()
        self._blocks: dict[Hashable, int] = {}
        self._made: list[tuple[Block, RunConfig]] = []
        self._steps: dict[Hashable, tuple[_StageItems, ...]] = {}
        self._compositions: dict[Hashable, _Composition] = {}

    def compile(self) -> Compiled:
        index = self._index
        forward, _ = host_pass(Phase.FORWARD)
        backward, _ = host_pass(Phase.BACKWARD)
        hosts = [index.place(forward), index.place(backward)]
        groups: dict[Hashable, list[int]] = {}
        keys: dict[Hashable, tuple[Pipeline, _Composition]] = {}
        for place, config in enumerate(self._configs):
            pipeline, composition = _pipeline(config), self._composition(config)
            par = config.parallelism
            overlaps = (par.overlaps_grad_reduce, par.overlaps_param_gather, gathers_ahead(config))
            key = (pipeline, composition, overlaps)
            groups.setdefault(key, []).append(place)
            keys[key] = pipeline, composition
        entries = [self._entries(*keys[key], members) for key, members in groups.items()]
        blocks = [made for made, _ in self._made]
        sums = block_sums(blocks, index)
        host_step = next(
            place
            for place, item in enumerate(index.items)
            if getattr(item, "kind", None) is OperatorKind.HOST_STEP
        )
        return Compiled(
            configs=tuple(self._configs),
            items=index.items,
            blocks=tuple(blocks),
            block_configs=tuple(config for _, config in self._made),
            sums=sums,
            groups=tuple(self._group(*entry) for entry in entries),
            host_forward=hosts[0],
            host_backward=hosts[1],
            host_step=host_step,
            is_host_only=self._is_host_only,
        )

    def _entries(
        self, pipeline: Pipeline, composition: _Composition, members: list[int]
    ) -> tuple[Pipeline, _Composition, list[int], Ints, Ints, list[tuple[_StageItems, ...]]]:
        """Everything of a group that enters items; matrices follow when all items are known."""
        configs = [self._configs[place] for place in members]
        blocks = [self._block_places(config, composition.sorts) for config in configs]
        hops = [self._hops(config) for config in configs]
        steps = [self._step(config) for config in configs]
        return pipeline, composition, members, np.array(blocks), np.array(hops, dtype=np.int64), steps

    def _group(
        self,
        pipeline: Pipeline,
        composition: _Composition,
        members: list[int],
        blocks: Ints,
        hops: Ints,
        steps: list[tuple[_StageItems, ...]],
    ) -> LayoutGroup:
        par = self._configs[members[0]].parallelism
        stages = [stage for layout in steps for stage in layout]
        number = len(self._index)
        is_async = not self._is_host_only
        return LayoutGroup(
            members=np.array(members),
            pipeline=pipeline,
            counts=np.array(composition.counts, dtype=np.float64),
            blocks=blocks,
            hops=hops.reshape(len(members), -1),
            reduces=_transfers(
                [s.reduces for s in stages], number, is_async and par.overlaps_grad_reduce
            ),
            gathers=_transfers(
                [s.gathers for s in stages], number, is_async and par.overlaps_param_gather
            ),
            gathers_ahead=gathers_ahead(self._configs[members[0]]),
            finishes=_sums([s.finishes for s in stages], number),
            embedding=_sums([layout[0].embedding for layout in steps], number),
            optimizer=np.array([[s.optimizer for s in layout] for layout in steps]),
        )

    def _composition(self, config: RunConfig) -> _Composition:
        experts = config.model.experts
        key = (
            config.model.num_layers,
            config.model.num_prediction_layers,
            None if experts is None else experts.layer_pattern,
            config.parallelism.pp,
            config.parallelism.vp,
            config.parallelism.chunk_layers,
            config.recompute is Recompute.FULL,
            config.recompute_num_layers,
        )
        found = self._compositions.get(key)
        if found is None:
            chunks = [dict(_added(config, c)) for c in range(config.parallelism.num_chunks)]
            sorts = tuple(dict.fromkeys(sort for chunk in chunks for sort in chunk))
            counts = tuple(tuple(chunk.get(sort, 0) for sort in sorts) for chunk in chunks)
            found = self._compositions[key] = _Composition(sorts=sorts, counts=counts)
        return found

    def _block_places(self, config: RunConfig, sorts: Sequence[BlockSort]) -> list[int]:
        key = block_key(config)
        out = []
        for sort in sorts:
            place = self._blocks.get((key, sort))
            if place is None:
                place = self._blocks[key, sort] = len(self._made)
                made = block(config, sort[0], is_recomputed=sort[1])
                for operator, _ in made.operators:
                    self._index.place(operator)
                for use in made.uses:
                    self._index.place(use.call)
                self._made.append((made, config))
            out.append(place)
        return out

    def _hops(self, config: RunConfig) -> list[int]:
        num_chunks, pp = config.parallelism.num_chunks, config.parallelism.pp
        if num_chunks == 1:
            return []
        calls = [hop_call(config, chunk, Collective.SEND) for chunk in range(min(pp, num_chunks))]
        places = [self._index.place(call) for call in calls]
        return [places[chunk % pp] for chunk in range(num_chunks - 1)]

    def _step(self, config: RunConfig) -> tuple[_StageItems, ...]:
        key = _step_key(config)
        found = self._steps.get(key)
        if found is None:
            stages = range(config.parallelism.pp)
            found = self._steps[key] = tuple(self._stage(config, stage) for stage in stages)
        return found

    def _stage(self, config: RunConfig, stage: int) -> _StageItems:
        place = self._index.place
        lists: dict[str, list[tuple[int, int]]] = {"reduce": [], "gather": [], "tp": [], "ends": []}
        for use in gradient_uses(config, stage):
            name = "reduce" if use.placement is Placement.GRAD_REDUCE else "gather"
            if use.placement is Placement.GRAD_FINISH:
                name = "ends" if use.call.role is GroupRole.EMBEDDING else "tp"
            lists[name].append((place(use.call), use.count))
        (optimizer, _), (host, _) = step_operators(config, stage)
        place(host)
        return _StageItems(
            reduces=tuple(lists["reduce"]),
            gathers=tuple(lists["gather"]),
            finishes=tuple(lists["tp"]),
            embedding=tuple(lists["ends"]),
            optimizer=place(optimizer),
        )


def gathers_ahead(config: RunConfig) -> bool:
    """True where the gather of parameters runs beside the first forward pass."""
    par = config.parallelism
    return par.overlaps_param_gather and par.is_optimizer_distributed and config.device != "cpu"


def _pipeline(config: RunConfig) -> Pipeline:
    par = config.parallelism
    return Pipeline(
        num_stages=par.pp,
        num_microbatches=config.num_microbatches,
        num_virtual_stages=par.vp,
        microbatch_group_size=par.microbatch_group_size,
        schedule=par.schedule,
        overlaps_p2p=par.overlaps_p2p and config.device != "cpu",
    )


def _added(config: RunConfig, chunk: int) -> dict[BlockSort, int]:
    out: dict[BlockSort, int] = {}
    for sort, count in chunk_sorts(config, chunk):
        out[sort] = out.get(sort, 0) + count
    return out


def _transfers(
    lists: Sequence[Sequence[tuple[int, int]]], num_items: int, is_overlapped: bool
) -> Transfers:
    return Transfers(
        total=_sums(lists, num_items),
        last=_sums([entries[-1:] for entries in lists], num_items),
        number=np.array([float(max(1, len(entries))) for entries in lists]),
        is_overlapped=is_overlapped,
    )


def _sums(lists: Sequence[Sequence[tuple[int, int]]], num_items: int) -> csr_array:
    sums = Sums()
    for entries in lists:
        row = sums.row()
        for item, count in entries:
            sums.add(row, item, count)
    return sums.matrix(num_items)
