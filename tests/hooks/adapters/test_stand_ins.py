"""A host's names while it is watched: pickled, compiled and compared as without us."""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_names import check_replaced_functions
from torch import nn

from forerun.calib.records.record_kinds import StepFlag, StepRecord
from forerun.calib.samples.store import read_run
from forerun.hooks.adapters._patches import Patches, wrapped
from forerun.hooks.adapters.megatron_core import CoreLoop
from forerun.hooks.adapters.torch_loop import TorchLoop
from forerun.hooks.session.attaching import new_session
from forerun.hooks.session.session import Session

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SAVERS = (torch.save, torch.serialization.save, dcp.save, dcp.async_save, dcp.save_state_dict)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    made = new_session(directory=tmp_path / "out", steps=4, is_analysed=False)
    yield made
    made.finish()


def train(session: Session, steps: int, act: Callable[[int], object]) -> None:
    """A loop of one's own; ``act`` comes after each step."""
    loop = TorchLoop(session)
    loop.attach()
    try:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            act(step)
    finally:
        loop.end()
        loop.detach()


def saved_steps(directory: Path) -> set[int]:
    records = read_run(directory).records[0]
    return {r.step for r in records if isinstance(r, StepRecord) and StepFlag.SAVED in r.flags}


@pytest.mark.slow
def test_functions_that_save_are_pickled_and_compared_as_without_us(session: Session) -> None:
    bare = [(f, f.__module__, f.__qualname__) for f in SAVERS]
    places: list[set[str]] = []

    def look(step: int) -> None:
        places.append(check_replaced_functions())
        for function, module, name in bare:
            assert pickle.loads(pickle.dumps(function)) is function
            assert getattr(sys.modules[module], name) is function
        assert torch.save is SAVERS[0] and dcp.save is SAVERS[2]

    train(session, 8, look)
    names = {name.partition(".")[2] for name in places[-1]}
    below = {"serialization._save", "serialization._legacy_save"}
    assert below < names and "distributed.checkpoint.state_dict_saver._save_state_dict" in names
    assert check_replaced_functions() == set()


def test_a_pool_of_forked_processes_saves(session: Session, tmp_path: Path) -> None:
    futures: list[Any] = []
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:

        def save(step: int) -> None:
            futures.append(pool.submit(torch.save, {"step": step}, tmp_path / f"{step}.pt"))

        train(session, 6, save)
    assert [one.exception() for one in futures] == [None] * 6
    assert torch.load(tmp_path / "5.pt") == {"step": 5}
    assert saved_steps(tmp_path / "out") == set()


def run_in_thread(save: Callable[[], object]) -> None:
    thread = threading.Thread(target=save)
    thread.start()
    thread.join()


@pytest.mark.parametrize("kind", ["zip", "legacy", "sharded", "staged"])
def test_saves_of_the_thread_that_trains_are_no_steps_time(
    kind: str, session: Session, tmp_path: Path
) -> None:
    state, path = {"weight": torch.ones(3)}, tmp_path / "saved"

    def save() -> object:
        if kind == "sharded":
            return dcp.save(state, checkpoint_id=path, no_dist=True)
        if kind == "staged":
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            return DefaultStager(StagingOptions(False, False, False, False)).stage(state)
        return torch.save(state, path, _use_new_zipfile_serialization=kind == "zip")

    def act(step: int) -> None:
        if step == 4:
            save()
        if step == 6:
            run_in_thread(save)

    train(session, 10, act)
    assert saved_steps(tmp_path / "out") == {5}


def test_a_name_that_this_release_lacks_is_said_once(
    session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(torch.serialization, "_legacy_save")
    train(session, 4, lambda step: None)
    assert caplog.text.count("no patch at torch.serialization._legacy_save, which is missing") == 1


def test_a_method_is_replaced_where_it_was_defined(session: Session) -> None:
    patches = Patches(session)
    patches.bracket(_Subclass, "evaluate", "eval")
    try:
        assert "evaluate" not in vars(_Subclass) and _Subclass.evaluate is _Base.evaluate
        assert pickle.loads(pickle.dumps(_Subclass.evaluate)) is _Subclass.evaluate
        assert check_replaced_functions() == {f"{__name__}._Base.evaluate"}
    finally:
        patches.remove()
    assert check_replaced_functions() == set()


class _Base:
    def evaluate(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class _Subclass(_Base):
    pass


def test_a_compiler_sees_the_original(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def note(*_: Any) -> None:
        called.append(time.perf_counter_ns())

    called: list[int] = []
    patches = Patches(session)
    patches.around(_Base, "evaluate", before=note)
    function = wrapped(lambda x: x * 2, note, note)
    try:
        compiled: Any = torch.compile(
            lambda x: function(_Subclass().evaluate(x)), backend="eager", fullgraph=True
        )
        assert compiled(torch.ones(1)).item() == 4.0
        assert called == []
        _Subclass().evaluate(torch.ones(1))
        assert len(called) == 1
    finally:
        patches.remove()


def test_megatrons_functions_agree_at_all_their_places(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron.core")
    saving = importlib.import_module("megatron.core.dist_checkpointing")
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    optimizers = importlib.import_module("torch.optim.optimizer")
    package: Any = importlib.import_module("megatron.core.pipeline_parallel")
    for when in ("pre", "post"):  # those of all optimizers would stay
        name = f"register_optimizer_step_{when}_hook"
        monkeypatch.setattr(optimizers, name, lambda hook: None)
    loop = CoreLoop(session)
    loop.attach_schedules(schedules)
    loop.attach_saving(saving)
    loop._attach_optimizers()
    try:
        result = check_replaced_functions()
        homes = {
            "megatron.core.dist_checkpointing",
            "megatron.core.dist_checkpointing.serialization",
        }
        assert {f"{home}.save" for home in homes} <= result
        assert package.get_forward_backward_func is schedules.get_forward_backward_func
        assert "megatron.core.optimizer.optimizer.FP32Optimizer.step" in result
    finally:
        loop._patches.remove()
    assert check_replaced_functions() == set()
