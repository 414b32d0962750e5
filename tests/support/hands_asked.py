"""Objects of the loop whose queries have side effects: lengths, batches, attributes, modes,
optimizers, tensors, nodes of the graph."""

from __future__ import annotations

import random
import sys
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from hands_copies import module_attributes
from hands_loop import LENGTH, STEPS, WIDTH, WORDS, Training, case
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, RandomSampler
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


@case()
def drawn_groups(training: Training) -> None:
    """The groups of an optimizer are a property that draws, as a sampler of coordinates may."""

    class Drawn(torch.optim.AdamW):
        num_queries = 0

        @property
        def param_groups(self) -> Any:
            Drawn.num_queries += 1
            torch.rand(1)
            return self.__dict__["drawn"]

        @param_groups.setter
        def param_groups(self, groups: Any) -> None:
            self.__dict__["drawn"] = groups

    training.optimizer = Drawn(training.model.parameters(), lr=1e-3)
    for _ in training.steps():
        Drawn.num_queries = 0
        training.step()
        training.note("asked", Drawn.num_queries)
        training.note("drawn", torch.rand(1))


class Paged(dict[Any, Any]):
    """A mapping that loads what it is asked for, as an optimizer's state in pages does."""

    queries: ClassVar[list[str]] = []

    def get(self, key: Any, default: Any = None) -> Any:
        return self._load("get", dict.get(self, key, default))

    def values(self) -> Any:
        return self._load("values", dict.values(self))

    def keys(self) -> Any:
        return self._load("keys", dict.keys(self))

    def __getitem__(self, key: Any) -> Any:
        return self._load("item", dict.__getitem__(self, key))

    def __missing__(self, key: Any) -> Any:
        return self.setdefault(key, Paged())

    def _load(self, how: str, value: Any) -> Any:
        Paged.queries.append(how)
        torch.rand(1)
        return value


@case(is_slow=True)
def paged_state(training: Training) -> None:
    """The state of an optimizer, and of each weight, is such a mapping; the model has a
    transformers configuration of a class that draws, too."""
    from transformers import PretrainedConfig

    class Custom(PretrainedConfig):
        model_type = "llama"

        def to_dict(self) -> dict[str, Any]:
            torch.rand(1)
            return super().to_dict()

        def __getattribute__(self, name: str) -> Any:
            Paged.queries.append(name)
            return super().__getattribute__(name)

    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4}
    training.net.config = Custom(vocab_size=WORDS, num_hidden_layers=3, **sizes)
    training.optimizer.state = Paged()
    for _ in training.steps():
        Paged.queries.clear()
        training.step()
        training.note("asked", list(Paged.queries))
        training.note("drawn", torch.rand(1))


class Queried(torch.Tensor):
    """A tensor that counts and draws whenever it is asked for its size."""

    num_queries = 0

    def numel(self) -> int:
        return self._count(super().numel())

    def element_size(self) -> int:
        return self._count(super().element_size())

    @property
    def shape(self) -> Any:
        return self._count(super().shape)

    @property
    def dtype(self) -> Any:
        return self._count(super().dtype)

    @staticmethod
    def _count(value: Any) -> Any:
        Queried.num_queries += 1
        torch.rand(1)
        return value


class QueriedWeight(Queried, nn.Parameter):
    """A weight of this kind."""


@case(is_grouped=True)
def queried_tensors(training: Training) -> None:
    """Such a tensor is a weight, the input of a layer and the payload of collectives."""
    training.net.final_layernorm.weight = QueriedWeight(torch.ones(WIDTH))
    training.optimizer = torch.optim.AdamW(training.net.parameters(), lr=1e-3)
    for _ in training.steps():
        Queried.num_queries = 0
        training.step()
        tensor = torch.ones(2, WIDTH).as_subclass(Queried)
        dist.all_reduce(tensor)
        dist.all_gather([torch.ones(2, WIDTH)], tensor)
        training.net.layers[0](tensor)
        training.note("asked", Queried.num_queries)
        training.note("drawn", torch.rand(1))


class Sized(torch.Tensor):
    """A wrapper that answers for its sizes itself, at each operation on it, and draws."""

    calls: ClassVar[list[str]] = []
    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, dispatch_sizes_strides_policy="sizes"
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(str(func))
        torch.rand(1)
        bare = tree_map(lambda t: t.inner if type(t) is Sized else t, (args, kwargs or {}))
        result = func(*bare[0], **bare[1])
        return tree_map(lambda t: Sized(t) if type(t) is torch.Tensor else t, result)


@case(is_grouped=True)
def sized_tensors(training: Training) -> None:
    """A layer gets such a tensor, and a collective does."""
    for _ in training.steps():
        Sized.calls.clear()
        tensor = Sized(torch.ones(2, WIDTH))
        training.net.layers[0](tensor)
        dist.all_reduce(tensor)
        training.note("calls", list(Sized.calls))
        training.step()
        training.note("drawn", torch.rand(1))


def nodes_behind(node: Any) -> list[Any]:
    """Return the nodes of a graph, each once."""
    nodes: dict[Any, None] = {}
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            waiting += [behind for behind, _ in node.next_functions]
    return list(nodes)


@case()
def walked_graph(training: Training) -> None:
    """The program reads each node's metadata, writes into it, and hooks all nodes."""
    for number in training.steps():
        loss = training.loss_of(training.batch())
        nodes = nodes_behind(loss.grad_fn)
        training.note("metadata", [dict(node.metadata) for node in nodes])
        for index, node in enumerate(nodes):
            node.metadata["mine"] = index
        reached: list[int] = []
        hooks = [
            node.register_prehook(lambda _, k=k, seen=reached: seen.append(k))
            for k, node in enumerate(nodes)
        ]
        training.note("numbers", [hook.id - hooks[0].id for hook in hooks])
        loss.backward(retain_graph=number % 2 == 0)
        training.note("reached", reached)
        if number % 2 == 0:
            for hook in hooks[::2]:
                hook.remove()
            loss.backward()
            training.note("reached again", reached[len(nodes) :])
        training.note("metadata after", [dict(node.metadata) for node in nodes])
        training.lost(loss)
        training.update()


class Large:
    """An object whose end is observed."""


@case()
def similar_label(training: Training) -> None:
    """A label of the user's begins like the optimizer's, where a large object is freed."""

    def freed(name: str) -> bool:
        large = Large()
        alive = weakref.ref(large)
        self = large  # by the name of a method's first argument
        with torch.profiler.record_function(name):
            pass
        del large, self
        return alive() is None

    for _ in training.steps():
        training.step()
        training.note("freed", [freed("Optimizer.step#mine"), freed("mine")])


@case()
def caller_by_depth(training: Training) -> None:
    """A layer looks for a variable of its caller's by the depth of the stack, and warns there."""

    class Named(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            caller = sys._getframe(3)
            training.note("caller", [caller.f_code.co_name, caller.f_locals.get("tag")])
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                warnings.warn("deprecated", stacklevel=4)
            training.note("warned", caught[0].lineno)
            return super().forward(x)

    def call(x: torch.Tensor, tag: str) -> torch.Tensor:
        return named(x)

    named = training.net.layers[1].linear_fc1 = Named(WIDTH, 2 * WIDTH)
    training.optimizer = torch.optim.AdamW(training.net.parameters(), lr=1e-3)
    for number in training.steps():
        training.step()
        call(torch.ones(1, WIDTH), f"tag {number}")


def counting(base: type) -> type:
    """Return a class derived from ``base`` that counts each access to an attribute, and draws."""

    class Counting(base):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            Counted.numbers[base.__name__] += 1
            random.random()
            torch.rand(1)
            return super().__getattribute__(name)

    return Counting


class Counted:
    """Accesses to attributes so far, by class."""

    numbers: ClassVar[Counter[str]] = Counter()


@case(is_grouped=True)
def counted_attributes(training: Training) -> None:
    """Whatever the loop owns counts its attributes: the model and its parts, its configuration,
    the optimizer and its state, tensors, the data set, its batches, the sampler."""
    net = training.net
    net.config = counting(SimpleNamespace)(model_type="own", sequence_parallel=True)
    for module in list(net.modules()):
        module.__class__ = counting(type(module))
    training.optimizer = counting(torch.optim.AdamW)(training.model.parameters(), lr=1e-3)
    training.optimizer.state = counting(defaultdict)(dict)
    sampler = counting(RandomSampler)(rows := counting(Rows)(), generator=torch.Generator())
    loader = counting(DataLoader)(rows, batch_size=BATCH, sampler=sampler)
    tensors = counting(torch.Tensor)
    for tokens in passes(training, loader):
        Counted.numbers.clear()
        training.step(tokens.as_subclass(tensors))
        custom = torch.ones(2, WIDTH).as_subclass(tensors)
        dist.all_reduce(custom)
        net.layers[1](custom)
        training.note("accesses", dict(sorted(Counted.numbers.items())))
        training.note("drawn", [torch.rand(1), random.random()])
