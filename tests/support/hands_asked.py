"""Objects of the loop whose queries have side effects: lengths, batches, attributes, modes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from hands_copies import module_attributes
from hands_loop import LENGTH, STEPS, WORDS, Training, case
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

ROWS, BATCH = 20, 4


class Rows(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self._rows = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator())
        self.num_len_calls = 0

    def __len__(self) -> int:
        self.num_len_calls += 1
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]


class Buckets:
    """Batches in random order; ``len`` draws an order too, and counts its batches."""

    def __init__(self) -> None:
        self.num_len_calls = 0

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(ROWS).tolist()
        return iter([order[i : i + BATCH] for i in range(0, ROWS, BATCH)])

    def __len__(self) -> int:
        self.num_len_calls += 1  # as slow as a pass over a file may be
        return len(list(iter(self)))


class Agreed:
    """Batches whose ``len`` is a collective over all ranks."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(i, i + BATCH)) for i in range(0, ROWS, BATCH)])

    def __len__(self) -> int:
        number = torch.tensor(ROWS // BATCH)
        dist.all_reduce(number, op=dist.ReduceOp.MIN)
        return int(number)


class Lazy(Mapping[str, torch.Tensor]):
    """A batch that makes its field anew at each access, with torch's own generator."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self._rows = torch.stack(rows)

    def __iter__(self) -> Iterator[str]:
        return iter(("tokens",))

    def __len__(self) -> int:
        return 1

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._rows[:, torch.randperm(LENGTH)]


def passes(training: Training, loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield a batch for each step, over as many passes as that takes."""
    num_remaining = STEPS
    while num_remaining:
        for batch in loader:
            yield batch
            num_remaining -= 1
            if not num_remaining:
                return


@case()
def drawn_length(training: Training) -> None:
    """The length of a sampler draws random numbers, and takes as long as a pass."""
    buckets, rows = Buckets(), Rows()
    for tokens in passes(training, DataLoader(rows, batch_sampler=buckets)):  # type: ignore[arg-type]
        training.step(tokens)
    training.note("asked", [buckets.num_len_calls, rows.num_len_calls])


@case(ranks=2)
def agreed_length(training: Training) -> None:
    """Only rank 0 looks at a sample; the others do not join its sampler's collective."""
    if training.rank == 0:
        for tokens in DataLoader(Rows(), batch_sampler=Agreed()):  # type: ignore[arg-type]
            training.note("sample", tokens)
            break
    for _ in training.steps():
        training.step()


@case()
def lazy_batch(training: Training) -> None:
    for batch in passes(training, DataLoader(Rows(), batch_size=BATCH, collate_fn=Lazy)):
        training.step(batch["tokens"])


@case()
def lazy_input(training: Training) -> None:
    """The model itself takes a ``Lazy`` batch."""

    class Reads(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, batch: Lazy) -> torch.Tensor:
            return self.inner(batch["tokens"])

    model = Reads(training.net)
    training.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in passes(training, DataLoader(Rows(), batch_size=BATCH, collate_fn=Lazy)):
        loss = model(batch).square().mean()
        loss.backward()
        training.update()
        training.lost(loss)


class Making(nn.Module):
    """A module that creates missing attributes as layers, initialised by torch's generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale(x)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            made = nn.Linear(x := 4, x)
            self.add_module(name, made)
            return made


@case()
def making_module(training: Training) -> None:
    making = Making()
    making.scale = nn.Linear(16, 16)
    training.net.layers.append(making)
    training.optimizer = torch.optim.AdamW(training.net.parameters(), lr=1e-3)
    for _ in training.steps():
        training.step()
        training.note("made", sorted(training.net.state_dict()))
        training.note("children", [name for name, _ in making.named_children()])


@case()
def counting_modes(training: Training) -> None:
    """Modes count calls that pass through them: only the user's own."""

    class Functions(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    class Operations(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    for _ in training.steps():
        functions, operations = Functions(), Operations()
        with FlopCounterMode(display=False) as flops, operations, functions:
            training.step()
        training.note("count", [flops.get_total_flops(), functions.count, operations.count])


@case()
def drawing_function_mode(training: Training) -> None:
    """A mode draws a random number at each call of a torch function."""

    class Drawing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunction():
                torch.rand(())
            return func(*args, **(kwargs or {}))

    for _ in training.steps():
        with Drawing():
            training.step()
        training.note("state", torch.get_rng_state())


@case()
def drawing_dispatch_mode(training: Training) -> None:
    """A mode draws a random number at each operation."""

    class Drawing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            torch.rand(())
            return func(*args, **(kwargs or {}))

    for _ in training.steps():
        with Drawing():
            training.step()
        training.note("state", torch.get_rng_state())


@case()
def mode_around_all(training: Training) -> None:
    """A drawing mode is active over the whole loop, also between steps."""

    class Drawing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunction():
                torch.rand(())
            return func(*args, **(kwargs or {}))

    with Drawing():
        for _ in training.steps():
            training.step()


class Half(nn.Module):
    """A module whose submodules were never created."""

    def __init__(self) -> None:
        pass


class Raising(nn.Module):
    """A module that raises its own kind of error for missing attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise KeyError(name) from None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@case()
def half_made_module(training: Training) -> None:
    half = Half()
    for _ in training.steps():
        training.step()
    training.note("half", sorted(vars(half)))


@case()
def raising_module(training: Training) -> None:
    training.net.layers.append(Raising())
    training.net.odd = Raising()
    training.optimizer = torch.optim.AdamW(training.net.parameters(), lr=1e-3)
    for _ in training.steps():
        training.step()
    training.note("looks", module_attributes(training.net))
