"""The seams of Megatron-LM's loop, on modules that have its names and call as it does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from torch import nn, optim

from forerun.calib.samples.records import PhaseRecord, StepFlag, StepRecord
from forerun.calib.samples.store import read_run
from forerun.hooks.adapters import megatron_training
from forerun.hooks.session import Session
from forerun.hooks.settings import RankInfo, Settings

NAMES = ("ft_integration", "one_logger_utils", "training", "global_vars")
SOURCE = """
from megatron.training import ft_integration, one_logger_utils, global_vars

def get_forward_backward_func():
    def schedule(*, forward_only=False):
        timers = global_timers()
        timers("forward-backward").start()
        timers("forward-backward").stop()
    return schedule

def global_timers():
    return global_vars._GLOBAL_TIMERS

def evaluate_and_print_results():
    get_forward_backward_func()(forward_only=True)

def save_checkpoint_and_time():
    pass

def train(forward_step_func, model, optimizer, opt_param_scheduler, config):
    schedule = get_forward_backward_func()
    args = global_vars.get_args()
    for iteration in range(args.iteration, args.train_iters):
        args.curr_iteration = iteration
        ft_integration.on_training_step_start()
        for _ in range(2 if iteration in args.reruns else 1):
            schedule()
        ft_integration.on_training_step_end()
        if iteration == args.eval_at:
            evaluate_and_print_results()
        if iteration == args.save_at:
            save_checkpoint_and_time()
    one_logger_utils.finish()
"""


class Timer:
    def start(self) -> None:
        pass

    stop = start


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    package = ModuleType("megatron.training")
    modules = {name: ModuleType(f"megatron.training.{name}") for name in NAMES}
    monkeypatch.setitem(sys.modules, "megatron.training", package)
    for name, module in modules.items():
        module.__spec__ = SimpleNamespace(_initializing=False)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        setattr(package, name, module)
    for name in ("on_training_step_start", "on_training_step_end"):
        setattr(modules["ft_integration"], name, lambda: None)
    modules["one_logger_utils"].finish = lambda: None
    modules["global_vars"]._GLOBAL_TIMERS = lambda name, log_level=None: Timer()
    modules["global_vars"].get_args = lambda: ARGS
    exec(SOURCE, vars(modules["training"]))
    return modules


ARGS = SimpleNamespace(
    iteration=100, train_iters=112, curr_iteration=0, reruns={104, 105}, eval_at=106, save_at=108
)


def test_steps_reruns_evaluation_and_saves_are_seen_under_megatrons_iteration(
    megatron: dict[str, ModuleType], tmp_path: Path
) -> None:
    pytest.importorskip("megatron.core")
    rank = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, run_id="r")
    session = Session(Settings(rank=rank, steps=8, directory=tmp_path))
    megatron_training.wait_for(session)
    model, config = nn.Linear(2, 2), SimpleNamespace(timers=None)
    timers = megatron["global_vars"]._GLOBAL_TIMERS
    megatron["training"].train(None, [model], optim.SGD(model.parameters()), None, config=config)
    assert megatron["global_vars"]._GLOBAL_TIMERS is timers and config.timers is None
    records = read_run(tmp_path).records[0]
    steps = {r.step: r for r in records if isinstance(r, StepRecord)}
    assert sorted(steps) == list(range(100, 111))
    flags = {number: set(r.flags) for number, r in steps.items() if number >= 103 and r.flags}
    assert flags == {
        104: {StepFlag.RERAN},
        105: {StepFlag.RERAN},
        107: {StepFlag.EVALUATED},
        109: {StepFlag.SAVED},
    }
    hooked = [number for number, r in steps.items() if r.is_hooked]
    phases = [r for r in records if isinstance(r, PhaseRecord)]
    assert [p.step for p in phases if p.name == "forward-backward"] == hooked
    assert [p.name for p in phases if p.name in ("eval", "save-checkpoint")] == [
        "eval",
        "save-checkpoint",
    ]
