"""Peak memory of many layouts of one model at once, for a planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..workload.config import Batch, Recompute, RunConfig
from ..workload.parallelism import Parallelism
from ..workload.uneven import uneven_layers
from .block_memory import (
    ChunkLayers,
    ModuleBytes,
    StateBytes,
    module_bytes,
    stage_bytes,
    state_bytes,
)
from .in_flight import in_flight
from .peak import overhead_nbytes

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeChoice:
    """What a layout recomputes; the fields are those of ``RunConfig``."""

    recompute: Recompute = Recompute.NONE
    recompute_num_layers: int = 0
    recompute_modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutColumns:
    """One entry per layout in each array, all of shape (layouts,).

    Chunks are even; without virtual stages, where layers do not split, as ``uneven_layers`` has it.
    """

    tp: Integers
    pp: Integers
    vp: Integers
    dp: Integers
    cp: Integers
    ep: Integers
    etp: Integers
    """0 means that of the rest, as in ``Parallelism``."""
    micro_batch_size: Integers
    is_sequence_parallel: npt.NDArray[np.bool_]
    recompute: Integers
    """Index into the choices that ``memory_table`` is given."""

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def expert_tp(self) -> Integers:
        """Tensor parallelism of the experts."""
        return np.where(self.etp > 0, self.etp, self.tp)


def is_usual(config: RunConfig) -> bool:
    """True where ``LayoutColumns`` can hold the layout's chunks."""
    par = config.parallelism
    chunks = par.chunk_layers
    return not chunks or (par.vp == 1 and chunks == uneven_layers(config.model.num_layers, par.pp))


def columns_of(
    configs: Sequence[RunConfig],
) -> tuple[LayoutColumns, tuple[RecomputeChoice, ...]]:
    """Layouts of one model, all of them usual, as columns, and the choices of recompute in them."""
    choices: dict[RecomputeChoice, int] = {}
    rows = []
    for config in configs:
        choice = RecomputeChoice(
            recompute=config.recompute,
            recompute_num_layers=config.recompute_num_layers,
            recompute_modules=config.recompute_modules,
        )
        par = config.parallelism
        rows.append(
            (
                *(par.tp, par.pp, par.vp, par.dp, par.cp, par.ep, par.etp),
                config.batch.micro_batch_size,
                par.is_sequence_parallel,
                choices.setdefault(choice, len(choices)),
            )
        )
    tp, pp, vp, dp, cp, ep, etp, micro, is_split, choice = np.array(rows, dtype=np.int64).T
    columns = LayoutColumns(
        tp=tp,
        pp=pp,
        vp=vp,
        dp=dp,
        cp=cp,
        ep=ep,
        etp=etp,
        micro_batch_size=micro,
        is_sequence_parallel=is_split.astype(bool),
        recompute=choice,
    )
    return columns, tuple(choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTable:
    """Peaks of the fullest stage, arrays of shape (layouts,)."""

    stage: Integers
    allocated_nbytes: npt.NDArray[np.float64]
    """What the allocator of the device reports."""
    overhead_nbytes: npt.NDArray[np.float64]

    @property
    def total_nbytes(self) -> npt.NDArray[np.float64]:
        """With context and communicators."""
        return self.allocated_nbytes + self.overhead_nbytes


def memory_table(
    config: RunConfig,
    columns: LayoutColumns,
    choices: Sequence[RecomputeChoice] = (RecomputeChoice(),),
) -> MemoryTable:
    """Peaks of layouts that differ from ``config`` in degrees, micro-batch and recompute.

    The same arithmetic as ``memory``, which every entry equals to the byte.  ``ConfigError`` where
    a model does not split over the degrees of a layout.
    """
    pieces = _pieces(config, columns, choices)
    num_microbatches = config.batch.global_batch_size // (columns.micro_batch_size * columns.dp)
    group = config.parallelism.microbatch_group_size or columns.pp
    # Beyond this many micro-batches the schedule holds no more: see ``in_flight``.
    groups = 2 * columns.pp // (group * columns.vp) + 4
    enough = np.where(columns.vp > 1, groups * group, 2 * columns.pp)
    capped = np.minimum(num_microbatches, enough)
    keys = np.stack([columns.pp, columns.vp, capped, columns.recompute])
    unique, inverse = np.unique(keys, axis=1, return_inverse=True)
    stage = np.zeros(len(columns), dtype=np.int64)
    allocated = np.zeros(len(columns))
    order = np.argsort(inverse.reshape(-1), kind="stable")
    bounds = np.searchsorted(inverse.reshape(-1)[order], np.arange(unique.shape[1] + 1))
    state = _state(config, columns)
    for place, (pp, vp, m, choice) in enumerate(unique.T.tolist()):
        rows = order[bounds[place] : bounds[place + 1]]
        shape = _Pipeline(pp=pp, vp=vp, num_microbatches=m, choice=choices[choice])
        stage[rows], allocated[rows] = _fullest(config, pieces, state, rows, shape)
    return MemoryTable(
        stage=stage, allocated_nbytes=allocated, overhead_nbytes=_overhead(config, columns)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pipeline:
    pp: int
    vp: int
    num_microbatches: int
    choice: RecomputeChoice


def _pieces(
    config: RunConfig, columns: LayoutColumns, choices: Sequence[RecomputeChoice]
) -> ModuleBytes:
    keys = np.stack(
        [
            columns.tp,
            columns.cp,
            columns.ep,
            columns.expert_tp,
            columns.micro_batch_size,
            columns.is_sequence_parallel,
            columns.recompute,
        ]
    )
    unique, inverse = np.unique(keys, axis=1, return_inverse=True)
    found = [
        module_bytes(_split(config, key[:6], choices[key[6]]))
        for key in unique.T.astype(int).tolist()
    ]
    return ModuleBytes.stack(found, inverse.reshape(-1))


def _split(config: RunConfig, key: list[int], choice: RecomputeChoice) -> RunConfig:
    """A config without stages that splits its layers by these degrees."""
    tp, cp, ep, etp, micro, is_sequence_parallel = key
    dp = ep * etp
    par = replace(
        config.parallelism,
        tp=tp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        pp=1,
        vp=1,
        chunk_layers=(),
        is_sequence_parallel=bool(is_sequence_parallel),
    )
    return replace(
        config,
        parallelism=par,
        batch=Batch(micro_batch_size=micro, global_batch_size=micro * dp),
        recompute=choice.recompute,
        recompute_num_layers=choice.recompute_num_layers,
        recompute_modules=choice.recompute_modules,
    )


def _state(config: RunConfig, columns: LayoutColumns) -> StateBytes:
    if not config.parallelism.is_optimizer_distributed:
        one = np.ones(len(columns))
        return state_bytes(config, shards=one, expert_shards=one)
    copies = config.parallelism.num_optimizer_instances
    replicas = columns.dp * columns.cp
    experts = replicas * columns.tp // (columns.ep * columns.expert_tp)
    return state_bytes(
        config,
        shards=np.maximum(1, replicas // copies),
        expert_shards=np.maximum(1, experts // copies),
    )


def _fullest(
    config: RunConfig, pieces: ModuleBytes, state: StateBytes, rows: Integers, shape: _Pipeline
) -> tuple[Integers, npt.NDArray[np.float64]]:
    """Stage that needs most, and its bytes, of layouts with the same pipeline."""
    piece = ModuleBytes(**{name: getattr(pieces, name)[rows] for name in ModuleBytes.__slots__})
    part = StateBytes(
        weights=state.weights,
        grads=state.grads,
        optimizer=state.optimizer[rows],
        expert_optimizer=state.expert_optimizer[rows],
    )
    totals = []
    for stage in range(shape.pp):
        held = in_flight(
            num_stages=shape.pp,
            num_virtual_stages=shape.vp,
            num_microbatches=shape.num_microbatches,
            group_size=config.parallelism.microbatch_group_size or shape.pp,
            schedule=config.parallelism.schedule,
            stage=stage,
        )
        found = stage_bytes(
            piece,
            part,
            [
                _layers(config, shape, chunk)
                for chunk in range(stage, shape.pp * shape.vp, shape.pp)
            ],
            held,
            is_first=stage == 0,
            is_last=stage == shape.pp - 1,
            is_tied=config.model.is_tied,
        )
        totals.append(np.broadcast_to(found.total, rows.shape))
    stacked = np.stack(totals)
    fullest = stacked.argmax(axis=0)
    return fullest, stacked[fullest, np.arange(len(rows))]


def _layers(config: RunConfig, shape: _Pipeline, chunk: int) -> ChunkLayers:
    model = config.model
    each, rest = divmod(model.num_layers, shape.pp * shape.vp)
    begin = chunk * each
    if rest and shape.vp > 1:
        raise ConfigError(
            f"num_layers {model.num_layers} does not split over pp {shape.pp} x vp {shape.vp}; "
            f"leave such layouts out, or ask for them one by one with chunk_layers"
        )
    if rest:
        stages = uneven_layers(model.num_layers, shape.pp)
        begin, each = sum(stages[:chunk]), stages[chunk]
    covered = 0
    if shape.choice.recompute is Recompute.FULL:
        covered = min(shape.choice.recompute_num_layers or each, each)
    again = sum(map(model.has_experts, range(begin, begin + covered)))
    plain = sum(map(model.has_experts, range(begin + covered, begin + each)))
    return ChunkLayers(
        dense=each - covered - plain, dense_again=covered - again, expert=plain, expert_again=again
    )


def _overhead(config: RunConfig, columns: LayoutColumns) -> npt.NDArray[np.float64]:
    degrees = np.stack(
        [columns.tp, columns.pp, columns.dp, columns.cp, columns.ep, columns.expert_tp]
    )
    unique, inverse = np.unique(degrees, axis=1, return_inverse=True)
    found = [
        overhead_nbytes(Parallelism(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp), config.device)
        for tp, pp, dp, cp, ep, etp in unique.T.tolist()
    ]
    return np.array(found, dtype=float)[inverse.reshape(-1)]
