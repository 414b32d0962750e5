"""Lists of callbacks are what they are without us, and a user's own callback can be copied."""

from __future__ import annotations

import copy
import importlib.util
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from foreign_names import check_replaced_functions
from torch import nn
from unaskable import Unaskable

from forerun.calib.records.record_kinds import StepRecord
from forerun.calib.samples.store import read_run
from forerun.hooks.adapters import _callbacks as callbacks
from forerun.hooks.adapters import bridge, hugging_face, lightning, torchtitan
from forerun.hooks.adapters._patches import Patches
from forerun.hooks.sensors.captured import find_regions
from forerun.hooks.session.attaching import new_session
from forerun.hooks.session.session import Session

pytestmark = pytest.mark.filterwarnings("ignore")  # frameworks, on this release of torch
STEPS = 6
PACKAGES = {"hugging_face": "transformers", "lightning": "lightning"}
OPTIONS: dict[str, Any] = {"steps": 4, "is_analysed": False}


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """As the flag starts it; what stays for the process is put back."""
    made = new_session(directory=tmp_path / "out", **OPTIONS)
    put: list[Patches] = []

    def patches(session: Session) -> Patches:
        put.append(Patches(session))
        return put[-1]

    for module in (hugging_face, lightning, bridge, torchtitan):
        monkeypatch.setattr(module, "Patches", patches, raising=False)
    monkeypatch.setattr(callbacks, "running", lambda: made)
    yield made
    made.finish()
    for each in put:
        each.remove()


def copies(thing: Any) -> Iterator[Any]:
    """Yield copies of a callback or a list of them, made in each way that users do."""
    yield copy.deepcopy(thing)
    yield copy.copy(thing)
    yield pickle.loads(pickle.dumps(thing))
    yield pickle.loads(cloudpickle.dumps(thing))


def names(known: Any) -> list[str]:
    return [type(one).__qualname__ for one in known]


Look = Callable[[Any], object]


def hugging_face_trainer(directory: Path, look: Look, *user_callbacks: Any) -> Any:
    tiny_llama = pytest.importorskip("tiny_llama")
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Looks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            look(trainer.callback_handler.callbacks)

        def __reduce__(self) -> Any:
            return TrainerCallback, ()

    arguments = TrainingArguments(
        output_dir=str(directory / "saved"), max_steps=STEPS, save_strategy="no",
        per_device_train_batch_size=2, use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    data, model = tiny_llama.tiny_data(), tiny_llama.tiny_llama()
    trainer = Trainer(model, arguments, None, data, callbacks=[Looks(), *user_callbacks])
    return trainer, trainer.train, lambda: trainer.callback_handler.callbacks


def lightning_trainer(directory: Path, look: Look, *user_callbacks: Any) -> Any:
    import lightning.pytorch as pl

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
            look(trainer.callbacks)

        def __reduce__(self) -> Any:
            return pl.Callback, ()

    rows = torch.utils.data.TensorDataset(torch.randn(64, 4))
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, default_root_dir=directory, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        callbacks=[Looks(), *user_callbacks],
    )  # fmt: skip

    def train() -> None:
        trainer.fit(Model(), torch.utils.data.DataLoader(rows, batch_size=4))

    return trainer, train, lambda: trainer.callbacks


TRAINERS = {"hugging_face": hugging_face_trainer, "lightning": lightning_trainer}
FORERUN_CALLBACKS = {
    "hugging_face": hugging_face.hugging_face_callback,
    "lightning": lightning.lightning_callback,
    "bridge": bridge.bridge_callback,
}


def callback_names_while_training(
    kind: str, directory: Path, *user_callbacks: Any
) -> list[list[str]]:
    """Return the callbacks' names before, during and after training; each time all are copied."""
    if importlib.util.find_spec(PACKAGES[kind]) is None:
        pytest.skip(f"{PACKAGES[kind]} is not installed")
    results: list[list[str]] = []

    def look(known: Any) -> None:
        check_replaced_functions()
        results.append(names(known))
        for one in copies(known):
            assert len(one) == len(known)

    _, train, listed = TRAINERS[kind](directory, look, *user_callbacks)
    look(listed())
    train()
    look(listed())
    return results


def listen(kind: str, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listen as the flag does once the package has been imported."""
    monkeypatch.setattr(lightning, "_PACKAGES", ("lightning.pytorch",))
    module = {"hugging_face": "transformers.trainer", "lightning": "lightning.pytorch"}[kind]
    pytest.importorskip(module)
    {"hugging_face": hugging_face, "lightning": lightning}[kind].wait_for(session)


def steps_in(directory: Path) -> list[int]:
    return [r.step for r in read_run(directory).records[0] if isinstance(r, StepRecord)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_watched_trainers_list_is_the_same_and_can_be_copied(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = callback_names_while_training(kind, tmp_path)
    session = request.getfixturevalue("session")
    listen(kind, session, monkeypatch)
    assert callback_names_while_training(kind, tmp_path) == bare and len(bare) == STEPS + 2
    assert steps_in(tmp_path / "out") == list(range(STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_callback_of_the_users_watches_in_our_place(
    kind: str, tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    begin = callbacks.WatchedTraining.begin

    def note(self: Any, find: Any) -> None:
        begun.append(self)
        begin(self, find)

    monkeypatch.setattr(callbacks.WatchedTraining, "begin", note)
    listen(kind, session, monkeypatch)
    callback = FORERUN_CALLBACKS[kind](directory=tmp_path / "unused", **OPTIONS)
    results = callback_names_while_training(kind, tmp_path, callback)
    assert [one for one in begun if one is not callback] == [] and len(begun) == 1
    assert all(known.count("ForerunCallback") == 1 for known in results)
    assert steps_in(tmp_path / "out") == list(range(STEPS))


@pytest.mark.parametrize("kind", FORERUN_CALLBACKS)
def test_a_copy_of_a_users_callback_has_its_options_and_has_not_begun(
    kind: str, tmp_path: Path
) -> None:
    if kind in PACKAGES and importlib.util.find_spec(PACKAGES[kind]) is None:
        pytest.skip(f"{PACKAGES[kind]} is not installed")
    callback = FORERUN_CALLBACKS[kind](directory=tmp_path, **OPTIONS)
    callback._session = io.StringIO()  # as one that has begun holds what cannot be pickled
    for one in copies(callback):
        assert type(one) is type(callback) and one is not callback
        assert (
            one._session is None and one._make_session.keywords == callback._make_session.keywords
        )


@pytest.mark.slow
def test_an_error_in_lightnings_training_ends_our_part(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen("lightning", session, monkeypatch)

    def fail(known: Any) -> None:
        raise ZeroDivisionError("planted")

    _, train, _ = lightning_trainer(tmp_path, fail)
    with pytest.raises(ZeroDivisionError, match="planted"):
        train()
    assert session._is_finished


@pytest.mark.slow
def test_a_checkpoint_of_lightning_holds_what_it_does_without_us(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightning")

    def saved(name: str) -> list[Any]:
        trainer, train, _ = lightning_trainer(tmp_path, lambda known: None)
        train()
        trainer.save_checkpoint(tmp_path / name)
        checkpoint = torch.load(tmp_path / name, weights_only=False)
        return [sorted(checkpoint), checkpoint["callbacks"], checkpoint["loops"]]

    bare = saved("bare.ckpt")
    listen("lightning", request.getfixturevalue("session"), monkeypatch)
    assert saved("watched.ckpt") == bare


BRIDGE = """
EVENTS = ("on_train_start", "on_train_step_start", "on_train_step_end", "on_train_end")

class CallbackManager:
    def __init__(self):
        self._callbacks = {name: [] for name in EVENTS}
        self._active_events = set()

    def add(self, callback):
        for name in EVENTS:
            if hasattr(callback, name):
                self._callbacks[name].append(getattr(callback, name))
                self._active_events.add(name)

    def has_callbacks(self, name):
        return name in self._active_events

    def fire(self, event_name, context):
        for call in self._callbacks[event_name]:
            call(context)

def normalize_callbacks(callbacks):
    if callbacks is None or isinstance(callbacks, CallbackManager):
        return callbacks
    manager = CallbackManager()
    for callback in callbacks:
        manager.add(callback)
    return manager

def should_fire(callback_manager, event_name):
    return callback_manager is not None and callback_manager.has_callbacks(event_name)

def pretrain(callbacks, context):
    manager = normalize_callbacks(callbacks)
    for name in EVENTS:
        if should_fire(manager, name):
            manager.fire(name, context)
    return manager
"""


@pytest.mark.parametrize("given", ["nothing", "manager", "own"])
def test_a_manager_of_bridges_holds_what_it_does_without_us(
    given: str, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron.core")
    module: Any = ModuleType("megatron.bridge.training.callbacks")
    module.__spec__ = SimpleNamespace(_initializing=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(BRIDGE, vars(module))
    notified: list[tuple[str, Any]] = []
    for name in module.EVENTS:
        monkeypatch.setattr(
            bridge.BridgeCallback, name, lambda self, _, name=name: notified.append((name, self))
        )
    callback = bridge.bridge_callback(**OPTIONS)
    manager = module.CallbackManager()
    if given == "own":
        manager.add(callback)
    registered, active = copy.deepcopy(manager._callbacks), set(manager._active_events)
    bridge.wait_for(session)
    result = module.pretrain(None if given == "nothing" else manager, object())
    assert [name for name, _ in notified] == list(module.EVENTS)  # each once
    assert all(one is callback for _, one in notified) is (given == "own")
    assert given == "nothing" or result is manager
    assert {name: len(calls) for name, calls in result._callbacks.items()} == {
        name: len(calls) for name, calls in registered.items()
    }
    assert result._active_events == active
    assert not any(result.has_callbacks(name) for name in module.EVENTS) or given == "own"


def test_nothing_is_written_on_a_trainer_of_torchtitan(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[bool] = []

    class Trainer:
        step = 1

        def train(self) -> None:
            self.train_step()

        def train_step(self) -> None:
            began.append(vars(self) == {})
            copy.deepcopy(self)
            pickle.dumps([vars(self)])

    watched: list[int] = []
    monkeypatch.setattr(torchtitan._Training, "find", lambda self, trainer: None)
    monkeypatch.setattr(torchtitan._Training, "begin", lambda self, find: None)
    monkeypatch.setattr(torchtitan._Training, "begin_step", lambda self, n: watched.append(n))
    module: Any = ModuleType("torchtitan.trainer")
    module.Trainer = Trainer
    torchtitan._watch_trainers(session, module)
    Trainer().train()
    assert began == [True] and watched == [0]
    Trainer().train_step()  # without its ``train``, nobody watches
    assert watched == [0]


GRAPHED = """
def wrap_with_cuda_graph(fwd_bwd_fn):
    def run(inputs, labels, global_valid_tokens, extra_kwargs):
        return fwd_bwd_fn(inputs, labels, global_valid_tokens, extra_kwargs)
    return run
"""
"""As ``torchtitan/distributed/cudagraph.py`` of August 2026 has it, without its checks."""


@pytest.mark.parametrize(
    ("home", "expected"),
    [
        ("torchtitan.distributed.cudagraph", True),
        ("torchtitan.experiments.graph_trainer.cudagraph", True),
        ("torchtitan.trainer", False),
        ("cudagraph", False),
    ],
)
def test_a_trainer_of_torchtitan_shows_that_its_passes_are_a_graph(
    home: str, expected: bool
) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.fwd_bwd_fn: Any = self._forward_backward_body

        def _forward_backward_body(self, *args: Any) -> None: ...

    trainer, names = Trainer(), {"__name__": home}
    assert not torchtitan.is_graphed(trainer)
    exec(GRAPHED, names)
    trainer.fwd_bwd_fn = names["wrap_with_cuda_graph"](trainer.fwd_bwd_fn)  # type: ignore
    assert torchtitan.is_graphed(trainer) is expected
    assert not torchtitan.is_graphed(Unaskable())


def test_of_a_graphed_trainer_of_torchtitan_steps_are_kept_and_the_reason_is_said() -> None:
    model = torch.nn.Linear(2, 2)
    names: dict[str, Any] = {"__name__": "torchtitan.distributed.cudagraph"}
    exec(GRAPHED, names)
    trainer = SimpleNamespace(
        fwd_bwd_fn=names["wrap_with_cuda_graph"](lambda *_: None),
        config=SimpleNamespace(training=SimpleNamespace(steps=7)),
        optimizers=SimpleNamespace(),
        checkpointer=SimpleNamespace(),
        model_parts=[model],
        gradient_accumulation_steps=2,
    )
    training = torchtitan._Training(lambda: None)  # type: ignore[arg-type, return-value]
    search_result = training.find(trainer)
    training.end()
    assert search_result.known.cadence.train_iters == 7 and search_result.models == (model,)
    assert find_regions([model]).names == (
        "inside a CUDA graph: forward and backward of each micro-batch, step time only",
    )


@pytest.mark.parametrize("callbacks_of", [lambda: [Unaskable()], lambda: Unaskable(), lambda: None])
def test_who_calls_callbacks_is_not_asked_and_what_is_in_its_list_neither(
    callbacks_of: Callable[[], Any],
) -> None:
    class Events(callbacks.WatchedTraining):
        def on_start(self, given: Any) -> None:
            notified_types.append(type(given))

        on_end = on_start

    notified_types: list[type] = []
    owner, other = Unaskable(), Unaskable()
    object.__getattribute__(owner, "__dict__")["callbacks"] = callbacks_of()
    listeners = callbacks.Listeners(Events, "on_start")
    for event in ("on_end", "on_start", "on_end"):
        listeners.notify(owner, event, Unaskable())
        listeners.notify(other, "on_end", Unaskable())
    assert notified_types == [Unaskable] * 2  # from the start on, and of that owner alone
    assert listeners.of(owner) is not None and listeners.of(other) is None
    del owner
    listeners.put(other, object())
    assert len(listeners._known) == 1
