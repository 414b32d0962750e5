"""A batch is looked into without a question: only what Python's and torch's own kinds hold."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from unaskable import Unaskable, refuse, unaskable

from forerun.hooks.session.first_step import batch_shape

TOKENS = torch.ones(2, 4, dtype=torch.long)
UserTensor: Any = unaskable(torch.Tensor)
type.__setattr__(UserTensor, "__torch_function__", refuse)


def user_tensor() -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return torch.Tensor._make_subclass(UserTensor, torch.ones(3))  # type: ignore[arg-type]


BATCHES: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "nothing": (Unaskable, ()),
    "beside": (lambda: [Unaskable(), torch.ones(3, 2)], (3,)),
    "dict": (lambda: unaskable(dict)(a=Unaskable(), b=torch.ones(3, 2)), (3,)),
    "list": (lambda: unaskable(list)([TOKENS]), (2, 4)),
    "tuple": (lambda: unaskable(tuple)((TOKENS,)), (2, 4)),
    "tensor": (user_tensor, ()),
    "user dict": (lambda: UserDict(tokens=TOKENS), (2, 4)),
    "parameter": (lambda: {"x": nn.Parameter(torch.ones(6))}, (6,)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_looked_into_and_not_asked(name: str) -> None:
    make, shape = BATCHES[name]
    assert batch_shape(make()) == shape


def test_a_batch_that_holds_itself_has_an_end() -> None:
    batch: list[Any] = []
    batch.append(batch)
    assert batch_shape(batch) == ()


def test_a_mode_of_the_users_does_not_see_us() -> None:
    class Counting(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    with Counting() as mode:
        assert batch_shape([TOKENS]) == (2, 4)
        assert mode.count == 0


class Lazy(Mapping[str, Any]):
    """Its fields are made when they are asked for."""

    def __iter__(self) -> Iterator[str]:
        return iter(("tokens",))

    def __len__(self) -> int:
        return 1

    def __getitem__(self, key: str) -> torch.Tensor:
        return torch.randperm(4)


def test_a_mapping_that_makes_its_fields_is_left_alone() -> None:
    before = torch.get_rng_state()
    assert batch_shape((Lazy(),)) == ()
    assert torch.equal(before, torch.get_rng_state())
