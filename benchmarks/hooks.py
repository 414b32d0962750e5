"""What the hooks cost per call in microseconds: ``python benchmarks/hooks.py``; lower is better.

The best of many short repeats is reported, so that other work on the machine counts little.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from forerun.hooks.guard import Guard
from forerun.hooks.modules import ModuleHooks
from forerun.hooks.process_groups import ProcessGroupHooks
from forerun.hooks.recorder import Recorder, StepLog
from forerun.hooks.stopwatch import HostStopwatch
from forerun.hooks.timers import TimersProxy, null_timers

NUM_CALLS = 100
NUM_REPEATS = 40


class Block(nn.Module):
    """One linear layer under a name that is hooked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        return self.linear_fc1(hidden)


def best_us(action: Callable[[], object]) -> float:
    """Microseconds per call of the fastest repeat."""
    times = timeit.repeat(action, number=NUM_CALLS, repeat=NUM_REPEATS)
    return min(times) / NUM_CALLS * 1e6


def main() -> None:
    """Print the extra time of each kind of hook."""
    torch.set_num_threads(1)
    recorder, guard = Recorder(HostStopwatch()), Guard()
    block = Block()
    hidden = torch.ones(2, 2, 4, requires_grad=True)
    modules = ModuleHooks([block], recorder, guard)
    groups = ProcessGroupHooks(recorder, guard)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(4)
    timers = TimersProxy(null_timers, recorder, guard)

    def operator() -> None:
        block(hidden * 1).sum().backward()

    def collective() -> None:
        dist.all_reduce(tensor)

    def phase() -> None:
        timers("forward-compute").start()
        timers("forward-compute").stop()

    def log() -> StepLog:
        return recorder.open(StepLog(step=0, window=0, sites=modules.sites))

    cases = (
        ("operator, forward and backward", operator, modules.install, modules.remove),
        ("synchronous collective", collective, groups.install, groups.remove),
        ("phase", phase, log, recorder.close),
    )
    for name, action, put_on, take_off in cases:
        bare = best_us(action)
        log()
        put_on()
        hooked = best_us(action)
        recorder.close()
        take_off()
        print(f"{name:32} {bare:8.2f} bare {hooked:8.2f} hooked {hooked - bare:8.2f} extra")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
