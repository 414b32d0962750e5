"""Calls of torch's optimizers on each tensor, counted by torch's own dispatcher."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from forerun.hooks.process.host import has_sharded_tensors, update_calls  # noqa: E402

NUM = 3


class Counter(TorchDispatchMode):
    """Counts operators whose first argument is a weight or of its shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.number = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        first = first[0] if isinstance(first, (list, tuple)) and first else first
        self.number += getattr(first, "shape", None) == self.shape
        return func(*args, **(kwargs or {}))


def stepped(make: Any) -> tuple[int, int]:
    """Calls as we count them, and calls that were dispatched in one step."""
    weights = [torch.nn.Parameter(torch.zeros(5, 7)) for _ in range(NUM)]
    optimizer = make(weights)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    with Counter((5, 7)) as counter:
        optimizer.step()
    return update_calls(optimizer), counter.number


@pytest.mark.parametrize(
    "make",
    [
        lambda w: torch.optim.AdamW(w, foreach=False),
        lambda w: torch.optim.Adam(w, foreach=False),
        lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9, foreach=False),
        lambda w: torch.optim.SGD(w, lr=0.1, foreach=False),
    ],
)
def test_one_by_one_each_tensor_has_its_calls(make: Any) -> None:
    ours, dispatched = stepped(make)
    assert ours == pytest.approx(dispatched, abs=NUM)


def test_at_once_each_tensor_is_looked_through_once() -> None:
    ours, dispatched = stepped(lambda weights: torch.optim.AdamW(weights, fused=True))
    assert ours == NUM and dispatched == 1
    assert stepped(lambda weights: torch.optim.AdamW(weights, foreach=True))[0] == NUM


def test_plain_tensors_are_no_shards() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    assert not has_sharded_tensors([torch.optim.SGD([weight], lr=0.1)])
