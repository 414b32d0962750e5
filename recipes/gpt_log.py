"""Output of a run: Megatron's log line on the last rank, and W&B if a project is named."""

from __future__ import annotations

import argparse
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

Losses = list[dict[str, torch.Tensor]]


class Log:
    """Means over ``--log-interval`` steps; evaluation and saving are excluded from the step
    time."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._losses: list[torch.Tensor] = []
        self._since_s = time.perf_counter()
        self._paused_s = 0.0
        self._wandb = _open_wandb(args)

    def step(
        self,
        iteration: int,
        losses: Losses,
        grad_norm: float | None,
        scheduler: OptimizerParamScheduler,
    ) -> None:
        """Add one step's losses; print at the end of an interval.

        Collective on the last stage.
        """
        loss = _mean_loss(losses)
        if loss is not None:
            self._losses.append(loss)
        if iteration % self._args.log_interval:
            return
        now_s = time.perf_counter()
        elapsed_ms = (now_s - self._since_s - self._paused_s) * 1e3 / self._args.log_interval
        self._since_s, self._paused_s = now_s, 0.0
        if self._losses and is_last():
            mean = float(torch.stack(self._losses).mean())
            rate = scheduler.optimizer.param_groups[0]["lr"]
            values = {"lm loss": mean, "grad-norm": grad_norm, "learning-rate": rate}
            self._print(iteration, elapsed_ms, values)
            if self._wandb is not None:
                values["iteration-time"] = elapsed_ms / 1e3
                self._wandb.log(values, step=iteration)
        self._losses.clear()

    def evaluation(self, iteration: int, losses: Losses) -> None:
        """Print the validation loss.  Collective on the last stage."""
        loss = _mean_loss(losses)
        if loss is None or not is_last():
            return
        mean = float(loss)
        print_last(
            f" validation loss at iteration {iteration} | lm loss value: {mean:.6E} | "
            f"loss bits {bits(mean)}"
        )
        if self._wandb is not None:
            self._wandb.log({"lm loss validation": mean}, step=iteration)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside from the step time."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - begin_s

    def close(self) -> None:
        """Finish the W&B run, if there is one."""
        if self._wandb is not None:
            self._wandb.finish()

    def _print(self, iteration: int, elapsed_ms: float, values: dict[str, float | None]) -> None:
        args = self._args
        norm = values["grad-norm"]
        print(
            f" [{datetime.now():%Y-%m-%d %H:%M:%S}]"
            f" iteration {iteration:8d}/{args.train_iters:8d} |"
            f" consumed samples: {iteration * args.global_batch_size:12d} |"
            f" elapsed time per iteration (ms): {elapsed_ms:.1f} |"
            f" learning rate: {values['learning-rate']:.6E} |"
            f" global batch size: {args.global_batch_size:5d} |"
            f" lm loss: {values['lm loss']:.6E} |"
            f" loss bits {bits(values['lm loss'])} |"
            f" grad norm: {'none' if norm is None else format(float(norm), '.6f')} |",
            flush=True,
        )


def bits(loss: float) -> str:
    """Return the float32 bit pattern, to compare runs exactly: ``bits(1.0)`` is ``0x3f800000``."""
    return "0x" + struct.pack(">f", loss).hex()


def is_last() -> bool:
    """Return True on the rank that prints."""
    return dist.get_rank() == dist.get_world_size() - 1


def print_last(text: str) -> None:
    """Print on the last rank, where Megatron prints its losses."""
    if is_last():
        print(text, flush=True)


def _mean_loss(losses: Losses) -> torch.Tensor | None:
    """Return the mean per token over micro-batches and replicas; None except on the last stage."""
    if not parallel_state.is_pipeline_last_stage():
        return None
    total = torch.stack([report["lm loss"] for report in losses]).sum(dim=0)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total[0] / total[1]


def _open_wandb(args: argparse.Namespace) -> Any:
    if not args.wandb_project or not is_last():
        return None
    import wandb

    return wandb.init(
        project=args.wandb_project,
        name=args.wandb_exp_name,
        dir=args.wandb_save_dir,
        config=vars(args),
    )
