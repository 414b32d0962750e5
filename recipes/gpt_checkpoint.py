"""Checkpoints: one file per rank and a tracker file, as Megatron-LM's ``--ckpt-format torch``.

A checkpoint can only be loaded by the layout that wrote it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

TRACKER = "latest_checkpointed_iteration.txt"


def save_checkpoint(
    args: argparse.Namespace,
    iteration: int,
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> None:
    """Write this rank's state; the tracker names the iteration once every rank has written."""
    folder = Path(args.save) / f"iter_{iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {
        "layout": layout(args),
        "iteration": iteration,
        "consumed_train_samples": iteration * args.global_batch_size,
        "model": [chunk.state_dict() for chunk in chunks],
        "optimizer": [_optimizer_state(part) for part in _parts(optimizer)],
        "scheduler": scheduler.state_dict(),
        "cpu_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    torch.save(state, _rank_file(folder))
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (Path(args.save) / TRACKER).write_text(f"{iteration}\n", encoding="ascii")


def load_checkpoint(
    args: argparse.Namespace,
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> int:
    """Load the checkpoint and return its iteration; 0 if the folder has none."""
    tracker = Path(args.load) / TRACKER
    if not tracker.exists():
        if torch.distributed.get_rank() == 0:
            print(f"no checkpoint in {args.load}: starting from the first iteration", flush=True)
        return 0
    folder = Path(args.load) / f"iter_{int(tracker.read_text(encoding='ascii')):07d}"
    path = _rank_file(folder)
    if not path.exists():
        raise SystemExit(
            f"{path} is missing; resume with the layout that saved, {layout(args)} asked"
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["layout"] != layout(args):
        raise SystemExit(
            f"checkpoint has layout {state['layout']}, this run {layout(args)}; make them agree"
        )
    for chunk, weights in zip(chunks, state["model"], strict=True):
        chunk.load_state_dict(weights)
    for part, values in zip(_parts(optimizer), state["optimizer"], strict=True):
        _load_optimizer(part, values)
    scheduler.load_state_dict(state["scheduler"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    torch.set_rng_state(state["cpu_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])
    return int(state["iteration"])


def layout(args: argparse.Namespace) -> str:
    """Return the layout as text, such as ``TP2 PP1 DP4``, with VP and distributed optimizer if
    used."""
    words = [
        f"TP{args.tensor_model_parallel_size}",
        f"PP{args.pipeline_model_parallel_size}",
        f"DP{args.data_parallel_size}",
    ]
    if args.virtual_pipeline_model_parallel_size:
        words.append(f"VP{args.virtual_pipeline_model_parallel_size}")
    if args.use_distributed_optimizer:
        words.append("distributed optimizer")
    return " ".join(words)


def _rank_file(folder: Path) -> Path:
    return folder / f"rank_{torch.distributed.get_rank():05d}.pt"


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizers that Megatron chains, each around one of torch's."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _optimizer_state(part: Any) -> dict[str, Any]:
    """Return torch's own state and the weights it steps: this rank's shard, or the float32 copies.

    Megatron's ``save_parameter_state`` cannot be loaded with torch's Adam (0.16.1: it omits the
    step).
    """
    inner = part.optimizer
    weights = [weight.detach() for group in inner.param_groups for weight in group["params"]]
    return {"state": inner.state_dict(), "weights": weights}


def _load_optimizer(part: Any, values: dict[str, Any]) -> None:
    inner = part.optimizer
    inner.load_state_dict(values["state"])
    weights = [weight for group in inner.param_groups for weight in group["params"]]
    with torch.no_grad():
        for weight, saved in zip(weights, values["weights"], strict=True):
            weight.copy_(saved)
