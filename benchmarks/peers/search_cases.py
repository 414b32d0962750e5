"""Cases of a search for layouts, for us and for other tools: model, batch, GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from forerun.benchmarks.published.model_shapes import public_shape
from forerun.calib.workload import Batch, ModelShape, Parallelism, Precision, Recompute, RunConfig

DEVICE = "NVIDIA H100 80GB HBM3"
NUM_GPUS = 1024
_SYNTHETIC_SAMPLES = 16
"""Batch of the eight ranks: enough micro-batches to resolve the host's share of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCase:
    """A model and its batch, its assumed running layout, and the node that was timed."""

    name: str
    shape: str
    """Name for ``public_shape``."""
    seq_length: int
    global_batch_size: int
    running: Parallelism
    """Running layout on all GPUs, which the plan is compared with."""
    measured: Parallelism
    """Layout of eight ranks that trained a few layers of the same width."""
    measured_layers: int
    measured_dense_layers: int | None = None

    def eight_ranks(self) -> RunConfig:
        """Return the run on one node: one stage of a few layers; experts are routed evenly."""
        model = public_shape(
            self.shape,
            seq_length=self.seq_length,
            num_layers=self.measured_layers,
            num_dense_layers=self.measured_dense_layers,
        )
        return RunConfig(
            model=_evenly_routed(model),
            parallelism=self.measured,
            batch=Batch(micro_batch_size=1, global_batch_size=_SYNTHETIC_SAMPLES),
            precision=Precision.BF16,
            device=DEVICE,
            framework="Megatron-LM",
        )

    def on_all(self, running: RunConfig) -> RunConfig:
        """Return the whole model on all GPUs, on the device and under the framework of a run."""
        model = public_shape(self.shape, seq_length=self.seq_length)
        return replace(
            running,
            model=_evenly_routed(model),
            parallelism=self.running,
            batch=Batch(micro_batch_size=1, global_batch_size=self.global_batch_size),
            precision=Precision.BF16,
        )


def _evenly_routed(model: ModelShape) -> ModelShape:
    if model.experts is None:
        return model
    return replace(model, experts=replace(model.experts, is_balance_forced=True))


def _layout(**degrees: Any) -> Parallelism:
    is_split = degrees.get("tp", 1) > 1
    return Parallelism(
        is_sequence_parallel=is_split,
        is_optimizer_distributed=True,
        ranks_per_node=8,
        **degrees,
    )


def _overlapped(**degrees: Any) -> Parallelism:
    return _layout(overlaps_grad_reduce=True, overlaps_param_gather=True, **degrees)


CASES: Mapping[str, SearchCase] = {
    case.name: case
    for case in (
        SearchCase(
            # Narayanan et al., SC 2021, Table 1: batch 1,536 on 1,024 A100, TP 8, PP 16.
            name="dense 175B",
            shape="gpt3-175b",
            seq_length=2048,
            global_batch_size=1536,
            running=_overlapped(tp=8, pp=16, dp=8),
            measured=_layout(tp=4, dp=2),
            measured_layers=4,
        ),
        SearchCase(
            # arXiv:2412.19437, 3.2.1 and 4.2: PP 16, EP 64, batch 15,360.
            name="experts 671B",
            shape="deepseek-v3",
            seq_length=4096,
            global_batch_size=15360,
            running=_overlapped(pp=16, dp=64, ep=64, chunk_layers=(*(4,) * 15, 1)),
            measured=_layout(dp=8, ep=8),
            measured_layers=3,
            measured_dense_layers=1,
        ),
    )
}

PlainLayout = Mapping[str, Any]
"""A layout in terms common to several tools; see ``plain_layout``."""


def plain_layout(config: RunConfig) -> PlainLayout:
    """Return a layout as plain values, for tools in processes of their own."""
    par = config.parallelism
    return {
        **{name: getattr(par, name) for name in ("tp", "pp", "vp", "dp", "cp", "ep")},
        "micro_batch_size": config.batch.micro_batch_size,
        "recompute": config.recompute.value,
        "is_sequence_parallel": par.is_sequence_parallel,
        "is_optimizer_distributed": par.is_optimizer_distributed,
        "is_even": not par.chunk_layers,
        "is_usual": par == _usual(par),
    }


def _usual(par: Parallelism) -> Parallelism:
    """Return the layout without settings that other tools cannot express."""
    return Parallelism(
        **{name: getattr(par, name) for name in ("tp", "pp", "vp", "dp", "ranks_per_node")},
        is_sequence_parallel=par.is_sequence_parallel,
        is_optimizer_distributed=par.is_optimizer_distributed,
        overlaps_grad_reduce=par.overlaps_grad_reduce,
        overlaps_param_gather=par.overlaps_param_gather,
    )


def configured(running: RunConfig, layout: PlainLayout) -> RunConfig:
    """Return a dense layout named by another tool, with the overlaps of the running one.

    Raises ``ConfigError`` if Megatron would not run it.
    """
    par = replace(
        running.parallelism,
        **{name: layout[name] for name in ("tp", "pp", "vp", "dp")},
        is_sequence_parallel=layout["is_sequence_parallel"],
        is_optimizer_distributed=layout["is_optimizer_distributed"],
        chunk_layers=(),
    )
    return replace(
        running,
        parallelism=par,
        batch=replace(running.batch, micro_batch_size=layout["micro_batch_size"]),
        recompute=Recompute(layout["recompute"]),
        recompute_num_layers=0,
        recompute_modules=(),
    )
