"""Acts of a user's training script in a hooked step, with us and without."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from fault_injections import at, wait_for_writer
from fault_training import CustomTraining, MegatronTraining, Training
from torch import nn
from torch._C._distributed_c10d import ProcessGroup

NUM_CALLS = 400


def interrupt_without_us(training: MegatronTraining) -> None:
    """Raise without us the error that a hook meets with us, at the same place of the pass."""
    if training.is_bare:
        next(training._data)
        raise KeyboardInterrupt


def leave(training: Training) -> None:
    """Call ``sys.exit`` with a status of the user's."""
    sys.exit(3)


def vanish(training: Training) -> None:
    """End the process at once, after the writer has written all records."""
    wait_for_writer(training)
    os._exit(9)


def exit_forked(training: Training) -> None:
    """Fork a child of the training process that ends as a script does."""
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    training.log(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


class Squares(torch.utils.data.Dataset):
    """Items made in worker processes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index).square()


def load_data(training: Training) -> None:
    """Use a loader with worker processes."""
    loader = torch.utils.data.DataLoader(Squares(), num_workers=1, multiprocessing_context="fork")
    training.log([int(item) for item in loader])


def save_weights(training: Training) -> None:
    """Check that the state has the model's own names."""
    training.log(sorted(training.modules[0].state_dict()))


def _part(training: Training) -> nn.Module:
    kinds = ("MLP", "Block")
    return next(m for m in training.modules if type(m).__name__ in kinds)


def _output(module: nn.Module) -> float:
    width = module.linear_fc1.weight.shape[1]
    with torch.no_grad():
        output = module(torch.ones(2, 1, width))
    return float((output[0] if isinstance(output, tuple) else output).sum())


def clear_hooks(training: Training) -> None:
    """Remove all hooks from all modules."""
    for module in training.modules:
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


def evaluate(training: MegatronTraining) -> None:
    """Run a validation pass in the middle of a step."""
    with torch.no_grad():
        training.log(float(training.forward_backward(forward_only=True)[0]["lm loss"][0]))


def fewer_microbatches(training: Training) -> None:
    """Use one micro-batch per step from here on."""
    training.num_microbatches = 1


def skip_optimizer(training: Training) -> None:
    """Skip updates up to ``resume_updates``."""
    training.is_stepping = False


def resume_updates(training: Training) -> None:
    """Update weights again."""
    training.is_stepping = True


def forward_outside(training: Training) -> None:
    """Run a forward pass that belongs to no step."""
    training.log(_output(_part(training)))


def move(training: Training) -> None:
    """Replace the parameters by other tensors."""
    training.modules[0].to(torch.float64).to(torch.float32)


def rebuild(training: MegatronTraining) -> None:
    """Restart the loop in the same process: new model, new optimizer; the old ones must go."""
    old = [weakref.ref(module) for module in training.modules]
    training.chunks, training.optimizer, training._scheduler = (), None, None
    training.build()
    training.memory["old"] = old


def train_longer(training: Training) -> None:
    """Train long enough for a second loop to close a window."""
    training.num_iterations = 18


def log_alive(training: Training) -> None:
    """Log how many modules of the old model are still alive."""
    import gc

    gc.collect()
    training.log(sum(reference() is not None for reference in training.memory["old"]))


def forgive(kind: type[BaseException]) -> Any:
    """Return an act by which the loop catches this error and goes on with the next step."""

    def do(training: Training) -> None:
        training.forgives = (*training.forgives, kind)

    do.__name__ = f"forgive-{kind.__name__}"
    return do


def start_collective_thread(training: Training) -> None:
    """Start a thread that calls collectives on its own group while hooks come and go."""
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


def join_collective_thread(training: Training) -> None:
    """Check all results of that thread."""
    training.memory["thread"].join()
    training.log((len(training.memory["sums"]), set(training.memory["sums"])))


def wrap_collective(training: Training) -> None:
    """Put the user's wrapper around a method that we have wrapped."""
    inner, training.memory["calls"] = ProcessGroup.allreduce, 0

    def counting(group: Any, *args: Any, **kwargs: Any) -> Any:
        training.memory["calls"] += 1
        return inner(group, *args, **kwargs)

    ProcessGroup.allreduce = counting


def log_calls(training: Training) -> None:
    """Check that the user's wrapper is still there and counts."""
    dist.all_reduce(torch.ones(1))
    training.log(training.memory["calls"])


def warnings_are_errors(training: Training) -> None:
    """Turn warnings into errors from the first hooked step on."""
    warnings.simplefilter("error")


def odd_outputs(training: CustomTraining) -> None:
    """Use modules that return a dict, a nested tuple, a text and nothing."""

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
    """Return the tensor in nested outputs of the modules above."""
    while isinstance(value, (dict, list, tuple)):
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value


def bare_optimizer(training: CustomTraining) -> None:
    """Use an optimizer that is none of torch's, with only ``step`` and ``zero_grad``."""

    class Descent:
        def step(self) -> None:
            with torch.no_grad():
                for weight in training.model.parameters():
                    weight.sub_(weight.grad, alpha=0.1)

        def zero_grad(self) -> None:
            for weight in training.model.parameters():
                weight.grad = None

    training.optimizer = Descent()


def detached(training: CustomTraining) -> None:
    """Freeze a part that passes gradients on, and one whose output has no gradient."""
    training.model[0].linear_fc1.requires_grad_(False)


def built(do: Any) -> Any:
    """Return the moment after the model has been built."""
    return at(-1, "built", do)


def default_sigpipe(training: Training) -> None:
    """Reset SIGPIPE, as scripts do to end quietly in a shell pipe."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
