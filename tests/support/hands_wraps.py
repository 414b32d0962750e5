"""Modules that change in mid-window: wrapped, replaced, hooked by the user, prepared once more."""

from __future__ import annotations

from typing import Any

import torch
from hands_copies import module_attributes
from hands_loop import MADE, WIDTH, Training, case
from torch import nn


class Adapted(nn.Module):
    """A linear layer with two thin ones beside it, as fine-tuning replaces it."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


@case()
def wrapped_after_a_step(training: Training) -> None:
    """Layers are replaced between two steps, while modules have hooks; one layer is new."""
    old: Any = None
    for number in training.steps():
        training.step()
        if number == MADE - 1:
            training.net.layers[0].linear_fc2 = Adapted(training.net.layers[0].linear_fc2)
            training.net.layers[1].linear_fc1 = nn.Linear(WIDTH, 2 * WIDTH)
            old, training.net.layers[2] = (
                training.net.layers[2],
                nn.Sequential(training.net.layers[2]),
            )
        if number == MADE:
            training.note("old", module_attributes(old))
            training.note("old output", old(torch.ones(1, WIDTH)))
    training.note("looks", module_attributes(training.net))


def _listen(training: Training, heard: list[str]) -> list[Any]:
    """The user's hooks of every kind, on the model and on a linear layer."""
    handles: list[Any] = []
    for name, module in (("net", training.net), ("linear", training.net.layers[0].linear_fc1)):

        def hear(*_: Any, name: str = name) -> None:
            heard.append(name)

        def fail(*_: Any, name: str = name) -> None:
            heard.append(f"always {name}")

        handles += [
            module.register_forward_pre_hook(hear, prepend=True),
            module.register_forward_hook(hear),
            module.register_forward_hook(fail, always_call=True),
            module.register_full_backward_hook(hear),
            module.register_full_backward_pre_hook(hear),
        ]
    return handles


@case()
def users_hooks(training: Training) -> None:
    """The user's hooks come and go in the window, and see a failing call as any other."""
    handles: list[Any] = []
    heard: list[str] = []
    for number in training.steps():
        if number in (2, MADE):
            handles += _listen(training, heard)
        training.backward()
        if number in (MADE - 2, MADE + 1):
            try:
                training.net.layers[0].linear_fc1(torch.ones(1, 3))
            except RuntimeError as err:
                training.note("error", str(err))
        training.note("heard", heard)
        heard.clear()
        training.note("looks", module_attributes(training.net))
        training.update()
        while number == MADE + 3 and handles:
            handles.pop().remove()
    training.note("looks", module_attributes(training.net))


@case()
def global_hooks(training: Training) -> None:
    """Hooks on all modules of the process count the user's calls alone."""
    from torch.nn.modules import module as torchs

    calls: list[str] = []
    handles = [
        torchs.register_module_forward_pre_hook(lambda m, args: calls.append(type(m).__name__)),
        torchs.register_module_forward_hook(
            lambda m, args, output: calls.append(f"after {type(m).__name__}"), always_call=True
        ),
    ]
    for _ in training.steps():
        training.step()
        training.note("calls", calls)
        calls.clear()
    for handle in handles:
        handle.remove()


@case()
def swapped_forward(training: Training) -> None:
    """A ``forward`` on the instance is set in the window and removed again."""
    for number in training.steps():
        for layer in training.net.layers:
            module: Any = layer.linear_fc1
            if number == MADE:
                module._old_forward = module.forward
                module.forward = lambda x, f=module._old_forward: f(x) * 2
            if number == MADE + 4:
                module.forward = module._old_forward
                del module._old_forward
        training.step()
        training.note("own", [n for n, m in training.net.named_modules() if "forward" in vars(m)])


@case(is_slow=True)
def prepared_twice(training: Training) -> None:
    """Accelerate prepares model and optimizer, and does so once more in the window."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    bare = training.optimizer
    training.model, training.optimizer = accelerator.prepare(training.net, bare)
    for number in training.steps():
        if number == MADE:
            training.model, training.optimizer = accelerator.prepare(
                training.model, training.optimizer
            )
        loss = training.loss_of(training.batch())
        accelerator.backward(loss)
        training.update()
        training.lost(loss)
        training.note("kinds", [type(training.model).__name__, type(training.optimizer).__name__])
    training.note("same", accelerator.unwrap_model(training.model) is training.net)
    accelerator.save(training.net.state_dict(), training.path("state.pt"))
