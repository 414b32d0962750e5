"""Training loops that faults are injected into: Megatron's GPT on the CPU, and a custom loop.

A loop calls ``moment`` wherever a fault may strike, writes each loss at once, and notes at its end
what is left of us in the process.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

NUM_ITERATIONS = 10
ARGUMENTS = (
    "--num-layers=1",
    "--hidden-size=16",
    "--num-attention-heads=2",
    "--seq-length=8",
    "--micro-batch-size=1",
    "--global-batch-size=4",
    "--hidden-dropout=0.1",
    "--attention-dropout=0.1",
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--mock-data",
)
Moment = Callable[["Training", str], None]


class Training(ABC):
    """Base of both loops.  Moments: start, begin, forward, middle, end, over."""

    is_bare = True

    def __init__(self, folder: Path, rank: int, *moments: Moment | None) -> None:
        self.folder = folder
        self.rank = rank
        self.iteration = -1
        self.num_iterations = NUM_ITERATIONS
        self.num_microbatches = 2
        self.is_stepping = True
        self.forgives: tuple[type[BaseException], ...] = ()
        self.memory: dict[str, Any] = {}
        self._moments = [moment for moment in moments if moment is not None]
        self._losses = (folder / f"losses-{rank}.txt").open("w", buffering=1)

    def run(self) -> None:
        """Train; an error that ends it is noted and raised."""
        error = ""
        random.seed(1)  # every fork seeds it anew
        try:
            self.moment("start")
            self.build()
            self.loop()
            self.moment("over")
        except BaseException as err:
            error = f"{type(err).__name__}: {err}"
            raise
        finally:
            self._note_end(error)

    @abstractmethod
    def build(self) -> None:
        """Make model and optimizer, with the same weights every time."""

    @abstractmethod
    def step(self) -> None:
        """Train one optimizer step."""

    @property
    @abstractmethod
    def modules(self) -> list[nn.Module]:
        """All modules of the model that is trained now."""

    def loop(self) -> None:
        """Steps to the end."""
        for iteration in range(self.num_iterations):
            self.iteration = iteration
            self.moment("begin")
            try:
                self.step()
            except self.forgives as err:
                self.log(f"forgiven {type(err).__name__}: {err}")
            self.moment("end")

    def moment(self, name: str) -> None:
        """Trigger the faults of a moment."""
        for strike in self._moments:
            strike(self, name)

    def log(self, value: object) -> None:
        """Write a loss, or another value that must be the same with us and without."""
        text = value.hex() if isinstance(value, float) else str(value)
        self._losses.write(text + "\n")

    def _note_end(self, error: str) -> None:
        end = {"error": error, "left": find_remaining_hooks(self.modules), "random": random_state()}
        (self.folder / f"end-{self.rank}.json").write_text(json.dumps(end))


class MegatronTraining(Training):
    """``megatron.core``: its GPT, schedules, data-parallel wrapper and distributed optimizer."""

    chunks: Any = ()

    def build(self) -> None:
        """Build the recipe's model, also after an earlier one in the same process."""
        import gpt_model
        import pretrain_gpt
        from gpt_arguments import parse_args
        from megatron.core import tensor_parallel

        if not torch.distributed.is_initialized():
            self._args = parse_args([*ARGUMENTS, f"--train-iters={self.num_iterations}"])
            pretrain_gpt.initialize(self._args)
        torch.manual_seed(1234)
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        self.chunks, self.optimizer, self._scheduler, _ = gpt_model.build(self._args)
        self.num_microbatches = self._args.num_microbatches
        self._data = self._batches()

    @property
    def modules(self) -> list[nn.Module]:
        """The wrapper, the model and all modules within."""
        return [module for chunk in self.chunks for module in chunk.modules()]

    def step(self) -> None:
        """Train as the recipe does, with moments."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.forward_backward()
        self.moment("middle")
        if self.is_stepping and self.optimizer.step()[0]:
            self._scheduler.step(increment=4)
        self.log(float(sum(report["lm loss"][0] for report in losses)))

    def forward_backward(self, *, forward_only: bool = False) -> list[dict[str, torch.Tensor]]:
        """Run Megatron's schedule over the micro-batches."""
        import pretrain_gpt
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(data: Any, model: nn.Module) -> Any:
            self.moment("forward")
            return pretrain_gpt.forward_step(data, model)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=self._data,
            model=self.chunks[0],
            num_microbatches=self.num_microbatches,
            seq_length=8,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _batches(self) -> Any:
        from gpt_data import Split, open_corpus, rows, to_batches

        return to_batches(
            rows(
                open_corpus(self._args),
                Split.TRAIN,
                first_sample=0,
                micro_batch_size=1,
                data_parallel_rank=self.rank,
                data_parallel_size=self._args.data_parallel_size,
            )
        )


class Block(nn.Module):
    """A module whose parts carry Megatron's names, so that they are hooked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(4, 8)
        self.linear_fc2 = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute two products and a residual."""
        return x + self.linear_fc2(torch.relu(self.linear_fc1(x)))


class CustomTraining(Training):
    """A loop that no framework knows, inside ``attach``; without torch.distributed."""

    model: Any = None
    attached: Any = None

    def build(self) -> None:
        """Build a block that ends in dropout, and plain SGD."""
        torch.manual_seed(7)
        self.model = nn.Sequential(Block(), nn.Dropout(0.1))
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.moment("built")

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of the model."""
        return list(self.model.modules()) if self.model is not None else []

    def loop(self) -> None:
        """Train the same steps with and without us."""
        if not self.memory.get("settings"):
            super().loop()
            return
        from forerun.hooks.session.attaching import attach

        with attach(self.model, self.optimizer, **self.memory["settings"]) as self.attached:
            super().loop()

    def step(self) -> None:
        """Run forward, backward and update."""
        self.optimizer.zero_grad()
        self.moment("forward")
        loss = first_tensor(self.model(torch.ones(2, 4))).square().sum()
        loss.backward()
        self.moment("middle")
        self.optimizer.step()
        self.log(loss.item())
        if self.attached is not None:
            self.attached.step()


def first_tensor(value: Any) -> torch.Tensor:
    """Return the first tensor in an output of any form."""
    while not isinstance(value, torch.Tensor):
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value


def find_remaining_hooks(modules: list[nn.Module]) -> list[str]:
    """Return the places that still have hooks of ours; empty after the window."""
    from torch._C._distributed_c10d import ProcessGroup, Work

    places = [f"ProcessGroup.{n}" for n, v in vars(ProcessGroup).items() if _is_ours(v)]
    places += ["Work.wait"] * _is_ours(vars(Work)["wait"])
    places += [f"gc: {c}" for c in gc.callbacks if _is_ours(c)]
    for module in modules:
        name = type(module).__name__
        registered = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        places += [f"{name}: a forward hook" for hook in registered if _is_ours(hook)]
        places += [f"{name}.{key}" for key, value in vars(module).items() if _is_ours(value)]
        timers = getattr(getattr(module, "config", None), "timers", None)
        places += [f"{name}.config.timers"] * _is_ours(type(timers))
    return sorted(set(places))


def _is_ours(value: Any) -> bool:
    value = getattr(value, "func", value)  # a partial
    home = str(getattr(value, "__module__", ""))
    kind = str(getattr(type(value), "__module__", ""))
    return any(module.startswith("forerun.hooks") for module in (home, kind))


def random_state() -> str:
    """Return digests of all generators that training may draw from."""
    states = [torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()]
    if "megatron.core.tensor_parallel" in sys.modules:
        from megatron.core import tensor_parallel

        tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
        states += [(name, state.numpy().tobytes()) for name, state in sorted(tracker.items())]
    return " ".join(sha256(repr(state).encode()).hexdigest()[:12] for state in states)
