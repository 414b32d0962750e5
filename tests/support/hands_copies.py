"""Copies of the model, shallow and deep, pickled and traced: in each step, hooked or not."""

from __future__ import annotations

import copy
import io
import pickle
import pickletools
from typing import Any

import torch
from hands_loop import MADE, WIDTH, WORDS, Training, case, loss_of
from torch import nn


def module_attributes(model: nn.Module) -> list[Any]:
    """Return what user code can see of modules: attributes, hooks, and the owner of ``forward``."""
    results = []
    for name, module in model.named_modules():
        hooks = (
            *(module._forward_pre_hooks, module._forward_hooks, module._backward_hooks),
            *(module._forward_hooks_always_called, module._backward_pre_hooks),
        )
        is_class_forward = getattr(module.forward, "__func__", None) is type(module).forward
        results.append(
            (name, sorted(vars(module)), [len(registry) for registry in hooks], is_class_forward)
        )
    return results


def described(value: Any) -> list[Any]:
    """Return a module's weights and visible attributes, or any other value itself."""
    if isinstance(value, nn.Module):
        return [value.state_dict(), module_attributes(value)]
    return [value]


def unpickled(data: bytes) -> list[Any]:
    """Return the number of operations of a pickle, and a description of its object.

    Bytes are not compared: they contain addresses, and PyTorch's counter of hooks, which takes one
    more byte from 256 on.
    """
    num_operations = sum(code.name != "FRAME" for code, _, _ in pickletools.genops(data))
    return [num_operations, *described(pickle.loads(data))]


def saved(value: Any) -> bytes:
    """Return the bytes that ``torch.save`` writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@case()
def nothing(training: Training) -> None:
    for _ in training.steps():
        training.step()


@case(ranks=2)
def nothing_by_two(training: Training) -> None:
    for _ in training.steps():
        training.step()


@case()
def cloud_pickled(training: Training) -> None:
    """The model and a copy of it are pickled in each step and after it."""
    import cloudpickle

    copied: Any = None
    for number in training.steps():
        training.backward()
        training.note("in", unpickled(cloudpickle.dumps(training.net)))
        if number == MADE:
            copied = copy.deepcopy(training.net)
            training.note("copy", unpickled(cloudpickle.dumps(copied)))
        training.update()
        training.note("after", unpickled(cloudpickle.dumps(training.net)))
    training.note("old copy", unpickled(cloudpickle.dumps(copied)))


@case()
def saved_whole(training: Training) -> None:
    first: Any = None
    copied: Any = None
    for number in training.steps():
        training.backward()
        torch.save(training.model, training.path(f"in-{number}.pt"))
        training.update()
        torch.save(training.net, training.path(f"after-{number}.pt"))
        if number == 0:
            first = copy.deepcopy(training.net)
        if number == MADE:
            copied = copy.deepcopy(training.net)
    torch.save([first, copied], training.path("copies.pt"))


@case(ranks=2)
def saved_whole_by_two(training: Training) -> None:
    copied: Any = None
    for number in training.steps():
        training.backward()
        torch.save(training.net, training.path(f"in-{number}.pt"))
        training.update()
        torch.save(training.net, training.path(f"after-{number}.pt"))
        if number == MADE:
            copied = copy.deepcopy(training.net)
    torch.save(copied, training.path("kept.pt"))


@case()
def teacher(training: Training) -> None:
    """A copy made in a hooked step is called in each later step."""
    copied: nn.Module = training.net
    for number in training.steps():
        tokens = training.batch()
        weight = loss_of(copied, tokens).detach() if number > MADE else torch.ones(())
        loss = weight * training.loss_of(tokens)
        if number == MADE:
            copied = copy.deepcopy(training.net)
            training.note("looks", module_attributes(copied))
        loss.backward()
        training.update()
        training.lost(loss)
    training.note("looks", module_attributes(copied))


@case()
def looked_at(training: Training) -> None:
    """Attributes, hooks and methods are compared with those before the first step."""
    before = module_attributes(training.net)
    for _ in training.steps():
        training.backward()
        training.note("in", module_attributes(training.net) == before)
        training.update()
        training.note("after", module_attributes(training.net) == before)
    training.note("all", before)


@case()
def shallow_copy(training: Training) -> None:
    """A shallow copy with weights of its own computes with those."""
    for _ in training.steps():
        loss = training.loss_of(training.batch())
        copied = copy.copy(training.net.output_layer)
        copied._parameters = {"weight": nn.Parameter(torch.zeros(WORDS, WIDTH)), "bias": None}
        training.note("zero", copied(torch.ones(2, WIDTH)))
        layer = copy.copy(training.net.layers[0])
        layer._modules = {name: copy.deepcopy(m) for name, m in layer._modules.items()}
        layer.linear_fc2.weight.data.zero_()
        training.note("layer", layer(torch.ones(2, WIDTH)))
        loss.backward()
        training.update()
        training.lost(loss)


@case()
def taken_attributes(training: Training) -> None:
    """Another module takes over the attributes of a layer, then gets weights of its own."""
    for _ in training.steps():
        training.backward()
        for source in (training.net.output_layer, training.net.layers[0].linear_fc1):
            taken = nn.Linear(1, 1)
            taken.__dict__.update(source.__dict__)
            weight = nn.Parameter(torch.zeros_like(source.weight))
            taken._parameters = {"weight": weight, "bias": None}
            training.note("zero", taken(torch.ones(2, WIDTH)))
        training.update()


def _traced(training: Training, model: Any) -> None:
    tokens = training.batch()[:, :-1]
    training.note("fx", torch.fx.symbolic_trace(model.layers[0]).code)
    training.note("fx whole", torch.fx.symbolic_trace(model).code)
    traced: Any = torch.jit.trace(model, tokens)
    training.note("trace", str(traced.graph))
    training.note("script", torch.jit.script(model.layers[0]).code)


@case()
def traced(training: Training) -> None:
    """The model and a copy are traced and scripted, in hooked steps and after them."""
    copied: Any = None
    for number in training.steps():
        training.backward()
        if number in (MADE, MADE + 1):
            _traced(training, training.net)
        if number == MADE:
            copied = copy.deepcopy(training.net)
        training.update()
        if number in (MADE, MADE + 1):
            _traced(training, copied)
    _traced(training, copied)


@case(is_slow=True)
def exported(training: Training) -> None:
    """The model and its average are exported, in a hooked step and at the end."""

    def export(model: nn.Module) -> None:
        program = torch.export.export(model, (training.batch()[:, :-1],))
        training.note("export", program.graph_module.code)

    average: Any = None
    for number in training.steps():
        training.backward()
        if number == MADE:
            average = torch.optim.swa_utils.AveragedModel(training.net)
            export(training.net)
        training.update()
        if number == MADE:
            export(average.module)
    export(average.module)
    function = torch.compile(average.module, backend="eager", fullgraph=True)
    training.note("compiled", function(training.batch()))


@case()
def functional(training: Training) -> None:
    """Gradients of each sample come from ``torch.func``, with weights handed in."""
    from torch.func import functional_call, grad, vmap

    def one(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return loss_of(lambda t: functional_call(training.net, weights, (t,)), row[None])

    for _ in training.steps():
        tokens = training.batch()
        weights = {name: p.detach() for name, p in training.net.named_parameters()}
        result = vmap(grad(one), in_dims=(None, 0))(weights, tokens)
        for name, parameter in training.net.named_parameters():
            parameter.grad = result[name].mean(0)
        training.lost(training.loss_of(tokens))
        training.update()


@case(is_slow=True, has_operators=False)
def hugging_face_callbacks(training: Training) -> None:
    """The model is saved by a callback after each step; the callbacks are copied and pickled."""
    import cloudpickle
    from tiny_llama import tiny_data, tiny_llama
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Saves(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **given) -> None:
            training.note("model", saved(model))
            training.note("copy", saved(copy.deepcopy(model)))

    arguments = TrainingArguments(
        output_dir=str(training.files),
        max_steps=14,
        per_device_train_batch_size=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = tiny_data()
    trainer = Trainer(tiny_llama(), arguments, None, data, data[:16], callbacks=[Saves()])
    callbacks = trainer.callback_handler.callbacks
    for _ in range(2):
        others = [one for one in callbacks if not isinstance(one, Saves)]
        training.note("kinds", [type(one).__name__ for one in callbacks])
        training.note("copies", len(copy.deepcopy(others)))
        training.note("pickle", len(pickle.dumps(others)))
        training.note("cloudpickle", len(cloudpickle.dumps(others)))
        if not training.losses:
            training.lost(torch.tensor(trainer.train().training_loss))
