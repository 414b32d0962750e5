"""torchtitan's Trainer of two releases, by classes with the methods that the adapter wraps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from forerun.calib.records.record_kinds import StepFlag, StepRecord
from forerun.calib.samples.store import read_run
from forerun.hooks.adapters import _callbacks as callbacks
from forerun.hooks.adapters import torchtitan
from forerun.hooks.adapters._patches import Patches
from forerun.hooks.session.attaching import new_session
from forerun.hooks.session.session import Session

STEPS, WINDOW, SAVED = 12, 8, 7
SEEN = set(range(3 + WINDOW))
"""Steps with a record: those of the warm-up, and of the window."""


class CheckpointManager:
    def __init__(self) -> None:
        self.num_saved = 0

    def save(self, step: int, last_step: bool = False) -> None:
        if step == SAVED:
            self.dcp_save({}, checkpoint_id=str(step))

    def dcp_save(self, state: Any, *, checkpoint_id: str) -> None:
        self.num_saved += 1


class Backend:
    """As ``torch_checkpointing.checkpoint_manager.CheckpointManager``, of release 0.1.1."""

    def __init__(self) -> None:
        self.num_saved = 0

    def save(self, checkpoint_id: str, checkpoint: Any) -> None:
        self.num_saved += 1


class TorchCheckpointingManager:
    """That of torchtitan 0.3, which has no ``dcp_save``: another library saves."""

    def __init__(self) -> None:
        self._manager = Backend()

    @property
    def num_saved(self) -> int:
        return self._manager.num_saved

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        if curr_step == SAVED:
            self._manager.save(f"step-{curr_step}", {})
        return curr_step == SAVED


def trainer_class(config_name: str, manager: type = CheckpointManager) -> type:
    """A new class for each test: what stands around its methods stays."""

    class Trainer:
        def __init__(self) -> None:
            config = SimpleNamespace(training=SimpleNamespace(steps=STEPS))
            setattr(self, config_name, config)
            self.model_parts = [nn.Linear(4, 1)]
            self.optimizers = torch.optim.SGD(self.model_parts[0].parameters(), lr=0.1)
            self.checkpointer = manager()
            self.gradient_accumulation_steps, self.step = 1, 0

        def train(self) -> None:
            while self.step < STEPS:
                self.step += 1
                self.train_step(iter(()))
                self.checkpointer.save(self.step, last_step=self.step == STEPS)

        def train_step(self, data: Any) -> None:
            self.optimizers.zero_grad()
            self.model_parts[0](torch.ones(2, 4)).sum().backward()
            self.optimizers.step()

    return Trainer


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    made = new_session(directory=tmp_path / "out", steps=WINDOW, is_analysed=False)
    put: list[Patches] = []

    def patches(session: Session) -> Patches:
        put.append(Patches(session))
        return put[-1]

    monkeypatch.setattr(torchtitan, "Patches", patches)
    monkeypatch.setattr(callbacks, "running", lambda: made)
    yield made
    made.finish()
    for each in put:
        each.remove()


def steps_of(directory: Path) -> dict[int, StepRecord]:
    records = read_run(directory).records[0]
    return {record.step: record for record in records if isinstance(record, StepRecord)}


@pytest.mark.parametrize(
    ("config_name", "manager"),
    [
        ("config", CheckpointManager),
        ("job_config", CheckpointManager),
        ("config", TorchCheckpointingManager),
    ],
)
def test_a_step_after_which_nothing_was_saved_is_clean(
    config_name: str,
    manager: type,
    session: Session,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    library: Any = ModuleType("torch_checkpointing.checkpoint_manager")
    library.CheckpointManager = Backend
    monkeypatch.setitem(sys.modules, library.__name__, library)
    module: Any = ModuleType("torchtitan.trainer")
    module.Trainer = trainer_class(config_name, manager)
    torchtitan._watch_trainers(session, module)
    trainer = module.Trainer()
    trainer.train()
    steps = steps_of(tmp_path / "out")
    assert set(steps) == SEEN and trainer.checkpointer.num_saved == 1
    saved = [number for number, step in steps.items() if StepFlag.SAVED in step.flags]
    assert saved in ([SAVED - 1], [SAVED])
    assert "no patch at" not in caplog.text


def test_a_trainer_of_the_program_itself_is_watched_once_its_arguments_are_read(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program: Any = ModuleType("__main__")
    program.__spec__ = SimpleNamespace(name="torchtitan.train")
    program.Trainer = trainer_class("job_config")
    monkeypatch.setitem(sys.modules, "__main__", program)

    class ConfigManager:
        def parse_args(self) -> str:
            return "parsed"

    module: Any = ModuleType("torchtitan.config.manager")
    manager: Any = ConfigManager
    module.ConfigManager, original = manager, manager.parse_args
    torchtitan._watch_program(session, module)
    assert manager().parse_args() == "parsed"
    assert manager.parse_args is original
    program.Trainer().train()
    assert set(steps_of(tmp_path / "out")) == SEEN


def test_another_programs_trainer_is_left_alone(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    program: Any = ModuleType("__main__")
    program.Trainer = trainer_class("config")
    original = program.Trainer.train
    monkeypatch.setitem(sys.modules, "__main__", program)
    module: Any = ModuleType("torchtitan.config.manager")
    module.ConfigManager = type("ConfigManager", (), {"parse_args": lambda self: None})
    torchtitan._watch_program(session, module)
    module.ConfigManager().parse_args()
    assert program.Trainer.train is original


@pytest.mark.parametrize(("degree", "each", "number"), [(1, 1, 2), (4, 1, 64), (4, 8, 8)])
def test_a_pipeline_cuts_the_batch_of_a_rank(degree: int, each: int, number: int) -> None:
    """``build_pipeline_schedule``: the local batch over the size of a micro-batch."""
    layout = SimpleNamespace(
        pipeline_parallel_degree=degree, pipeline_parallel_microbatch_size=each
    )
    config = SimpleNamespace(training=SimpleNamespace(local_batch_size=32), parallelism=layout)
    trainer = SimpleNamespace(config=config, gradient_accumulation_steps=2)
    assert torchtitan.num_microbatches(trainer) == number
