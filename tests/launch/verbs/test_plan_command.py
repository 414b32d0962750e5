"""``plan`` and ``predict`` as a shell sees them: short names, several plans, reasons."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from golden_copies import golden_copy
from json_schema import check

from forerun.launch.cli import ExitCode, main
from forerun.launch.verbs.arguments import ANSWERS

GOLDEN = golden_copy("cpu_dp2")
Out = pytest.CaptureFixture[str]


def answer(capsys: Out, verb: str, *words: str) -> dict[str, Any]:
    assert main([verb, str(GOLDEN), "--json", *words]) == ExitCode.ANSWER
    return json.loads(capsys.readouterr().out)


def test_short_names_predict_what_megatrons_own_predict(capsys: Out) -> None:
    short = answer(capsys, "predict", *["--tp", "2", "--mbs", "4", "--recompute", "full"])
    long = answer(
        capsys,
        "predict",
        *("--tensor-model-parallel-size", "2", "--micro-batch-size", "4"),
        *("--recompute-granularity", "full", "--recompute-method", "uniform"),
        *("--recompute-num-layers", "1"),
    )
    assert short == long and (short["tp"], short["recompute"]) == (2, "full")


def test_the_runs_own_device_is_the_run_itself(capsys: Out) -> None:
    plain, named = (
        answer(capsys, "predict", "--tp", "2", *more) for more in ((), ("--device", "cpu"))
    )
    assert plain == named
    other = answer(capsys, "predict", "--tp", "2", "--device", "H100")
    assert other["step_time_s"] < plain["step_time_s"]
    # Nothing was timed there, and what a CPU took says nothing of it.
    assert {name for name, frac in other["source_frac"].items() if frac} == {"prior"}


RATIOS = ("time_frac", "time_frac_low", "time_frac_high", "log_ratio_sigma")


@pytest.mark.parametrize(
    ("words", "is_comparable"),
    [
        (("--tp", "2"), True),
        (("--gpus", "8"), True),
        (("--bf16",), True),
        (("--gbs", "32"), False),
        (("--seq", "64"), False),
        (("--num-layers", "4"), False),
        (("--device", "H100"), False),
    ],
)
def test_a_step_is_compared_with_one_that_does_the_same_work_alone(
    words: tuple[str, ...], is_comparable: bool, capsys: Out
) -> None:
    result = answer(capsys, "predict", *words)
    assert [result[name] is not None for name in RATIOS] == [is_comparable] * len(RATIOS)
    check(result, json.loads(ANSWERS.read_text()))


@pytest.mark.parametrize(
    ("words", "is_comparable"),
    [
        ((), True),
        (("--gpus", "4"), True),
        (("--gpus", "4", "--gbs", "32"), False),
        (("--seq", "64"), False),
        (("--device", "H100"), False),
    ],
)
def test_rows_of_other_work_have_no_percentage(
    words: tuple[str, ...], is_comparable: bool, capsys: Out
) -> None:
    result = answer(capsys, "plan", *words)
    rows = [result["own"], *result["candidates"]]
    assert len(rows) > 1
    assert {row[name] is not None for row in rows for name in RATIOS} == {is_comparable}
    check(result, json.loads(ANSWERS.read_text()))
    # Layouts that fit come in the order of their step times.
    times = [c["step_time_s"] for c in result["candidates"] if c["verdict"] == "fits"]
    assert is_comparable or times == sorted(times)


def test_a_model_that_was_never_saved_needs_no_converter(tmp_path: Path, capsys: Out) -> None:
    """The run's checkpoints are of its own model, whatever its device and batch."""
    file = tmp_path / "config.json"
    llama = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 512}
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 256}
    file.write_text(json.dumps({**llama, **sizes, "dtype": "bfloat16"}))
    outputs = {}
    for name, more in (("other", ["--config", str(file)]), ("own", [])):
        words = ["plan", str(GOLDEN), "--gpus", "4", "--device", "H100", *more]
        assert main([*words, "--keep", "zero=1"]) == ExitCode.ANSWER
        outputs[name] = capsys.readouterr().out
    assert "converter" in outputs["own"] and "converter" not in outputs["other"]


@pytest.mark.slow
def test_the_rest_of_a_run_that_goes_on_is_told_in_each_layout(capsys: Out, tmp_path: Path) -> None:
    home = tmp_path / "run"
    shutil.copytree(GOLDEN, home)
    assert answer(capsys, "plan")["own"]["rest"] is None
    run_id = answer(capsys, "plan")["run_id"]
    forecast = {"run_id": run_id, "remaining_s": 7200.0, "now_unix_s": 1.7e9, "step_time_s": 0.1}
    (home / "forecast.json").write_text(json.dumps(forecast))
    words = ["plan", str(home), "--price-per-gpu-hour", "3"]
    assert main([*words, "--json"]) == ExitCode.ANSWER
    result = json.loads(capsys.readouterr().out)
    check(result, json.loads(ANSWERS.read_text()))
    remaining_run = result["own"]["rest"]
    assert remaining_run["remaining_s"] == pytest.approx(7200)
    assert remaining_run["gpu_hours"] == pytest.approx(4) and remaining_run[
        "cost"
    ] == pytest.approx(12)
    assert remaining_run["finish_unix_s"] == pytest.approx(1.7e9 + 7200)
    for one in result["candidates"]:
        restart_s = one["rest"]["remaining_s"] - 7200 * (1 + one["time_frac"])
        assert restart_s == pytest.approx(600)
    assert main(words) == ExitCode.ANSWER
    assert "GPU-hours left" in capsys.readouterr().out
