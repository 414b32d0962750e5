"""A search of layouts that fails takes neither step nor end with it; experts are searched too."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from forerun.calib.advice.decision import decide
from forerun.calib.answers.analysis import analyse
from forerun.calib.answers.answer import Answer
from forerun.calib.answers.request import Request
from forerun.calib.answers.run_measurements import Measurements
from forerun.calib.answers.transcript import PREFIX, decision_line
from forerun.calib.errors import ConfigError
from forerun.calib.records.iso_times import Action
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.calib.workload.config import Engine, Experts, Sharding
from forerun.calib.workload.run_options import Goals

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
TABLE = build_table(read_run(GOLDEN))
RUNNING = Measurements(table=TABLE).config
REQUEST = Request(now_unix_s=1e9, last_step=11)
PARTS = ("plan", "_what_if", "explain", "lint")
EXPERTS = Experts(num_experts=8, ffn_hidden_size=64)
LOOPS = [
    ("Megatron-LM 0.16", Engine.MEGATRON),
    ("PyTorch 2.13", Engine.TORCH),
    ("transformers 5.24", Engine.MEGATRON),
    ("transformers 5.24", Engine.TORCH),
]
SHARDED = {"is_optimizer_distributed": True, "sharding": Sharding.WEIGHTS}


@cache
def answered() -> Answer:
    return analyse(TABLE, REQUEST)


@pytest.mark.parametrize("part", PARTS)
def test_an_answer_stands_without_the_part_that_fails(
    part: str, monkeypatch: pytest.MonkeyPatch, steady: Any
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ConfigError("instances 2 do not divide 1")

    whole = answered()
    monkeypatch.setattr(f"forerun.calib.answers.analysis.{part}", fails)
    answer = analyse(TABLE, REQUEST)
    assert answer.forecast == whole.forecast and answer.known.step == whole.known.step
    assert answer.measured.step_s == whole.measured.step_s
    (line,) = (line for line in answer.transcript if "instances 2 do not divide 1" in line)
    assert line.startswith(f"{PREFIX} ")
    if part != "plan":
        assert answer.decision == whole.decision and answer.known.plan == whole.known.plan
        return
    alone = answer.known.plan
    assert alone.best is None and alone.running == whole.known.plan.running
    assert answer.to_json()["plan"]
    decision = decide(Goals(restart_cost_s=60.0), forecast=steady(), plan=alone)
    assert decision.action is Action.ABSTAIN
    line = decision_line(decision)
    assert line == "decision: none yet (other layouts not compared: instances 2 do not divide 1)"


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "engine"), LOOPS)
@pytest.mark.parametrize("sharded", [{}, SHARDED])
@pytest.mark.parametrize("experts", [None, EXPERTS])
def test_each_loop_with_and_without_experts_has_an_end_and_layouts(
    framework: str,
    engine: Engine,
    sharded: dict[str, Any],
    experts: Experts | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The steps of two replicas, as if another loop had run another model in them."""
    config = replace(RUNNING, framework=framework, model=replace(RUNNING.model, experts=experts))
    config = replace(config, parallelism=replace(RUNNING.parallelism, engine=engine, **sharded))
    monkeypatch.setattr(Measurements, "config", config)
    answer = analyse(TABLE, REQUEST)
    assert answer.has_finish and answer.known.what_if and answer.known.lint
    assert answer.known.plan.candidates and not answer.known.plan.not_searched
