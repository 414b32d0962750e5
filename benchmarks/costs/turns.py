"""Cost of hooked steps of a launch-bound run, variants in turns (``benchmarks/costs/turns.py``).

    python benchmarks/costs/turns.py [--layers 12] [--turns 60] [--variants bare hooked ...]

Megatron's model of the recipe trains under the CPU stand-in, so narrow that the host's own work is
all of a step, with events that cost nothing.  Each turn takes one step of every variant in random
order, each followed by bare steps, and compares processor time of the training thread; intervals
are bootstrapped over turns.  ``sampled`` is the micro-batch whose operators are recorded.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

import pretrain_gpt  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from gpt_arguments import parse_args  # noqa: E402
from gpt_model import build  # noqa: E402

from forerun.benchmarks.markdown_text import markdown_table  # noqa: E402
from forerun.hooks.adapters.megatron_model import timer_holders  # noqa: E402
from forerun.hooks.process import Guard, Host, WeakHost  # noqa: E402
from forerun.hooks.recording import samples  # noqa: E402
from forerun.hooks.sensors import DeviceStopwatch, Site  # noqa: E402
from forerun.hooks.session import Instruments, MarkBudget, instruments  # noqa: E402

NUM_AFTER = 2
NUM_MICROBATCHES = 4
ORDER = tuple(range(NUM_MICROBATCHES))


class Event:
    """An event of a device that follows its host at once: processor time of this thread."""

    def record(self, stream: object = None) -> None:
        """Store the time."""
        self.time_ns = time.thread_time_ns()

    def query(self) -> bool:
        """Return True."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds to another event."""
        return (end.time_ns - self.time_ns) / 1e6


class Loop:
    """Steps of the recipe, with the processor time at each micro-batch's begin."""

    def __init__(self, num_layers: int) -> None:
        self.args = args = parse_args(
            [
                *("--num-layers", str(num_layers), "--hidden-size", "32", "--seq-length", "16"),
                *("--micro-batch-size", "1", "--global-batch-size", str(NUM_MICROBATCHES)),
                *("--mock-data", "--distributed-backend", "gloo"),
            ]
        )
        pretrain_gpt.initialize(args)
        self.chunks, self.optimizer, scheduler, _ = build(args)
        self._trainer = pretrain_gpt.Trainer(args, self.chunks, self.optimizer, scheduler)
        self._data = self._trainer._data(pretrain_gpt.Split.TRAIN, 0)
        self.begins: list[float] = []
        forward_step = pretrain_gpt.forward_step

        def timed(*given: Any) -> Any:
            self.begins.append(time.thread_time())
            return forward_step(*given)

        pretrain_gpt.forward_step = timed

    def step(self) -> list[float]:
        """Return the seconds of each micro-batch; the last one includes the optimizer."""
        self.begins.clear()
        self._trainer._step(self._data)
        times = [*self.begins, time.thread_time()]
        return [end - begin for begin, end in pairwise(times)]


Put = Callable[[int], Callable[[], object]]
"""Function that puts hooks on for hooked step number n and returns what takes them off."""
_PARTS = ("_modules", "_dispatches", "_timers", "_passes", "_groups", "_stalls")


def bare(number: int) -> Callable[[], object]:
    """Put nothing on."""
    return lambda: None


class Variants:
    """The variants of a hooked step; a bare one takes ``step_s``."""

    def __init__(self, found: Instruments, step_s: float) -> None:
        self._found = found
        self._generous, self._learned = Budget(num_sites=1), MarkBudget(num_sites=len(sites(found)))
        self._step_s = step_s
        self.by_name: dict[str, Put] = {
            "bare": bare,
            "hooked": self._all,
            "hooked, as its cost allows": self._as_allowed,
            "hooked, some layers": self._of_some_layers,
            "hooked, no garbage collected": self._without_collection,
            "hooked, no backward marks": self._without_backward,
            "nothing sampled": partial(self._put, is_sampled=False),
            "put on and taken off": self._on_and_off,
            "process groups": partial(self._put, parts=("_groups",), is_sampled=False),
            "timers": partial(self._put, parts=("_timers", "_passes"), is_sampled=False),
            "nothing": partial(self._put, parts=(), is_sampled=False),
        }

    def _put(
        self,
        number: int,
        *,
        parts: Sequence[str] = _PARTS,
        is_sampled: bool = True,
        budget: MarkBudget | None = None,
    ) -> Callable[[], object]:
        """Put on these parts alone."""
        found = self._found
        found.num_hooked, found._step_s = number, self._step_s
        found.budget = budget or self._generous
        chosen = samples(found._microbatches, number) if is_sampled else (-1,)
        instruments.samples = lambda *_: chosen  # pyright: ignore
        saved = {name: getattr(found, name) for name in _PARTS}
        for name in set(_PARTS) - set(parts):
            setattr(found, name, _Nothing(saved[name]))
        found.put_on(step=number, window=0)

        def off() -> None:
            log = found.take_off()
            for name, part in saved.items():
                setattr(found, name, part)
            if log is not None:
                log.resolve()

        return off

    def _all(self, number: int) -> Callable[[], object]:
        return self._put(number)

    def _as_allowed(self, number: int) -> Callable[[], object]:
        return self._put(number, budget=self._learned)

    def _of_some_layers(self, number: int) -> Callable[[], object]:
        self._generous.is_short = True
        off = self._put(number)
        self._generous.is_short = False
        return off

    def _without_collection(self, number: int) -> Callable[[], object]:
        gc.disable()
        return then(self._put(number), gc.enable)

    def _without_backward(self, number: int) -> Callable[[], object]:
        modules = self._found._modules
        modules._follow_backward = lambda *_: None
        return then(self._put(number), lambda: delattr(modules, "_follow_backward"))

    def _on_and_off(self, number: int) -> Callable[[], object]:
        self._put(number)()
        return lambda: None


def sites(found: Instruments) -> tuple[Site, ...]:
    """Return the operators of the model."""
    return found._modules.sites


def then(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], object]:
    """Return a function that calls both."""
    return lambda: (first(), second())


class Budget(MarkBudget):
    """Budget that allows all micro-batches, of some layers if it is short."""

    is_short = False

    def level(self, num_steps: int, num_chosen: int, step_s: float, sites_frac: float = 1) -> int:
        """Return 0, or 1 for all layers if it is short."""
        return int(self.is_short and sites_frac == 1)


class _Nothing:
    """Stands for hooks that are left out."""

    def __init__(self, part: Any) -> None:
        self.sites = getattr(part, "sites", ())

    def install(self, *_: Any) -> None:
        """Do nothing."""

    remove = drop_marks = install


@contextmanager
def device_marks() -> Iterator[None]:
    """Marks are a device's, with events that are free."""
    before = instruments.stopwatch_for
    instruments.stopwatch_for = lambda *_: DeviceStopwatch(  # pyright: ignore
        Event, stream_key=lambda: 1, current_stream=object
    )
    yield
    instruments.stopwatch_for = before


def interval(values: np.ndarray) -> str:
    """Return the median with its 90 % bootstrap interval, in microseconds."""
    drawn = np.random.default_rng(0).choice(values, (800, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.05, 0.95)) * 1e6
    return f"{np.median(values) * 1e6:,.0f} ({low:,.0f} to {high:,.0f})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--variants", nargs="*")
    args = parser.parse_args()
    torch.set_num_threads(1)
    loop = Loop(args.layers)
    step_s = min(sum(loop.step()) for _ in range(8))
    guard = Guard()
    holders = timer_holders(loop.chunks, (loop.optimizer,))
    host = Host(models=tuple(loop.chunks), optimizers=(loop.optimizer,), timer_holders=holders)
    with device_marks():
        found = Instruments(
            WeakHost(host),
            guard,
            microbatches=ORDER,
            num_steps=10,
        )
    all_variants = Variants(found, step_s).by_name
    chosen = {name: all_variants[name] for name in args.variants or all_variants}
    taken: dict[str, list[list[float]]] = {name: [] for name in chosen}
    order = list(chosen)
    for turn in range(args.turns + 2):
        random.Random(turn).shuffle(order)
        for name in order:
            begun = time.thread_time()
            off = chosen[name](turn)
            put_s = time.thread_time() - begun
            times = loop.step()
            begun = time.thread_time()
            off()
            put_s += time.thread_time() - begun
            after = [sum(loop.step()) for _ in range(NUM_AFTER)]
            if turn >= 2:
                at = max(samples(ORDER, turn))
                others = sum(times) - times[at]
                taken[name].append([put_s + sum(times), put_s, times[at], others, *after])
    assert guard.num_faults == 0, "a hook has failed"
    arrays = {name: np.array(rows) for name, rows in taken.items()}
    # The last step behind each variant is bare: their median is the turn's base.
    bases = arrays["bare"].copy()
    behind = np.stack([values[:, -1] for values in arrays.values()])
    bases[:, [0, -2, -1]] = np.median(behind, axis=0)[:, None]
    heads = ["us beyond a bare step", "all", "of it", "on and off", "sampled", "others", "after"]
    rows = []
    for name, values in arrays.items():
        differences = values - bases
        cells = [interval(differences[:, column]) for column in range(values.shape[1])]
        share = np.median(differences[:, 0]) / np.median(bases[:, 0])
        rows.append([name, cells[0], f"{share:+.1%}", *cells[1:]])
    heads += ["the step behind it"] * (NUM_AFTER - 1)
    num_sites = len(sites(found))
    bare_ms = np.median(bases[:, 0]) * 1e3
    words = f"{num_sites} sites, {NUM_MICROBATCHES} micro-batches, {args.turns} turns"
    print(f"{words}, bare step {bare_ms:.1f} ms of processor time\n")
    print(markdown_table(heads, rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
