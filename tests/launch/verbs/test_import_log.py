"""A training log as a run: imported, then answered by the verbs of any other run."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from forerun.calib.importers.training_log import read_training_log
from forerun.launch.cli import main

ARGUMENTS = """------------------------ arguments ------------------------
  eval_interval ................................... 100
  eval_iters ...................................... 10
  log_interval .................................... 10
  seq_length ...................................... 2048
  world_size ...................................... 64
-------------------- end of arguments ---------------------
"""
STEP_S, EVAL_S, NUM_STEPS = 2.0, 30.0, 2000


def log_text(num_steps: int, *, seed: int, factor: float = 1.0) -> tuple[str, float]:
    """A log of steps of 2 s with 3 % scatter and evaluations of 30 s; and the time it took."""
    rng, out, took_s = random.Random(seed), [ARGUMENTS], 0.0
    for at in range(10, num_steps + 1, 10):
        steps_s = [factor * STEP_S * rng.lognormvariate(0.0, 0.03) for _ in range(10)]
        took_s += sum(steps_s)
        out.append(
            f" iteration {at:8d}/{NUM_STEPS:8d} | consumed samples: {at * 128:12d} | elapsed time "
            f"per iteration (ms): {1000 * sum(steps_s) / 10:.1f} | global batch size:   128 |"
        )
        if at % 100 == 0:
            evaluated_s = EVAL_S * rng.lognormvariate(0.0, 0.05)
            took_s += evaluated_s
            out.append(f"    evaluate ...............: (1.0, {1000 * evaluated_s:.2f})")
    return "\n".join(out), took_s


def imported(tmp_path: Path, text: str, *words: str) -> Path:
    path, out = tmp_path / "train.log", tmp_path / "out"
    path.write_text(text)
    assert main(["import", "log", str(path), "--out", str(out), *words]) == 0
    return out


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    main([*argv, "--json"])
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


@pytest.mark.parametrize("seed", range(3))
def test_a_tenth_of_a_log_gives_the_finish_within_one_percent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    part, _ = log_text(NUM_STEPS // 10, seed=seed)
    whole, took_s = log_text(NUM_STEPS, seed=seed)
    assert whole.startswith(part)
    out = imported(tmp_path, part, "--device", "NVIDIA H100 80GB HBM3")
    forecast = answer(capsys, "report", str(out))["forecast"]
    assert forecast["total_s"] == pytest.approx(took_s, rel=0.01)
    (run,) = answer(capsys, "status", str(out))["runs"]
    assert (run["iteration"], run["steps_total"], run["state"]) == (200, NUM_STEPS, "logged")
    assert run["finish_p50_unix_s"] == pytest.approx(forecast["finish_p50_unix_s"])
    assert run["step_time_s"] == pytest.approx(STEP_S, rel=0.02)


LOGS = Path(__file__).parents[2] / "golden" / "megatron_logs"


@pytest.mark.parametrize("name", ["each_iteration", "every_fifth_with_saves"])
def test_a_tenth_of_a_real_log_gives_the_finish_within_one_percent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Times of both ends are those that Megatron printed."""
    text = (LOGS / f"{name}.log").read_text()
    whole = read_training_log([text], name)
    first, last = whole.lines[0], whole.lines[-1]
    assert first.unix_s and last.unix_s and last.iteration == whole.num_steps == 400
    took_s = last.unix_s - first.unix_s + first.num_iterations * first.time_s
    at = next(n.start() for n in re.finditer(r"\n.*iteration +(\d+)/", text) if int(n[1]) > 40)
    forecast = answer(capsys, "report", str(imported(tmp_path, text[: at + 1])))["forecast"]
    assert forecast["finish_p50_unix_s"] == pytest.approx(last.unix_s, abs=0.01 * took_s)
    assert forecast["remaining_low_s"] < 0.9 * took_s < forecast["remaining_high_s"]


def test_the_report_has_rates_ranks_and_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = imported(tmp_path, log_text(300, seed=1)[0], "--device", "NVIDIA A100-SXM4-80GB")
    capsys.readouterr()
    assert main(["report", str(out)]) == 0
    text = capsys.readouterr().out
    assert "64 x A100" in text
    assert "Problem" not in text
    # 128 samples of 2,048 tokens in 2 s
    assert "131,000 tokens/s" in text


def test_two_logs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for home, factor in ((one, 1.0), (other, 1.3)):
        home.mkdir()
        imported(home, log_text(600, seed=2, factor=factor)[0])
    value = answer(capsys, "diff", str(one / "out"), str(other / "out"))
    assert value["time_frac"] == pytest.approx(0.3, abs=0.01)
    assert value["low_frac"] > 0.1


def test_the_answer_is_json_alone_and_any_name_is_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "my run (2).log", tmp_path / "out"
    path.write_text(log_text(300, seed=4)[0])
    value = answer(capsys, "import", "log", str(path), "--out", str(out))
    run_id = value["written"][0]["run_id"]
    assert (out / "runs" / run_id).is_dir() and " " not in run_id


def test_a_log_that_grows_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """epfLLM/Megatron-LLM issues 11 and 22: 11.1 s at iteration 5, 14.6 at 10."""
    lines = [
        f" iteration {at:8d}/    2000 | elapsed time per iteration (ms): {ms} | lm loss: 1.8 |"
        for at, ms in ((5, 11075.6), (10, 14642.7))
    ]
    out = imported(tmp_path, "\n".join(lines))
    assert "slower: 11.076 s up to 5, 14.643 s from 10" in capsys.readouterr().err
    forecast = answer(capsys, "report", str(out))["forecast"]
    low_s, high_s = forecast["remaining_low_s"], forecast["remaining_high_s"]
    # Either time may go on.
    assert low_s < 1990 * 11.08 and high_s > 1990 * 14.64
