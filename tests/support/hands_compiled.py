"""Ways to compile a model or its training; ``HANDS_STANCE`` forbids compilations after warm-up.

Each way reports dynamo's compilations at its end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from hands_loop import Training, case, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint

BACKEND = "eager"
STANCE = os.environ.get("HANDS_STANCE", "default")
WARM = 3
"""Steps of warm-up, after which nothing may be compiled: optimizer state and shapes are known."""
IN_WINDOW, AFTER_WINDOW = 7, 12


def compiled(what: Any, **options: Any) -> Any:
    """Call ``torch.compile`` with the backend of all."""
    return torch.compile(what, backend=BACKEND, **options)


def forbid() -> None:
    """Make recompilations errors from here on."""
    if STANCE == "fail_on_recompile":
        torch.compiler.set_stance("fail_on_recompile")
    elif STANCE == "error_on_recompile":
        torch._dynamo.config.error_on_recompile = True


def warmed(training: Training, warm: int = WARM) -> Iterator[int]:
    """Yield the steps; from ``warm`` on nothing may be compiled."""
    for number in training.steps():
        if number == warm:
            forbid()
        yield number


def train(training: Training, warm: int = WARM) -> None:
    """Train all steps without changes."""
    for _ in warmed(training, warm):
        training.step()


@case()
def model(training: Training) -> None:
    training.model = compiled(training.net)
    train(training)


@case()
def whole_model(training: Training) -> None:
    """The model is compiled without graph breaks."""
    training.model = compiled(training.net, fullgraph=True)
    train(training)


@case()
def model_in_place(training: Training) -> None:
    training.net.compile(backend=BACKEND)
    train(training)


@case()
def one_layer(training: Training) -> None:
    training.net.layers[1].compile(backend=BACKEND)
    train(training)


@case()
def all_layers(training: Training) -> None:
    for number in range(len(training.net.layers)):
        training.net.layers[number] = compiled(training.net.layers[number], fullgraph=True)
    train(training)


@case(has_operators=False)
def forward_function(training: Training) -> None:
    training.loss_of = compiled(training.loss_of)
    train(training)


@case(has_operators=False)
def passes_function(training: Training) -> None:
    """The loss and its backward pass are one function, which dynamo splits in two."""

    @compiled
    def passes(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(training.net, tokens)
        loss.backward()
        return loss.detach()

    for _ in warmed(training):
        training.lost(passes(training.batch()))
        training.update()


@case()
def update_function(training: Training) -> None:
    weights = training.net.parameters()
    training.optimizer = torch.optim.AdamW(weights, lr=torch.tensor(1e-3))  # type: ignore[arg-type]
    update = compiled(training.optimizer.step)
    for _ in warmed(training):
        training.backward()
        update()
        training.optimizer.zero_grad()


@case(has_operators=False)
def step_function(training: Training) -> None:
    """The whole step is one function."""
    weights = training.net.parameters()
    training.optimizer = torch.optim.AdamW(weights, lr=torch.tensor(1e-3))  # type: ignore[arg-type]

    @compiled
    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(training.net, tokens)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        return loss.detach()

    for _ in warmed(training):
        training.lost(step(training.batch()))


@case()
def evaluation(training: Training) -> None:
    """A function that sets the mode itself is compiled without graph breaks."""

    def evaluate(tokens: torch.Tensor) -> torch.Tensor:
        training.net.eval()
        output = training.net(tokens[:, :-1])
        training.net.train()
        return output.sum()

    called = compiled(evaluate, fullgraph=True)
    for _ in warmed(training):
        training.step()
        with torch.no_grad():
            training.lost(called(training.batch()))


@case()
def backward_pass(training: Training) -> None:
    """Layers are compiled; the backward pass of all is captured as one graph."""
    from torch._dynamo import compiled_autograd

    for number in range(len(training.net.layers)):
        training.net.layers[number] = compiled(training.net.layers[number], fullgraph=True)
    for _ in warmed(training):
        loss = training.loss_of(training.batch())
        with compiled_autograd._enable(torch.compile(backend=BACKEND, fullgraph=True)):
            loss.backward()
        training.update()
        training.lost(loss)


@case(hooked=3)  # all comes off in the one in which it is compiled
def late(training: Training) -> None:
    """Layers are compiled inside the window, in a hooked step."""
    for number in warmed(training, IN_WINDOW + 2):
        if number == IN_WINDOW:
            for layer in training.net.layers:
                layer.compile(backend=BACKEND)
        training.step()


@case(hooked=3)
def late_model(training: Training) -> None:
    """The model is compiled between two steps of the window, the later one hooked."""
    for number in warmed(training, IN_WINDOW + 2):
        training.step()
        if number == IN_WINDOW:
            training.model = compiled(training.net)


@case()
def after_window(training: Training) -> None:
    for number in training.steps():
        if number == AFTER_WINDOW:
            training.model = compiled(training.net, fullgraph=True)
        training.step()
    forbid()
    for _ in range(4):
        training.step()


@case()
def dynamic(training: Training) -> None:
    """Batches of changing length, in one graph."""
    training.model = compiled(training.net, dynamic=True)
    for number in warmed(training):
        training.step(training.batch()[:, : 5 + number % 4])


@case()
def hooks_inside(training: Training) -> None:
    """The user's own hooks are inside the compiled part."""
    layer = training.net.layers[1]
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    layer.register_forward_hook(lambda module, args, output: output + 1)
    training.model = compiled(training.net)
    train(training)


@case(is_grouped=True)
def data_parallel_of_compiled(training: Training) -> None:
    training.model = nn.parallel.DistributedDataParallel(compiled(training.net))
    train(training)


@case(is_grouped=True)
def compiled_data_parallel(training: Training) -> None:
    training.model = compiled(nn.parallel.DistributedDataParallel(training.net))
    train(training)


@case()
def checkpointed(training: Training) -> None:
    """Layers are recomputed in the backward pass, inside the compiled part."""

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[return-value]

    for number in range(len(training.net.layers)):
        training.net.layers[number] = Checkpointed(training.net.layers[number])
    training.model = compiled(training.net)
    train(training)
