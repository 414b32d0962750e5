"""A small plain loop that passes its model to other code: ``hands_loop.py MODULE:CASE OUT``.

A case is a function of a ``hands_*`` module; it trains, and does on the way what users do with what
is theirs.  ``OUT/ended-RANK.json`` says what came of it: losses to the last bit, what the case has
noted, random states, and what was compiled.  The user's files lie in ``OUT/files``.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WIDTH, WORDS, LENGTH, DEPTH = 16, 48, 9, 3
STEPS, WINDOW = 13, 8
HOOKED = (4, 7, 8, 11)
"""Hooked steps of such a window: after an inspected first step and three of warm-up, blocks of
hooked, bare, bare, hooked."""
MADE = 7
"""A hooked step, in which most cases make their copies."""


class Layer(nn.Module):
    """A layer with Megatron's names, so that its operators are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.linear_fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.linear_fc2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear_fc2(F.gelu(self.linear_fc1(self.input_layernorm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.final_layernorm = nn.LayerNorm(WIDTH)
        self.output_layer = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.word_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output_layer(self.final_layernorm(x))


def loss_of(model: Callable[..., Any], tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of predicting each next token."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Training:
    """The model, its optimizer, and notes of all that a user can observe."""

    def __init__(self, files: Path) -> None:
        self.files = files
        files.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.net: Any = Net()
        self.model: Any = self.net
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.model = nn.parallel.DistributedDataParallel(self.net)
        self.loss_of: Callable[[torch.Tensor], torch.Tensor] = lambda t: loss_of(self.model, t)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[str] = []
        self.notes: list[tuple[str, Any]] = []
        self._batches = torch.Generator().manual_seed(self.rank)

    def batch(self) -> torch.Tensor:
        """Return tokens, without drawing from torch's default generator."""
        return torch.randint(0, WORDS, (4, LENGTH), generator=self._batches)

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the steps, each to be trained by the caller."""
        yield from range(STEPS)

    def backward(self, tokens: torch.Tensor | None = None) -> None:
        """Run the first half of a step."""
        loss = self.loss_of(self.batch() if tokens is None else tokens)
        loss.backward()
        self.lost(loss)

    def update(self) -> None:
        """Run the other half; the next step begins at its end."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, tokens: torch.Tensor | None = None) -> None:
        """Run both halves of a step."""
        self.backward(tokens)
        self.update()

    def lost(self, loss: torch.Tensor) -> None:
        """Record the exact bits of a loss."""
        self.losses.append(float(loss.detach()).hex())

    def note(self, name: str, value: Any) -> None:
        """Record an observation of the user's, which must be the same without us."""
        self.notes.append((name, noted(value)))

    def path(self, name: str) -> Path:
        """Return the path of a file that the user writes, one per rank."""
        return self.files / f"{self.rank}-{name}"


def noted(value: Any) -> Any:
    """Return tensors and bytes as digests, all else as JSON values."""
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous().numpy().tobytes()
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()[:16]
    if isinstance(value, dict):
        return {str(key): noted(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [noted(item) for item in value]
    return value if isinstance(value, (int, str, type(None))) else repr(value)


def random_states() -> dict[str, str]:
    """Return digests of the states of all generators that a loop shares with us."""
    states = {
        "torch": torch.get_rng_state(),
        "python": repr(random.getstate()).encode(),
        "numpy": repr(np.random.get_state()).encode(),
    }
    return {name: noted(state) for name, state in states.items()}


def compiled() -> dict[str, int]:
    """Return dynamo's counts so far; frames of full-graph functions are in only two of them."""
    from torch._dynamo import convert_frame
    from torch._dynamo.utils import counters

    counts = convert_frame.FRAME_COMPILE_COUNTER.values()
    return {
        "compilations": sum(counts),
        "recompiles": sum(count - 1 for count in counts),
        "frames": counters["frames"]["total"],
        "frames ok": counters["frames"]["ok"],
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": counters["graph_break"].total(),
        "backwards": counters["compiled_autograd"]["captures"],
    }


@dataclass(frozen=True, slots=True)
class Case:
    """A way to use the user's objects, and the records expected of it."""

    train: Callable[[Training], None]
    num_ranks: int
    num_hooked: int
    has_operators: bool
    is_slow: bool
    is_grouped: bool
    """True if a process group is initialised, also for a single rank."""

    @property
    def name(self) -> str:
        """Name of the case as in the command."""
        return f"{self.train.__module__}:{self.train.__name__}"


CASES: dict[str, Case] = {}


def case(
    *,
    ranks: int = 1,
    hooked: int = len(HOOKED),
    has_operators: bool = True,
    is_slow: bool = False,
    is_grouped: bool = False,
) -> Callable[[Callable[[Training], None]], Callable[[Training], None]]:
    """Register a case; ``hooked`` is the number of hooked steps that records must have."""

    def register(train: Callable[[Training], None]) -> Callable[[Training], None]:
        made = Case(train, ranks, hooked, has_operators, is_slow, is_grouped or ranks > 1)
        CASES[made.name] = made
        return train

    return register


def main() -> None:
    """Train one case and write its results."""
    name, out = sys.argv[1], Path(sys.argv[2])
    importlib.import_module(name.partition(":")[0])
    case = CASES[name]
    if case.is_grouped:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    training = Training(out / "files")
    case.train(training)
    ended = {
        "losses": training.losses,
        "notes": training.notes,
        "random": random_states(),
        "compiled": compiled(),
    }
    (out / f"ended-{training.rank}.json").write_text(json.dumps(ended), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    import hands_loop  # its classes are importable by that name alone

    hands_loop.main()
