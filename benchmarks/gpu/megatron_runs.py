"""Unmodified Megatron-LM in this process: layouts trained one after another, and timed passes.

``pretrain_gpt.py`` is found on the path and run as a program, with other arguments each time;
starting Python and CUDA takes longer than ten steps.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import logging
import os
import re
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from forerun.benchmarks.gpu.bench import Bench, NotHere, free_port, timed_event

WARMUP, BARE, BLOCKED = 2, 8, 2
_BLOCKED_S = 0.12
"""Seconds that the stream is blocked before a timed pass: longer than launching it takes."""
_LOSS = re.compile(r"lm loss: ([0-9.E+-]+)")
Around = Callable[[int, Sequence[torch.nn.Module], Any], AbstractContextManager[Any]]
"""Context of one step: its number, the models, and the optimizer."""


class TimeIsUp(Exception):
    """Ends a run after whole steps."""


def losses(log: str) -> list[str]:
    """Return the losses in a log of Megatron's, as they are written."""
    return _LOSS.findall(log)


@dataclass(slots=True, kw_only=True)
class Trained:
    """Steps of one run in seconds, its losses, and what its timed passes took."""

    steps_s: list[float] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    passes: list[dict[str, Any]] = field(default_factory=list)
    begun_nbytes: int = 0
    peak_nbytes: int = 0
    wall_s: float = 0.0
    num_bare: int = BARE

    @property
    def figures(self) -> dict[str, Any]:
        """Figures for JSON: bare steps, their median, and medians of the timed passes."""
        bare_s = self.steps_s[WARMUP : WARMUP + self.num_bare]
        figures: dict[str, Any] = {"steps_s": bare_s, "losses": self.losses[:WARMUP]}
        if bare_s:
            figures["step_s"] = statistics.median(bare_s)
        for one in self.passes:
            for key in ("host_s", "device_s", "layer_host_s", "layer_device_s"):
                if key in one:
                    figures.setdefault(f"{one['phase']}_{key}", []).append(one[key])
            figures.setdefault(f"{one['phase']}_is_ahead", []).append(one["is_ahead"])
        memory = {"begun_nbytes": self.begun_nbytes, "peak_nbytes": self.peak_nbytes}
        return figures | memory | {"wall_s": round(self.wall_s, 2)}


class Megatron:
    """Megatron-LM's program and the state that a run of it leaves behind."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._script = bench, script()
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
        logging.disable(logging.WARNING)

    def train(
        self,
        words: Sequence[str],
        num_steps: int,
        around: Around,
        *,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> Trained:
        """Train until ``TimeIsUp``; with ``--fake-process-group`` as one rank of several."""
        from megatron.training import training

        if dist.is_initialized():  # threads of the groups before would slow this run
            dist.destroy_process_group()
        _reset()
        environ = dict(os.environ)
        place = {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_PORT": free_port()}
        os.environ |= place
        trained, begun_s, begins_s = Trained(), time.perf_counter(), []
        step: Any = training.train_step

        def timed(
            forward: Any, data: Any, model: Any, optimizer: Any, *rest: Any, **more: Any
        ) -> Any:
            begins_s.append(time.perf_counter())
            with around(len(begins_s) - 1, model, optimizer):
                return step(forward, data, model, optimizer, *rest, **more)

        training.train_step = timed
        torch.cuda.reset_peak_memory_stats()
        trained.begun_nbytes = torch.cuda.memory_allocated()
        argv, sys.argv = sys.argv, [self._script, *words, "--train-iters", str(num_steps)]
        text = io.StringIO()
        try:
            with contextlib.redirect_stdout(text), contextlib.suppress(TimeIsUp):
                runpy.run_path(self._script, run_name="__main__")
        finally:
            sys.argv, training.train_step = argv, step
            os.environ.clear()  # Megatron-LM chooses attention by variables, and refuses another
            os.environ.update(environ)
            begins_s.append(time.perf_counter())
            trained.peak_nbytes = torch.cuda.max_memory_allocated()
            training.destroy_global_state()
            gc.collect()
            torch.cuda.empty_cache()
        trained.steps_s = [end - begin for begin, end in pairwise(begins_s)]
        trained.losses = losses(text.getvalue())
        trained.wall_s = time.perf_counter() - begun_s
        return trained

    def layout(
        self,
        words: Sequence[str],
        *,
        rank: int = 0,
        num_ranks: int = 1,
        num_bare: int = BARE,
        num_blocked: int = BLOCKED,
    ) -> Trained:
        """Train a layout: warm-up, bare steps, and steps with timed passes."""
        passes: list[dict[str, Any]] = []

        @contextmanager
        def around(number: int, models: Any, optimizer: Any) -> Iterator[None]:
            is_timed = number >= WARMUP + num_bare
            with _timed_passes(self._bench, models, passes) if is_timed else nullcontext():
                yield

        trained = self.train(
            words, WARMUP + num_bare + num_blocked, around, rank=rank, num_ranks=num_ranks
        )
        trained.passes, trained.num_bare = passes, num_bare
        return trained


def _reset() -> None:
    """Give the next layout what a new process has: stream, compiled code, choices of kernels."""
    torch.cuda.set_stream(torch.cuda.default_stream())
    if "torch._dynamo" in sys.modules:  # shapes of several layouts would be compiled as one
        sys.modules["torch._dynamo"].reset()
    engine = "transformer_engine.pytorch"
    if scales := sys.modules.get(f"{engine}.quantization"):
        scales.FP8GlobalStateManager.reset()
    attention = f"{engine}.attention.dot_product_attention.dot_product_attention"
    if attention in sys.modules:
        sys.modules[attention]._attention_backends["attention_params"] = None


def script() -> str:
    """Return the path of Megatron-LM's ``pretrain_gpt.py``."""
    spec = importlib.util.find_spec("pretrain_gpt")
    if spec is None or spec.origin is None:
        raise NotHere("needs Megatron-LM: carry megatron.tar.xz, or name a clone by --megatron")
    return spec.origin


@contextmanager
def _timed_passes(bench: Bench, models: Any, passes: list[dict[str, Any]]) -> Iterator[None]:
    """Time the first forward and backward pass of a step behind a blocked stream.

    While it is blocked the host queues launches and the device does nothing: the host's clock is
    the launches' time alone, the events' the kernels' alone.  ``is_ahead`` is False if the pass
    took longer than that, or waited for the device.
    """
    from megatron.core.pipeline_parallel import schedules

    stamps: list[tuple[float, Any]] = []
    handles = [handle for model in models for handle in _stamped(model, stamps)]
    real = {"forward": schedules.forward_step, "backward": schedules.backward_step}
    done: set[str] = set()

    def timed(phase: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if phase in done:
                return real[phase](*args, **kwargs)
            done.add(phase)
            torch.cuda.synchronize()
            stamps.clear()
            bench.occupy(_BLOCKED_S)
            begin = _stamp()
            value = real[phase](*args, **kwargs)
            end = _stamp()
            torch.cuda.synchronize()
            passes.append({"phase": phase, **_spent(begin, end, stamps, len(handles))})
            return value

        return call

    schedules.forward_step, schedules.backward_step = timed("forward"), timed("backward")
    try:
        yield
    finally:
        schedules.forward_step, schedules.backward_step = real["forward"], real["backward"]
        for handle in handles:
            handle.remove()


def _stamp() -> tuple[float, Any]:
    event = timed_event()
    event.record()
    return time.perf_counter(), event


def _spent(begin: Any, end: Any, stamps: Sequence[Any], num_layers: int) -> dict[str, Any]:
    """Return host and device seconds of a pass, and of its median layer but the first run."""
    spent = {"host_s": end[0] - begin[0], "device_s": begin[1].elapsed_time(end[1]) / 1e3}
    pairs = [*pairwise(stamps)][1:]
    if pairs and len(stamps) == num_layers:  # recompute stamps anew
        spent["layer_host_s"] = statistics.median(b[0] - a[0] for a, b in pairs)
        spent["layer_device_s"] = statistics.median(a[1].elapsed_time(b[1]) / 1e3 for a, b in pairs)
    return spent | {"is_ahead": spent["host_s"] < _BLOCKED_S}


def _stamped(model: torch.nn.Module, stamps: list[Any]) -> Iterator[Any]:
    """Stamp the bounds of layers: before each forwards, and as the gradient reaches each."""

    def before(layer: Any, args: Any, kwargs: Any) -> None:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        stamps.append(_stamp())
        if torch.is_tensor(hidden) and hidden.requires_grad:
            hidden.register_hook(lambda _: stamps.append(_stamp()))

    for module in model.modules():
        if type(module).__name__.endswith("TransformerLayer"):
            yield module.register_forward_pre_hook(before, with_kwargs=True)
