"""The patches of Megatron-LM's loop, on modules that have its names and call as it does."""

from __future__ import annotations

import gc
import logging.handlers
import sys
import weakref
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TypeVar

import pytest
from torch import nn, optim

from forerun.calib.records.record_kinds import CoverageRecord, PhaseRecord, StepFlag, StepRecord
from forerun.calib.samples.store import read_run
from forerun.hooks.adapters import megatron_training
from forerun.hooks.process.settings import RankInfo, Settings
from forerun.hooks.session.session import Session

T = TypeVar("T")
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

def train_step(schedule, model, config):
    args = global_vars.get_args()
    if args.curr_iteration == args.fail_at:
        raise RuntimeError("planted")
    for _ in range(2 if args.curr_iteration in args.reruns else 1):
        schedule()
    args.seen.append(bool(model[0]._forward_hooks or "forward" in vars(model[0])))

def call(module, name):
    getattr(module, name, lambda: None)()

def train(forward_step_func, model, optimizer, opt_param_scheduler, config):
    schedule = get_forward_backward_func()
    args = global_vars.get_args()
    iteration = args.iteration
    while iteration < args.train_iters:
        args.curr_iteration = iteration
        call(ft_integration, "on_training_step_start")
        train_step(schedule, model, config)
        call(ft_integration, "on_training_step_end")
        if iteration == args.eval_at:
            evaluate_and_print_results()
        if iteration == args.save_at:
            save_checkpoint_and_time()
        iteration += 1
        if args.exit_interval and iteration % args.exit_interval == 0:
            save_checkpoint_and_time()
            break
    call(ft_integration, "shutdown")
    call(one_logger_utils, "finish")
"""


class Timer:
    def start(self) -> None:
        pass

    stop = start


class Timers:
    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        return Timer()


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    package = ModuleType("megatron.training")
    modules = {name: ModuleType(f"megatron.training.{name}") for name in NAMES}
    monkeypatch.setitem(sys.modules, "megatron.training", package)
    for name, module in modules.items():
        module.__spec__ = SimpleNamespace(_initializing=False)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        setattr(package, name, module)
    for name in ("on_training_step_start", "on_training_step_end", "shutdown"):
        setattr(modules["ft_integration"], name, lambda: None)
    modules["one_logger_utils"].finish = lambda: None
    modules["global_vars"]._GLOBAL_TIMERS = Timers()
    args = SimpleNamespace(**ARGS, reruns={104, 105}, seen=[])
    modules["global_vars"].get_args = lambda: args
    exec(SOURCE, vars(modules["training"]))
    return modules


ARGS = {
    "iteration": 100,
    "train_iters": 112,
    "curr_iteration": 0,
    "eval_at": 106,
    "save_at": 108,
    "fail_at": None,
    "exit_interval": None,
}


def watched(directory: Path, steps: int = 8) -> Session:
    pytest.importorskip("megatron.core")
    rank = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, run_id="r")
    session = Session(Settings(rank=rank, steps=steps, directory=directory))
    megatron_training.wait_for(session)
    return session


def a_model() -> nn.ModuleDict:
    """One module, which is an operator by its name."""
    return nn.ModuleDict({"output_layer": nn.Linear(2, 2)})


def train(megatron: dict[str, ModuleType], model: nn.Module | None = None) -> None:
    """Run Megatron's loop."""
    model = model or a_model()
    optimizer = optim.SGD(model.parameters())
    config = SimpleNamespace(timers=None)
    megatron["training"].train(None, [model], optimizer, None, config=config)
    assert config.timers is None


def records_of(directory: Path, kind: type[T]) -> list[T]:
    return [record for record in read_run(directory).records[0] if isinstance(record, kind)]


def test_steps_reruns_evaluation_and_saves_are_seen_under_megatrons_iteration(
    megatron: dict[str, ModuleType], tmp_path: Path
) -> None:
    watched(tmp_path)
    timers = megatron["global_vars"]._GLOBAL_TIMERS
    train(megatron)
    assert megatron["global_vars"]._GLOBAL_TIMERS is timers
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


SEAMS = (
    ("ft_integration", "on_training_step_start"),
    ("ft_integration", "on_training_step_end"),
    ("ft_integration", "shutdown"),
    ("one_logger_utils", "finish"),
    ("training", "evaluate_and_print_results"),
    ("training", "save_checkpoint_and_time"),
)


@pytest.mark.parametrize(("owner", "name"), SEAMS)
def test_a_missing_seam_is_named_and_all_else_goes_on(
    megatron: dict[str, ModuleType],
    owner: str,
    name: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seam = f"megatron.training.{owner}.{name}"
    args = megatron["global_vars"].get_args()
    args.eval_at = args.save_at = None
    delattr(megatron[owner], name)
    session = watched(tmp_path)
    train(megatron)
    session.finish()
    warnings = [line for line in caplog.messages if "no patch at" in line]
    assert len(warnings) == 1 and seam in warnings[0] and "training goes on" in warnings[0]
    assert [r.step for r in records_of(tmp_path, StepRecord)] == list(range(100, 111))
    seams = [r for r in records_of(tmp_path, CoverageRecord) if r.name.startswith("seam:")]
    assert [(r.name, r.installed, r.fired) for r in seams] == [(f"seam:{seam}", 1, 0)]


class MoEAlltoAllTokenDispatcher:
    """As in core 0.12: rows are copied and exchanged in one method each way."""

    num_local_experts = 1

    def token_permutation(self) -> None:
        pass


def test_a_dispatcher_of_another_release_loses_its_copies_alone(
    megatron: dict[str, ModuleType], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = a_model()
    vars(model["output_layer"])["token_dispatcher"] = MoEAlltoAllTokenDispatcher()
    watched(tmp_path)
    train(megatron, model)
    coverage = {r.name: (r.installed, r.fired) for r in records_of(tmp_path, CoverageRecord)}
    seams = {name for name in coverage if name.startswith("seam:")}
    home = ("dispatch_preprocess", "combine_postprocess")
    assert seams == {f"seam:MoEAlltoAllTokenDispatcher.{name}" for name in home}
    assert "logits" in coverage and "hooks removed" not in caplog.text
    assert [r.step for r in records_of(tmp_path, StepRecord)] == list(range(100, 111))


def test_without_the_loop_itself_steps_are_timed(
    megatron: dict[str, ModuleType], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = vars(megatron["training"]).pop("train")
    watched(tmp_path)
    vars(megatron["training"])["train"] = loop
    train(megatron)
    assert "no patch at megatron.training.training.train, which is missing" in caplog.text
    steps = records_of(tmp_path, StepRecord)
    assert [r.step for r in steps] == list(range(100, 111))
    assert not any(megatron["global_vars"].get_args().seen)


def test_training_that_begins_again_is_hooked_anew_and_its_old_model_let_go(
    megatron: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an in-process restart does it: the loop is thrown out of a hooked step and called anew."""
    # A fault's log record would keep the frames, and they the models.
    monkeypatch.setattr(megatron_training, "_run_config", lambda models: None)
    session = watched(tmp_path)
    args = megatron["global_vars"].get_args()
    args.fail_at, args.reruns = 106, set()
    model = a_model()
    old = weakref.ref(model)
    first = (None, [model], optim.SGD(model.parameters()), None)
    with pytest.raises(RuntimeError, match="planted"):
        megatron["training"].train(*first, config=SimpleNamespace(timers=None))
    assert not model["output_layer"]._forward_hooks and not session.is_in_step
    del model, first
    args.fail_at, args.seen = None, []
    train(megatron)
    gc.collect()
    assert old() is None
    steps = {(r.window, r.step): r.is_hooked for r in records_of(tmp_path, StepRecord)}
    attempts = {window: [s for w, s in steps if w == window] for window, _ in steps}
    assert attempts == {0: list(range(100, 106)), 1000: list(range(100, 111))}
    for window in attempts:
        warmup = [steps[window, step] for step in (100, 101, 102)]
        assert warmup == [False] * 3 and steps[window, 103]


def test_a_stop_that_is_asked_for_ends_the_run_after_that_step(
    megatron: dict[str, ModuleType], tmp_path: Path
) -> None:
    watched(tmp_path)
    end = megatron["ft_integration"].on_training_step_end
    args = megatron["global_vars"].get_args()

    def ask() -> None:
        end()
        if args.curr_iteration == 109:
            assert megatron_training.request_stop()

    vars(megatron["ft_integration"])["on_training_step_end"] = ask
    train(megatron)
    assert args.curr_iteration == 109 and len(args.seen) == 10
    assert "save-checkpoint" in [r.name for r in records_of(tmp_path, PhaseRecord)]


def test_model_and_optimizer_die_after_training_while_the_session_lives(
    megatron: dict[str, ModuleType], tmp_path: Path
) -> None:
    session = watched(tmp_path)
    model = a_model()
    optimizer = optim.SGD(model.parameters())
    known = [weakref.ref(thing) for thing in (model, model["output_layer"], optimizer)]
    handler = logging.handlers.MemoryHandler(1000, flushLevel=1000)
    logging.getLogger().addHandler(handler)
    config = Namespace(timers=None, grad_scale_func=optimizer.step, no_sync_func=model.forward)
    megatron["training"].train(None, [model], optimizer, None, config=config)
    del model, optimizer, config
    gc.collect()
    assert [reference() for reference in known] == [None] * 3
    logging.getLogger().removeHandler(handler)
    assert session.is_claimed and records_of(tmp_path, PhaseRecord)
