"""Reading other people's objects, and running what must run for it, leaves no trace."""

from __future__ import annotations

import random
import weakref
from types import GeneratorType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from forerun.hooks.process.host import num_parameters, update_calls, updated_by  # noqa: E402
from forerun.hooks.process.inspection import (  # noqa: E402
    forked_rng,
    is_tensor,
    local_variable,
    weights,
)


class CustomTensor(torch.Tensor):
    """A tensor class of the user's."""


class CustomWeight(torch.nn.Parameter):
    """A parameter class of the user's."""


def test_generators_are_put_back_after_an_error_too() -> None:
    def drawn() -> list[Any]:
        return [random.random(), np.random.random(), torch.rand(1).item()]

    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    with forked_rng():
        first = drawn()
    with pytest.raises(ZeroDivisionError), forked_rng():
        assert drawn() == first and 1 // 0
    assert drawn() == first


def test_a_frame_that_was_read_keeps_nothing_alive() -> None:
    def counting() -> Any:
        large, number = torch.ones(3), 7
        alive = weakref.ref(large)
        yield alive
        del large
        yield number

    drawing = counting()
    assert type(drawing) is GeneratorType
    alive = next(drawing)
    assert local_variable(drawing.gi_frame, "number") == 7
    assert local_variable(drawing.gi_frame, "none") is None
    assert next(drawing) == 7
    assert alive() is None


def test_only_tensors_of_torch_and_its_extensions_are_asked() -> None:
    sized = [torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.nn.Buffer(torch.ones(2))]
    assert all(map(is_tensor, sized))
    assert not any(
        map(is_tensor, (CustomTensor(), CustomWeight(torch.ones(2)), None, 3, [torch.ones(2)]))
    )
    model = torch.nn.Linear(2, 2)
    model.custom = CustomWeight(torch.ones(2))
    assert len(weights([model])) == 2


class Silent(torch.optim.AdamW):
    """An optimizer that answers no question outside its own step."""

    is_stepping = True

    @property
    def param_groups(self) -> Any:
        assert self.is_stepping
        return self.__dict__["groups"]

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.__dict__["groups"] = groups


class Wrapping:
    """A wrapper whose attributes are those of the optimizer inside, by properties."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state


class Mapped(dict[Any, Any]):
    """A state that answers none either."""

    def get(self, key: Any, default: Any = None) -> Any:
        raise AssertionError

    values = keys = items = __iter__ = get  # type: ignore[assignment]


def test_an_optimizer_of_an_own_class_is_known_by_its_state() -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = Silent(model.parameters(), lr=0.1)
    assert [*updated_by(Silent([CustomWeight(torch.ones(2))]))] == []
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.is_stepping = False
    optimizer.state = Mapped({weight: Mapped(values) for weight, values in optimizer.state.items()})
    assert {id(weight) for weight in updated_by(optimizer)} == set(map(id, model.parameters()))
    assert num_parameters([optimizer]) == 16 and update_calls(optimizer) == 16
    assert num_parameters([Wrapping(optimizer)]) == 16 and update_calls(Wrapping(optimizer)) == 16
