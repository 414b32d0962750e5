"""No test of a hook may leave one behind."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._C._distributed_c10d import ProcessGroup, Work

import forerun.hooks.session.session as session


class FakeClock:
    """Nanoseconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns

    def tick(self, nanoseconds: int) -> None:
        self.now_ns += nanoseconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(autouse=True)
def no_hook_remains() -> Iterator[None]:
    methods = {name: value for name, value in vars(ProcessGroup).items() if callable(value)}
    wait, finders, callbacks = vars(Work)["wait"], _finders(), _ours()
    register_count = len(torch.nn.modules.module._global_forward_hooks)
    yield
    assert {n: v for n, v in vars(ProcessGroup).items() if callable(v)} == methods
    assert vars(Work)["wait"] is wait
    assert _finders() == finders
    assert _ours() == callbacks
    assert len(torch.nn.modules.module._global_forward_hooks) == register_count
    assert not session._STATE


def _finders() -> list[object]:
    """Those of imports, without what other packages put there when they are imported."""
    others = ("absl", "transformers")
    return [one for one in sys.meta_path if not type(one).__module__.startswith(others)]


def _ours() -> list[object]:
    return [c for c in gc.callbacks if str(getattr(c, "__module__", "")).startswith("forerun")]


def is_hooked(model: torch.nn.Module) -> bool:
    """True where any module of ``model`` has a forward hook or a method of its own."""
    return any(
        m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules()
    )


@pytest.fixture
def hooked() -> Callable[[torch.nn.Module], bool]:
    return is_hooked
