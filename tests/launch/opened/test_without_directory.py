"""``forerun.load`` without a directory, a plan as a table, and what shows itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import forerun
from forerun.launch.cli import ExitCode, main
from forerun.launch.opened._layout_answers import PlanAnswer
from forerun.launch.opened.run import Run

LINE = (
    "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --bf16 --num-layers 24 "
    "--hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings "
    "2048 --micro-batch-size 2 --global-batch-size 64 --vocab-size 50304 "
    "--use-distributed-optimizer"
)


@pytest.fixture(scope="module")
def run() -> Run:
    return forerun.load(device="H100", command=LINE)


@pytest.fixture(scope="module")
def plan(run: Run) -> PlanAnswer:
    return run.plan(top=5)


def test_it_says_what_the_verb_says(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "--device", "H100", "--tp", "2", "--tokens", "1T", "--", *LINE.split()]
    assert main(words) == ExitCode.ANSWER
    assert str(run.predict(tp=2, tokens="1T")).split() == capsys.readouterr().out.split()
    assert forerun.load(device="H100", command=LINE.split()).layout == run.layout
    assert run.predict().step_time_s == run.explain("running").to_json()["layout"]["step_time_s"]


def test_a_row_is_a_command_and_there_are_no_records(run: Run, plan: PlanAnswer) -> None:
    assert "pretrain_gpt.py" in plan.command(1).text
    assert run.run_id == "NVIDIA H100 80GB HBM3" and run.run_id in repr(run)
    for ask in (run.report, lambda: run.samples, lambda: run.forecast):
        with pytest.raises(forerun.ForerunError, match="train with --calibrate first"):
            ask()


def test_an_option_that_is_not_modelled_is_refused_there_too() -> None:
    other = forerun.load(device="H100", command=f"{LINE} --optimizer muon")
    with pytest.raises(forerun.ForerunError, match="--anyway"):
        other.predict()


@pytest.mark.parametrize("words", [{}, {"directory": ".", "command": LINE}, {"command": LINE}])
def test_a_directory_or_a_device_is_needed(words: dict[str, str]) -> None:
    with pytest.raises(forerun.ForerunError, match="takes a directory, or a device"):
        forerun.load(**words)  # type: ignore[arg-type]


def test_a_plan_is_a_table(plan: PlanAnswer) -> None:
    frame = plan.to_frame()
    shown = (plan.running, *plan.candidates[:5])
    assert list(frame["row"]) == [0, 1, 2, 3, 4, 5] and frame.columns.is_unique
    assert list(frame["label"]) == [one.label for one in shown]
    assert list(frame["step_time_s"]) == [one.step_time_s for one in shown]
    assert list(frame["total_nbytes"]) == [one.memory.total_nbytes for one in shown]
    assert {"tokens_per_s", "low_s", "high_s", "verdict", "device", "tp"} <= {*frame.columns}


def test_several_plans_are_one_table(run: Run) -> None:
    frame = run.plan(gpus=[8, 16], top=1).to_frame()
    assert list(frame["num_ranks"][frame["row"] == 1]) == [8, 16]


@pytest.mark.slow
def test_a_plan_shows_itself_in_a_screen_and_a_layout_in_a_line(run: Run, plan: PlanAnswer) -> None:
    for one in (plan, run.plan(gpus="8..32"), run.plan(gpus=32, top=50)):
        lines = repr(one).splitlines()
        assert len(lines) <= 24 and max(map(len, lines)) <= 80
        assert one.candidates[0].label.split()[0] in repr(one)
    for shown in (plan.best, plan.running, run):
        assert shown is not None and "\n" not in repr(shown)
    assert repr(plan.running).startswith(f"{plan.running.label}: step ")


def test_a_chart_has_a_point_for_each_layout(plan: PlanAnswer) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    frame = plan.to_frame()
    fitting = frame[frame["verdict"] != "does not fit"]
    axes = plan.plot()
    assert [one.get_text() for one in axes.get_yticklabels()] == list(fitting["label"])
    assert plan.plot(axes) is axes


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="it is installed")
def test_a_chart_says_what_is_missing(plan: PlanAnswer, tmp_path: Path) -> None:
    with pytest.raises(forerun.ForerunError, match="pip install matplotlib, or draw what to_fr"):
        plan.plot()
