"""What a training script of the user may do itself in a hooked step, with us and without."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import sys
import threading
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from fault_injections import at, let_write
from fault_training import MegatronTraining, OwnTraining, Training
from torch import nn
from torch._C._distributed_c10d import ProcessGroup

NUM_CALLS = 400


def interrupt_without_us(training: MegatronTraining) -> None:
    """The error that a hook meets with us, at the same place of the pass."""
    if training.is_bare:
        next(training._data)
        raise KeyboardInterrupt


def leave(training: Training) -> None:
    """``sys.exit`` with a status of the user's."""
    sys.exit(3)


def vanish(training: Training) -> None:
    """The process is gone at once; the writer has written what it was given."""
    let_write(training)
    os._exit(9)


def exit_forked(training: Training) -> None:
    """A child of the training process that ends as a script does."""
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    training.say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


class Squares(torch.utils.data.Dataset):
    """Items made in worker processes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index).square()


def load_data(training: Training) -> None:
    """A loader with worker processes."""
    loader = torch.utils.data.DataLoader(Squares(), num_workers=1, multiprocessing_context="fork")
    training.say([int(item) for item in loader])


def copy_model(training: Training) -> None:
    """A deep copy, as of an averaged model, that must be a model of its own."""
    part = _part(training)
    twin = copy.deepcopy(part)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.mul_(2.0)
    training.memory["twin"] = twin


def use_copy(training: Training) -> None:
    """The copy computes with its own weights, and holds nothing of ours."""
    twin = training.memory["twin"]
    training.say(_output(twin))
    training.say(sorted(_foreign(twin)))


def pickle_model(training: Training) -> None:
    """``torch.save`` of a whole model goes through ``pickle``."""
    twin = pickle.loads(pickle.dumps(_part(training)))
    training.say(_output(twin))
    training.say(sorted(_foreign(twin)))


def save_weights(training: Training) -> None:
    """The names of the state are the model's own."""
    training.say(sorted(training.modules[0].state_dict()))


def _part(training: Training) -> nn.Module:
    kinds = ("MLP", "Block")
    return next(m for m in training.modules if type(m).__name__ in kinds)


def _output(module: nn.Module) -> float:
    width = module.linear_fc1.weight.shape[1]
    with torch.no_grad():
        output = module(torch.ones(2, 1, width))
    return float((output[0] if isinstance(output, tuple) else output).sum())


def _foreign(model: nn.Module) -> list[str]:
    """What a module has of its own beside what its class gave it."""
    return [
        f"{type(m).__name__}: {len(m._forward_hooks)} {len(m._forward_pre_hooks)}"
        for m in model.modules()
        if m._forward_hooks or m._forward_pre_hooks
    ]


def clear_hooks(training: Training) -> None:
    """The user takes all hooks off all modules."""
    for module in training.modules:
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


def evaluate(training: MegatronTraining) -> None:
    """A validation pass in the middle of a step."""
    with torch.no_grad():
        training.say(float(training.forward_backward(forward_only=True)[0]["lm loss"][0]))


def fewer_microbatches(training: Training) -> None:
    """From here on one micro-batch per step."""
    training.num_microbatches = 1


def skip_optimizer(training: Training) -> None:
    """No update from here on, up to ``step_again``."""
    training.is_stepping = False


def step_again(training: Training) -> None:
    """Updates again."""
    training.is_stepping = True


def forward_outside(training: Training) -> None:
    """A forward pass that belongs to no step."""
    training.say(_output(_part(training)))


def move(training: Training) -> None:
    """Parameters become other tensors."""
    training.modules[0].to(torch.float64).to(torch.float32)


def rebuild(training: MegatronTraining) -> None:
    """The loop begins again in the same process: new model, new optimizer; the old must go."""
    old = [weakref.ref(module) for module in training.modules]
    training.chunks, training.optimizer, training._scheduler = (), None, None
    training.build()
    training.memory["old"] = old


def train_longer(training: Training) -> None:
    """Long enough for a second loop to close a window."""
    training.num_iterations = 18


def say_alive(training: Training) -> None:
    """How many modules of the old model are still there."""
    import gc

    gc.collect()
    training.say(sum(reference() is not None for reference in training.memory["old"]))


def forgive(kind: type[BaseException]) -> Any:
    """The loop catches this error and goes on with the next step."""

    def do(training: Training) -> None:
        training.forgives = (*training.forgives, kind)

    do.__name__ = f"forgive-{kind.__name__}"
    return do


def talk(training: Training) -> None:
    """A thread that calls collectives while hooks come and go, on a group of its own."""
    group = dist.new_group()
    sums: list[float] = []

    def run() -> None:
        for _ in range(NUM_CALLS):
            value = torch.ones(3)
            dist.all_reduce(value, group=group)
            work = dist.all_reduce(value, group=group, async_op=True)
            work.wait()
            sums.append(float(value.sum()))

    training.memory["sums"] = sums
    training.memory["thread"] = threading.Thread(target=run, daemon=True)
    training.memory["thread"].start()


def hush(training: Training) -> None:
    """All its results are right."""
    training.memory["thread"].join()
    training.say((len(training.memory["sums"]), set(training.memory["sums"])))


def wrap_collective(training: Training) -> None:
    """The user puts a wrapper of their own around a method that we have wrapped."""
    inner, training.memory["calls"] = ProcessGroup.allreduce, 0

    def counting(group: Any, *args: Any, **kwargs: Any) -> Any:
        training.memory["calls"] += 1
        return inner(group, *args, **kwargs)

    ProcessGroup.allreduce = counting


def say_calls(training: Training) -> None:
    """It is still there, and counts."""
    dist.all_reduce(torch.ones(1))
    training.say(training.memory["calls"])


def warnings_are_errors(training: Training) -> None:
    """The user's filter, from the first hooked step on."""
    warnings.simplefilter("error")


def odd_outputs(training: OwnTraining) -> None:
    """Modules that give back a dict, a nested tuple, a text and nothing."""

    class Odd(nn.Module):
        def __init__(self, form: str) -> None:
            super().__init__()
            self.form = form

        def forward(self, x: Any = None, *, y: Any = None) -> Any:
            value = first_of(x if x is not None else y)
            forms = {"dict": {"a": value}, "tuple": ((value,), None), "list": [value]}
            if self.form in ("none", "text"):
                training.memory["seen"] = None if self.form == "none" else "text"
                return None if self.form == "none" else "text"
            return forms.get(self.form, value)

    class Chain(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.linear_fc1, self.linear_fc2 = Odd("dict"), Odd("tuple")
            self.linear_qkv, self.linear_proj = Odd("none"), Odd("text")
            self.core_attention, self.output_layer = Odd("list"), Odd("plain")

        def forward(self, x: torch.Tensor) -> Any:
            x = self.linear_fc2(y=self.linear_fc1(self.inner(x)))
            self.linear_qkv(None), self.linear_proj(y=3), self.linear_qkv(x)
            return self.output_layer(self.core_attention(x))

    training.model = Chain(training.model)


def first_of(value: Any) -> Any:
    """The tensor in a nest, as the modules above hand it on."""
    while isinstance(value, (dict, list, tuple)):
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value


def bare_optimizer(training: OwnTraining) -> None:
    """An optimizer that is none of torch's: it has ``step`` and ``zero_grad`` and nothing else."""

    class Descent:
        def step(self) -> None:
            with torch.no_grad():
                for weight in training.model.parameters():
                    weight.sub_(weight.grad, alpha=0.1)

        def zero_grad(self) -> None:
            for weight in training.model.parameters():
                weight.grad = None

    training.optimizer = Descent()


def detached(training: OwnTraining) -> None:
    """A frozen part that passes gradients on, and one whose output has no gradient."""
    training.model[0].linear_fc1.requires_grad_(False)


def built(do: Any) -> Any:
    """After the model has been built."""
    return at(-1, "built", do)


def default_sigpipe(training: Training) -> None:
    """As scripts do that are to end quietly in a shell pipe."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
