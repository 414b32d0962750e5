"""Core time of exponentials, and bandwidth of tensors that outgrow the cache.

    python benchmarks/costs/processor.py

Ratios within one run, on one thread: the time of an element's function over that of a FLOP of a
product, and bytes per second of a tensor by its size, over those of the smallest.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from forerun.benchmarks.markdown_text import markdown_table

KIB = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ELEMENTS, INNER, REPEATS = 32768, 512, 9
Function = Callable[[torch.Tensor], torch.Tensor]
Moved = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FUNCTIONS: dict[str, Function] = {
    "GELU": F.gelu,
    "GELU, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "SiLU": F.silu,
    "softmax": lambda x: torch.softmax(x.view(-1, 128), -1).view(-1),
}
MOVES: dict[str, Moved] = {
    "sum of two": lambda x, y: x + y,
    "product of two": lambda x, y: x * y,
    "GELU": lambda x, _: F.gelu(x),
    "softmax": lambda x, _: torch.softmax(x.view(-1, 128), -1),
}


def main() -> int:
    """Print both tables."""
    torch.set_num_threads(1)
    print(exponentials())
    print()
    print(sizes())
    return 0


def exponentials() -> str:
    """Return FLOP of a product in the time of one element, forward and backward."""
    one, other = torch.randn(INNER, INNER), torch.randn(INNER, INNER)
    flop_s = best_s(lambda: one @ other, 20) / (2 * INNER**3)
    x, grad = torch.randn(ELEMENTS, requires_grad=True), torch.randn(ELEMENTS)
    lines = []
    for name, function in FUNCTIONS.items():
        forward_s = best_s(partial(function, x.detach()), 50)
        y = function(x)
        backward = partial(torch.autograd.grad, y, x, grad, retain_graph=True)
        backward_s = best_s(backward, 50)
        pair = (f"{time_s / ELEMENTS / flop_s:.0f}" for time_s in (forward_s, backward_s))
        lines.append([name, *pair])
    return markdown_table(["function", "FLOP, forward", "FLOP, backward"], lines)


def sizes() -> str:
    """Return bytes per second by the size of a tensor, over those of the smallest."""
    lines = []
    for name, function in MOVES.items():
        rates = []
        for kib in KIB:
            pair = torch.randn(kib * 256), torch.randn(kib * 256)
            call = partial(function, *pair)
            rates.append(kib / best_s(call, 20000 // kib + 3))
        lines.append([name, *(f"{rate / rates[0]:.2f}" for rate in rates)])
    return markdown_table(["", *(f"{kib} KiB" for kib in KIB)], lines)


def best_s(call: Callable[[], object], number: int) -> float:
    """Return seconds of one call, the third fastest of several runs."""
    taken = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        for _ in range(number):
            call()
        taken.append((time.perf_counter() - begun) / number)
    return sorted(taken)[2]


if __name__ == "__main__":
    sys.exit(main())
