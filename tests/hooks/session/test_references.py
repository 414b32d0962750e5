"""Nothing of the user's is kept: models and optimizers die with Forerun as they do without it."""

from __future__ import annotations

import gc
import importlib.util
import json
import re
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import reference_runs as script
import torch
from launched import Launch
from torch import nn

from forerun.calib.records.record_kinds import (
    CoverageRecord,
    OperatorRecord,
    PhaseRecord,
    StepRecord,
)
from forerun.calib.samples.store import read_run
from forerun.calib.workload.operators import OperatorKind
from forerun.hooks.session._trace_turns import GONE
from forerun.hooks.session.attaching import attach

FLAGS = (
    "--calibrate",
    f"--calibrate-steps={script.WINDOW}",
    f"--calibrate-every={script.EVERY}",
    "--calibrate-wandb=off",
)


@cache
def launch(kind: str, directory: Path, *flags: str) -> dict[str, dict[str, Any]]:
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}
    words = (script.__file__, kind, directory, *flags)
    done = Launch(directory, *words, MASTER_ADDR="localhost", **place).end_well()
    result = map(json.loads, re.findall(r"LEFT (.+)", done.stdout))
    return {leftovers["kind"]: leftovers for leftovers in result}


@cache
def launch_hooked(kind: str, directory: Path) -> dict[str, dict[str, Any]]:
    return launch(kind, directory, *FLAGS, f"--calibrate-dir={directory / 'out'}")


def windows_with(kind: type, directory: Path) -> set[int]:
    records = read_run(directory).records[0]
    return {record.window for record in records if type(record) is kind and record.window >= 0}


def check_leftovers(leftovers: dict[str, Any], bare: dict[str, Any]) -> None:
    """Some frameworks keep parts of what they trained: those are left, and no others."""
    for name in ("alive", "tensor_nbytes", "cuda_nbytes"):
        assert leftovers[name] == bare[name]
    assert not {"model0.", "optimizer"} & set(leftovers["alive"])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2", "attach"])
def test_loops_of_ones_own_leave_nothing(plain: Path, kind: str) -> None:
    leftovers = launch_hooked("plain", plain)[kind]
    times = [*(f"step {step}" for step in script.AFTER), "the end"]
    assert leftovers["held"] == {when: [] for when in times}
    assert (leftovers["num_buffers"], leftovers["errors"]) == (0, [])
    check_leftovers(leftovers, launch("plain", plain)[kind])
    # The second window has found what is trained again.
    folder = plain / ("out" if kind == "ddp" else kind)
    assert windows_with(PhaseRecord, folder) == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["interrupted", "another"])
def test_a_model_dies_whose_training_broke_off_in_a_hooked_step(plain: Path, kind: str) -> None:
    leftovers = launch_hooked("plain", plain)[kind]
    assert (leftovers["held"]["the end"], leftovers["errors"]) == ([], [])
    check_leftovers(leftovers, launch("plain", plain)[kind])
    if kind == "another":  # its first step ends the session of the one before
        assert leftovers["num_buffers"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "package"),
    [("hugging_face", "transformers"), ("lightning", "lightning"), ("core", "megatron.core")],
)
def test_frameworks_leave_what_they_leave_without_us(
    tmp_path: Path, kind: str, package: str
) -> None:
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed")
    leftovers = launch_hooked(kind, tmp_path)[kind]
    assert len(leftovers["held"]) == 1 + len(script.AFTER)
    assert not any(leftovers["held"].values()), leftovers["held"]
    assert (leftovers["num_buffers"], leftovers["errors"]) == (0, [])
    seen = PhaseRecord if kind == "lightning" else OperatorRecord
    assert windows_with(seen, tmp_path / "out") == {0, 1}
    if leftovers["alive"] or leftovers["tensor_nbytes"] or leftovers["cuda_nbytes"]:
        check_leftovers(leftovers, launch(kind, tmp_path)[kind])


def steps(run: Any, model: nn.Module, optimizer: Any, count: int) -> None:
    for _ in range(count):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        run.step()


def test_a_window_of_a_model_that_is_gone_has_step_times_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.ModuleDict({"output_layer": nn.Linear(4, 4)})["output_layer"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    old = weakref.ref(model)
    with attach(model, optimizer, directory=tmp_path, steps=4, every=10, is_analysed=False) as run:
        steps(run, model, optimizer, 8)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gc.collect()
        assert old() is None
        steps(run, model, optimizer, 8)
    assert run is not None and caplog.text.count(GONE) == 1 and "fault" not in caplog.text
    records = read_run(tmp_path).records[0]
    assert [r.window for r in records if isinstance(r, CoverageRecord) and r.name == GONE] == [1]
    second = [r for r in records if isinstance(r, StepRecord) and r.window == 1]
    assert len(second) == 4 and not any(step.is_hooked for step in second)
    assert "forward" not in vars(model)


class Slotted:
    """An optimizer to which nothing can refer weakly."""

    __slots__ = ("inner", "param_groups")

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self) -> None:
        self.inner.step()

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.inner.register_step_post_hook(hook)


def test_an_optimizer_without_weak_references_is_counted_and_not_kept(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = Slotted(torch.optim.SGD(model.parameters(), lr=0.1))
    inner = weakref.ref(optimizer.inner)
    with attach(model, optimizer, directory=tmp_path, steps=4, is_analysed=False) as run:  # type: ignore[arg-type]
        steps(run, model, optimizer, 8)
        del optimizer
        gc.collect()
        assert inner() is None
    updates = [r for r in read_run(tmp_path).records[0] if isinstance(r, OperatorRecord)]
    assert {r.shape for r in updates if r.kind is OperatorKind.OPTIMIZER} == {(20,)}
