"""Pre-train a small GPT on ``megatron.core`` alone, with Megatron-LM's argument names.

    torchrun --standalone --nproc-per-node 2 recipes/pretrain_gpt.py --train-iters 80 --calibrate

A real training run: Megatron's model, schedules, data-parallel wrapper, optimizer and collectives.
Without CUDA it installs Forerun's CPU stand-in by itself.  ``--calibrate`` works as in any other
script; only for ``--calibrate-on-advice=stop`` the loop asks Forerun, once per step, if all ranks
are to end.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch

if not torch.cuda.is_available():
    from forerun.recipes.stand_in_cuda import install as stand_in

    stand_in.install()

if not sys.warnoptions:
    # Megatron's own warnings on every rank: no Transformer Engine or Apex, older names of torch.
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", message="`torch.distributed.*is deprecated")

import torch.distributed as dist
from gpt_arguments import fit_to_world, parse_args
from gpt_checkpoint import layout, load_checkpoint, save_checkpoint
from gpt_data import Batch, Split, open_corpus, rows, to_batches
from gpt_log import Log, print_last
from gpt_model import Chunks, build
from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

from forerun import should_stop


def main(args: argparse.Namespace | None = None) -> None:
    """Train until ``--train-iters``, or until one of the exit conditions holds on any rank."""
    args = args or parse_args()
    initialize(args)
    chunks, optimizer, scheduler, _ = build(args)
    iteration = load_checkpoint(args, chunks, optimizer, scheduler) if args.load else 0
    count = sum(weight.numel() for chunk in chunks for weight in chunk.parameters())
    print_last(f"{layout(args)}: {count} parameters on the last rank, from iteration {iteration}")
    Trainer(args, chunks, optimizer, scheduler).run(iteration)
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def initialize(args: argparse.Namespace) -> None:
    """Initialize process groups, device and seeds."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"),
                        ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29577")):  # fmt: skip
        os.environ.setdefault(name, value)
    fit_to_world(args, int(os.environ["WORLD_SIZE"]))
    if torch.cuda.current_device() == torch.device("cpu"):
        args.use_cpu_initialization = True
    # Ranks may share a device, with NCCL 2.30 and later and NCCL_MULTI_RANK_GPU_ENABLE=1.
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % max(1, torch.cuda.device_count()))
    timeout = datetime.timedelta(minutes=args.distributed_timeout_minutes)
    if args.fake_process_group:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        place = {"rank": int(os.environ["RANK"]), "world_size": args.world_size}
        dist.init_process_group(backend="fake", store=FakeStore(), timeout=timeout, **place)
    else:
        dist.init_process_group(backend=args.distributed_backend, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        create_gloo_process_groups=not args.fake_process_group,
    )
    torch.manual_seed(args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)


class Trainer:
    """The loop: step, log, evaluate, save, exit."""

    def __init__(
        self,
        args: argparse.Namespace,
        chunks: Chunks,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
    ) -> None:
        self._args = args
        self._chunks = chunks
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._corpus = open_corpus(args)
        self._forward_backward = get_forward_backward_func()
        self._log = Log(args)
        self._exit = Exit(args)

    def run(self, iteration: int) -> None:
        """Train from ``iteration`` (steps already done) to the end."""
        args = self._args
        data = self._data(Split.TRAIN, iteration * args.global_batch_size)
        saved = iteration
        reason = None
        while iteration < args.train_iters and reason is None:
            losses, grad_norm = self._step(data)
            iteration += 1
            self._log.step(iteration, losses, grad_norm, self._scheduler)
            if args.eval_iters and iteration % args.eval_interval == 0:
                with self._log.paused():
                    self._evaluate(iteration)
            reason = self._exit.reason(iteration)
            if args.save and args.save_interval and iteration % args.save_interval == 0:
                self._save(iteration)
                saved = iteration
        if reason is not None:
            print_last(f"exiting at iteration {iteration}: {reason}")
        if args.save and saved != iteration:
            self._save(iteration)
        self._log.close()

    def _step(self, data: list[Iterator[Batch]]) -> tuple[list[dict[str, torch.Tensor]], float]:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        losses = self._pass(data, forward_only=False)
        is_updated, grad_norm, _ = self._optimizer.step()
        if is_updated:
            self._scheduler.step(increment=self._args.global_batch_size)
        return losses, grad_norm

    def _pass(self, data: list[Iterator[Batch]], *, forward_only: bool) -> list[dict[str, Any]]:
        args = self._args
        return self._forward_backward(
            forward_step_func=forward_step,
            data_iterator=data if len(data) > 1 else data[0],
            model=self._chunks if len(self._chunks) > 1 else self._chunks[0],
            num_microbatches=args.num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=forward_only,
        )

    def _evaluate(self, iteration: int) -> None:
        """Log the mean loss of the same ``--eval-iters`` global batches each time."""
        is_hooked = self._args.overlap_param_gather
        for chunk in self._chunks:
            if is_hooked:
                chunk.disable_forward_pre_hook()
            chunk.eval()
        data = self._data(Split.VALID, 0)
        losses = []
        with torch.no_grad():
            for _ in range(self._args.eval_iters):
                losses += self._pass(data, forward_only=True)
        for chunk in self._chunks:
            chunk.train()
            if is_hooked:
                chunk.enable_forward_pre_hook()
        self._log.evaluation(iteration, losses)

    def _save(self, iteration: int) -> None:
        with self._log.paused():
            save_checkpoint(self._args, iteration, self._chunks, self._optimizer, self._scheduler)
        print_last(f"saved checkpoint at iteration {iteration} to {self._args.save}")

    def _data(self, split: Split, first_sample: int) -> list[Iterator[Batch]]:
        """Return one iterator per virtual stage, as Megatron's interleaved schedule expects."""
        return [
            to_batches(
                rows(
                    self._corpus,
                    split,
                    first_sample=first_sample,
                    micro_batch_size=self._args.micro_batch_size,
                    data_parallel_rank=parallel_state.get_data_parallel_rank(),
                    data_parallel_size=self._args.data_parallel_size,
                )
            )
            for _ in self._chunks
        ]


class Exit:
    """Conditions to end early; all ranks agree on each, so that all save the same step."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._begin_s = time.monotonic()
        self._is_signalled = False
        if args.exit_signal_handler:
            signal.signal(signal.SIGTERM, self._on_signal)

    def reason(self, iteration: int) -> str | None:
        """Return why to stop after this step, or None; a collective if a signal or the time can end
        it."""
        args = self._args
        if args.exit_signal_handler or args.exit_duration_in_mins:
            minutes = (time.monotonic() - self._begin_s) / 60
            is_over = args.exit_duration_in_mins and minutes > args.exit_duration_in_mins
            flags = torch.tensor([int(self._is_signalled), int(bool(is_over))], device="cuda")
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            is_signalled, is_over = flags.tolist()
            if is_signalled:
                return "signal SIGTERM"
            if is_over:
                return f"{args.exit_duration_in_mins} minutes are over"
        if args.exit_interval and iteration % args.exit_interval == 0:
            return f"exit interval {args.exit_interval}"
        if args.save and should_stop():
            return "advice"
        return None

    def _on_signal(self, *_: object) -> None:
        self._is_signalled = True


def forward_step(data: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Run one micro-batch forward, with the signature that Megatron's schedules call."""
    batch = next(data)
    tokens = batch["tokens"]
    positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=batch["labels"]), loss_of


def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum over tokens, their number, and both for the log."""
    total = losses.float().sum()
    num_tokens = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    report = torch.stack([total.detach(), num_tokens.float()])
    return total, num_tokens, {"lm loss": report}


if __name__ == "__main__":
    args = parse_args()  # as a global, which Forerun reads for the options that the script takes
    main(args)
