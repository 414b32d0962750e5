"""Randomly drawn loops, in which the user acts on the model within or after given steps.

``trained`` runs the loop without us, ``watched`` with a session of a plain loop.
"""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hands_copies import described, module_attributes, unpickled
from hands_loop import (
    DEPTH,
    HOOKED,
    STEPS,
    WIDTH,
    WINDOW,
    Case,
    Training,
    compiled,
    noted,
    random_states,
)
from hands_runs import Outcome, differences, missing_records
from hands_wraps import Adapted
from hypothesis import strategies as st
from torch import nn


class Act(NamedTuple):
    """One act of the user, on layer ``layer`` if it concerns one."""

    step: int
    is_after: bool
    name: str
    layer: int


class Wrapper(nn.Module):
    """Wrapper of a library around a model, as DDP is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Drawn:
    """A training, and the objects that its user has made on the way."""

    def __init__(self, training: Training) -> None:
        self.training, self.net = training, training.net
        self.copies: list[nn.Module] = []
        self.written: list[Any] = []
        self.handles: list[Any] = []
        self.heard: list[str] = []
        self.average: Any = None
        self.num_extra = 0
        self._open = ExitStack()
        self._threads: ThreadPoolExecutor | None = None
        self._processes: ProcessPoolExecutor | None = None
        self._saved: list[tuple[Path, Future[Any]]] = []

    def train(self, acts: Sequence[Act]) -> None:
        """Train all steps with the acts in their places, then check all objects made."""
        with self._open:
            for number in self.training.steps():
                self._do(acts, number, is_after=False)
                for _ in range(1 + self.num_extra):
                    self.training.backward()
                self.num_extra = 0
                self.training.update()
                self._do(acts, number, is_after=True)
            self._check_copies()

    def _do(self, acts: Sequence[Act], number: int, *, is_after: bool) -> None:
        for act in acts:
            if (act.step, act.is_after) == (number, is_after):
                self.attempt(act.name, lambda act=act: ACTS[act.name](self, act.layer))
        self.training.note(f"heard {number}", len(self.heard))
        self.training.note(f"looks {number}", module_attributes(self.training.net))

    def attempt(self, name: str, act: Callable[[], Any]) -> None:
        """Note the result or the error of an act; a pickle of the user's own hooks fails."""
        try:
            self.training.note(name, act())
        except Exception as err:
            self.training.note(name, f"{type(err).__name__}: {str(err).splitlines()[:1]}")

    def probe(self, model: Any) -> torch.Tensor:
        """Return a model's output for fixed tokens."""
        with torch.no_grad():
            return model(torch.arange(8).reshape(2, 4))

    def save(self, value: Any, *, is_thread: bool) -> None:
        """Have a pool write a file, which exists at the latest at the end."""
        path = self.training.path(f"saved-{len(self._saved)}.pt")
        self._saved.append((path, self._pool(is_thread).submit(torch.save, value, path)))
        if is_thread:
            self._saved[-1][1].result()

    def _pool(self, is_thread: bool) -> Any:
        if is_thread:
            self._threads = self._threads or self._open.enter_context(ThreadPoolExecutor(1))
            return self._threads
        if self._processes is None:
            context = multiprocessing.get_context("fork")
            self._processes = self._open.enter_context(ProcessPoolExecutor(1, context))
        return self._processes

    def _check_copies(self) -> None:
        for model in (*self.copies, *([] if self.average is None else [self.average])):
            self.attempt("copy's output", lambda model=model: self.probe(model))
            self.attempt("copy's looks", lambda model=model: module_attributes(model))
            self.attempt("copy's pickle", lambda model=model: unpickled(pickle.dumps(model)))
        for path, future in self._saved:
            self.training.note("saver", repr(future.exception()))
            self.attempt("saved", lambda path=path: described(torch.load(path, weights_only=False)))


def _copy(drawn: Drawn, layer: int) -> torch.Tensor:
    copied = copy.copy(drawn.net.layers[layer])
    copied._modules = {name: copy.deepcopy(m) for name, m in copied._modules.items()}
    copied.linear_fc2.load_state_dict(
        {name: torch.zeros_like(p) for name, p in copied.linear_fc2.state_dict().items()}
    )
    return copied(torch.ones(1, WIDTH))


def _deepcopy(drawn: Drawn, layer: int) -> torch.Tensor:
    drawn.copies[2:] = [copy.deepcopy(drawn.net)]
    return drawn.probe(drawn.copies[-1])


def _pickle(drawn: Drawn, layer: int) -> list[Any]:
    return unpickled(pickle.dumps(drawn.net))


def _cloudpickle(drawn: Drawn, layer: int) -> list[Any]:
    import cloudpickle

    return unpickled(cloudpickle.dumps(drawn.training.model))


def _save_here(drawn: Drawn, layer: int) -> list[Any]:
    file = io.BytesIO()
    torch.save({"model": drawn.net, "save": torch.save}, file)
    file.seek(0)
    return described(torch.load(file, weights_only=False)["model"])


def _compile_layer(drawn: Drawn, layer: int) -> None:
    drawn.net.layers[layer].compile(backend="eager")


def _compile_model(drawn: Drawn, layer: int) -> None:
    drawn.training.model = torch.compile(drawn.net, backend="eager")


def _compile_function(drawn: Drawn, layer: int) -> None:
    drawn.training.loss_of = torch.compile(drawn.training.loss_of, backend="eager")


def _evaluate(drawn: Drawn, layer: int) -> torch.Tensor:
    drawn.net.eval()
    output = drawn.probe(drawn.training.model)
    drawn.net.train()
    return output


def _wrap(drawn: Drawn, layer: int) -> None:
    drawn.training.model = Wrapper(drawn.training.model)


def _replace(drawn: Drawn, layer: int) -> None:
    replaced = drawn.net.layers[layer]
    if isinstance(replaced.linear_fc1, nn.Linear):
        replaced.linear_fc1 = Adapted(replaced.linear_fc1)
    else:
        replaced.linear_fc1 = replaced.linear_fc1.base_layer


def _average(drawn: Drawn, layer: int) -> torch.Tensor:
    if drawn.average is None:
        drawn.average = torch.optim.swa_utils.AveragedModel(drawn.net)
    else:
        drawn.average.update_parameters(drawn.net)
    return drawn.probe(drawn.average)


def _hooks_on(drawn: Drawn, layer: int) -> None:
    def hear(module: nn.Module, *_: Any) -> None:
        drawn.heard.append(type(module).__name__)

    for module in (drawn.net, drawn.net.layers[layer].linear_fc2):
        drawn.handles += [
            module.register_forward_pre_hook(hear),
            module.register_forward_hook(hear, always_call=True),
            module.register_forward_hook(hear, prepend=True),
            module.register_full_backward_hook(hear),
        ]


def _hooks_off(drawn: Drawn, layer: int) -> None:
    while drawn.handles:
        drawn.handles.pop().remove()


def _state(drawn: Drawn, layer: int) -> list[str]:
    state = copy.deepcopy(drawn.net.state_dict())
    optim = copy.deepcopy(drawn.training.optimizer.state_dict())
    drawn.net.load_state_dict(state)
    drawn.training.optimizer.load_state_dict(optim)
    return sorted(state)


def _functional(drawn: Drawn, layer: int) -> torch.Tensor:
    weights = {name: p * 0.5 for name, p in drawn.net.named_parameters()}
    tokens = torch.arange(8).reshape(2, 4)
    return torch.func.functional_call(drawn.net, weights, (tokens,))


def _clip(drawn: Drawn, layer: int) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(drawn.net.parameters(), 0.5)


def _accumulate(drawn: Drawn, layer: int) -> None:
    drawn.num_extra += 1


def _save_in_process(drawn: Drawn, layer: int) -> None:
    drawn.save({name: p.clone() for name, p in drawn.net.state_dict().items()}, is_thread=False)


def _save_in_thread(drawn: Drawn, layer: int) -> None:
    drawn.save(drawn.net, is_thread=True)


ACTS: dict[str, Callable[[Drawn, int], Any]] = {
    "copy": _copy,
    "deepcopy": _deepcopy,
    "pickle": _pickle,
    "cloudpickle": _cloudpickle,
    "save": _save_here,
    "save in a process": _save_in_process,
    "save in a thread": _save_in_thread,
    "compile a layer": _compile_layer,
    "compile the model": _compile_model,
    "compile a function": _compile_function,
    "evaluate": _evaluate,
    "wrap": _wrap,
    "replace a child": _replace,
    "average": _average,
    "hooks on": _hooks_on,
    "hooks off": _hooks_off,
    "state_dict": _state,
    "functional_call": _functional,
    "clip": _clip,
    "accumulate": _accumulate,
}
COMPILING = sorted(name for name in ACTS if name.startswith("compile"))


def trained(acts: Sequence[Act], files: Path) -> dict[str, Any]:
    """Train the loop and return its results as ``hands_loop.py`` writes them."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    training = Training(files)
    Drawn(training).train(acts)
    return {
        "losses": training.losses,
        "notes": noted(training.notes),
        "random": random_states(),
        "compiled": compiled(),
    }


def watched(acts: Sequence[Act], files: Path, directory: Path) -> dict[str, Any]:
    """Train the loop watched, as the flag watches a plain loop, and return its results."""
    from forerun.hooks.adapters.torch_loop import TorchLoop
    from forerun.hooks.session.attaching import new_session

    loop = TorchLoop(new_session(directory=directory, steps=WINDOW, is_analysed=False))
    loop.attach()
    try:
        return trained(acts, files)
    finally:
        loop.end()
        loop.leave()


FEWEST, MOST = 3, 8
PLAIN = Case(Training.step, 1, len(HOOKED), has_operators=True, is_slow=False, is_grouped=False)
"""Records that a drawn loop has."""
_OTHERS = sorted({*ACTS} - {*COMPILING})


def acts() -> st.SearchStrategy[list[Act]]:
    """Draw different acts, each at one step or two; half of the loops also compile."""
    compiling = st.lists(st.sampled_from(COMPILING), max_size=1)
    others = st.lists(st.sampled_from(_OTHERS), min_size=FEWEST, max_size=MOST, unique=True)
    return st.builds(lambda one, more: [*one, *more], compiling, others).flatmap(_placed)


def _placed(names: Sequence[str]) -> st.SearchStrategy[list[Act]]:
    place = st.tuples(st.integers(0, STEPS - 1), st.booleans(), st.integers(0, DEPTH - 1))
    places = st.lists(place, min_size=1, max_size=2, unique=True)
    return st.tuples(*(places for _ in names)).map(
        lambda drawn: [
            Act(step, is_after, name, layer)
            for name, at in zip(names, drawn, strict=True)
            for step, is_after, layer in (at[:1] if name in COMPILING else at)
        ]
    )


def differences_in_process(drawn: Sequence[Act], home: Path) -> list[str]:
    """Train with and without a session in this process; return differences and lost records."""
    bare, watched_outcome = (
        Outcome((), {"here": ended}, {})
        for ended in (
            trained(drawn, home / "without"),
            watched(drawn, home / "watched", home / "calibrated"),
        )
    )
    return [*differences(bare, watched_outcome), *unrecorded(drawn, home / "calibrated")]


def unrecorded(drawn: Sequence[Act], directory: Path) -> list[str]:
    """Return what the records lack; some may be missing if an act compiles in a hooked step."""
    is_compiled = any(act.name in COMPILING for act in drawn)
    missing = missing_records(directory, PLAIN, fewest=1 if is_compiled else None)
    return [text for text in missing if not (is_compiled and text.endswith("no operators"))]
