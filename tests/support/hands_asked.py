"""Objects of the loop that answer with a side effect: lengths, batches, attributes, modes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from hands_copies import looks
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
        self.num_asked = 0

    def __len__(self) -> int:
        self.num_asked += 1
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]


class Buckets:
    """Batches in an order that is drawn for each pass; their number is that of such a pass."""

    def __init__(self) -> None:
        self.num_asked = 0

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(ROWS).tolist()
        return iter([order[i : i + BATCH] for i in range(0, ROWS, BATCH)])

    def __len__(self) -> int:
        self.num_asked += 1  # as slow as a pass over a file may be
        return len(list(iter(self)))


class Agreed:
    """Batches whose number all ranks agree on when it is asked for."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(i, i + BATCH)) for i in range(0, ROWS, BATCH)])

    def __len__(self) -> int:
        number = torch.tensor(ROWS // BATCH)
        dist.all_reduce(number, op=dist.ReduceOp.MIN)
        return int(number)


class Lazy(Mapping[str, torch.Tensor]):
    """A batch that makes its field, with torch's own generator, each time it is asked for."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self._rows = torch.stack(rows)

    def __iter__(self) -> Iterator[str]:
        return iter(("tokens",))

    def __len__(self) -> int:
        return 1

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._rows[:, torch.randperm(LENGTH)]


def passes(training: Training, loader: DataLoader[Any]) -> Iterator[Any]:
    """Batches of as many passes as training takes."""
    left = STEPS
    while left:
        for batch in loader:
            yield batch
            left -= 1
            if not left:
                return


@case()
def drawn_length(training: Training) -> None:
    """Asking a sampler for its length draws numbers, and takes as long as a pass."""
    buckets, rows = Buckets(), Rows()
    for tokens in passes(training, DataLoader(rows, batch_sampler=buckets)):  # type: ignore[arg-type]
        training.step(tokens)
    training.note("asked", [buckets.num_asked, rows.num_asked])


@case(ranks=2)
def agreed_length(training: Training) -> None:
    """Rank 0 alone looks at a sample; the others have no part in what its sampler asks of all."""
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
    """The model itself takes such a batch."""

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
    """A module that makes what it is asked for, with weights out of torch's generator."""

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
    """Modes count what passes through them: the number is that of the user's own calls."""

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
    """A mode draws a number at each call of a function of torch."""

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
    """A mode draws a number at each operation."""

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
    """A drawing mode is in force over the whole loop, what lies between the steps included."""

    class Drawing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunction():
                torch.rand(())
            return func(*args, **(kwargs or {}))

    with Drawing():
        for _ in training.steps():
            training.step()


class Half(nn.Module):
    """A module whose parts were never made."""

    def __init__(self) -> None:
        pass


class Raising(nn.Module):
    """A module that raises its own kind of error for what it has not."""

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
    training.note("looks", looks(training.net))
