"""A run to so many tokens: closed forms of its steps and its time, and what is said of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_schema import check

from forerun.calib.errors import ConfigError
from forerun.calib.forecast.whole import whole_run
from forerun.calib.workload.config import Cadence
from forerun.launch.cli import ExitCode, main
from forerun.launch.opened.run import unmeasured
from forerun.launch.options.plan_options import read_tokens
from forerun.launch.verbs.arguments import ANSWERS

_LINE = (
    "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --bf16 --num-layers 24 "
    "--hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings "
    "2048 --micro-batch-size 2 --global-batch-size 64 --vocab-size 50304 "
    "--use-distributed-optimizer"
)
LINE = _LINE.split()
STEP_TOKENS = 64 * 2048
Out = pytest.CaptureFixture[str]


def answer_of(capsys: Out, *words: str, line: list[str] | None = None) -> dict[str, Any]:
    command = ["--", *LINE] if line is None else ["--", *line] if line else []
    assert main([*words, "--json", *command]) == ExitCode.ANSWER
    value = json.loads(capsys.readouterr().out)
    check(value, json.loads(ANSWERS.read_text(encoding="utf-8")))
    return value


def test_steps_time_hours_and_cost_are_closed_forms(capsys: Out) -> None:
    words = ("predict", "--device", "H100", "--tokens", "300B", "--price-per-gpu-hour", "2.5")
    result = answer_of(capsys, *words)
    run = result["whole_run"]
    steps = math.ceil(300e9 / STEP_TOKENS)
    assert run["num_steps"] == steps and run["num_tokens"] == steps * STEP_TOKENS
    assert run["duration_s"] == pytest.approx(steps * result["step_time_s"])
    assert run["low_s"] == pytest.approx(steps * result["low_s"])
    assert run["high_s"] == pytest.approx(steps * result["high_s"])
    assert run["gpu_hours"] == pytest.approx(16 * run["duration_s"] / 3600)
    assert run["cost"] == pytest.approx(2.5 * run["gpu_hours"])


def test_the_length_may_be_that_of_the_line(capsys: Out) -> None:
    words = ("predict", "--device", "H100", "--price-per-gpu-hour", "1")
    result = answer_of(capsys, *words, line=[*LINE, "--train-samples", "640"])
    assert result["whole_run"]["num_steps"] == 10
    assert answer_of(capsys, *words[:3])["whole_run"] is None
    assert main([*words, "--", *LINE]) == ExitCode.USAGE
    assert "give --tokens such as 1T" in capsys.readouterr().err


def test_evaluations_saves_and_a_ramp_count() -> None:
    machine = unmeasured("H100", command=LINE).machine()
    config, steps = machine.running, machine.steps
    plain = whole_run(config, steps, num_tokens=100 * STEP_TOKENS)
    cadence = Cadence(eval_interval=10, eval_iters=5, save_interval=50, is_saving=True)
    busy = whole_run(replace(config, cadence=cadence), steps, num_tokens=100 * STEP_TOKENS)
    assert busy.num_steps == plain.num_steps == 100
    evals = 50 * plain.duration_s / 100
    assert plain.duration_s + evals / 5 < busy.duration_s < plain.duration_s + evals + 120
    ramp = replace(config, cadence=Cadence(rampup_batch_size=(32, 32, 640)))
    slow = whole_run(ramp, steps, num_tokens=100 * STEP_TOKENS)
    assert slow.num_steps == 110 and slow.num_tokens == 100 * STEP_TOKENS
    assert plain.duration_s < slow.duration_s < 1.1 * plain.duration_s


@pytest.mark.slow
def test_a_plan_has_the_run_of_its_fastest(capsys: Out) -> None:
    words = ("--device", "H100,H200", "--tokens", "2e11", "--price-per-gpu-hour", "2,3")
    for one in answer_of(capsys, "plan", *words)["plans"]:
        run, price = one["whole_run"], one["price_per_gpu_hour"]
        giga = one["gpu_hours_per_giga_token"] * run["num_tokens"] / 1e9
        assert run["gpu_hours"] == pytest.approx(giga)
        assert run["cost"] == pytest.approx(price * run["gpu_hours"])


@given(
    st.integers(1, 999),
    st.sampled_from([("", 1), ("K", 10**3), ("M", 10**6), ("b", 10**9), ("T", 10**12)]),
)
def test_words_of_tokens_mean_what_they_say(number: int, unit: tuple[str, int]) -> None:
    letter, power = unit
    assert read_tokens(f"{number}{letter}") == number * power
    assert read_tokens(f"{number}e3") == read_tokens(float(1000 * number)) == 1000 * number
    if power > 1:
        assert read_tokens(f"{number / 10}{letter}") == number * power // 10


@given(st.text(max_size=8))
def test_any_other_word_is_refused_with_the_remedy(text: str) -> None:
    try:
        assert 0 < read_tokens(text) < 10**15
    except ConfigError as err:
        assert str(err).startswith("--tokens ") and str(err).endswith("such as 300B or 1T")
