"""``plan`` and ``predict`` as a shell sees them: short names, several plans, reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.launch.cli import ExitCode, main

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
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


def test_help_lists_the_names_of_a_layout(capsys: Out) -> None:
    for verb in ("predict", "plan"):
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        out = capsys.readouterr().out
        assert "layout:" in out and "mbs" in out and "recompute" in out


def test_one_device_and_number_is_one_plan_and_several_are_many(capsys: Out) -> None:
    one = answer(capsys, "plan", "--gpus", "4")
    assert one["num_ranks"] == 4 and "plans" not in one
    several = answer(capsys, "plan", *["--gpus", "2..8", "--gbs", "xGPUS", "--top", "2"])
    plans = several["plans"]
    assert [found["num_ranks"] for found in plans] == [2, 4, 8]
    batches = [found["global_batch_size"] for found in plans]
    assert batches == [batches[0], 2 * batches[0], 4 * batches[0]]
    assert all(c["num_ranks"] == p["num_ranks"] for p in plans for c in p["candidates"])
    assert all(len(found["candidates"]) <= 2 for found in plans)


def test_devices_stand_beside_each_other(capsys: Out) -> None:
    words = ("--device", "H100,B200", "--price-per-gpu-hour", "2,4")
    found = answer(capsys, "plan", *words)["plans"]
    assert [one["device"] for one in found] == ["NVIDIA H100 80GB HBM3", "NVIDIA B200"]
    # What nothing was measured on has the memory of its kind.
    assert [one["memory_capacity_nbytes"] >> 30 for one in found] == [79, 179]
    for one, price in zip(found, (2.0, 4.0), strict=True):
        hours = one["gpu_hours_per_giga_token"]
        assert one["cost_per_giga_token"] == pytest.approx(price * hours, rel=1e-9)


def test_the_runs_own_device_is_the_run_itself(capsys: Out) -> None:
    plain, named = (
        answer(capsys, "predict", "--tp", "2", *more) for more in ((), ("--device", "cpu"))
    )
    assert plain == named
    other = answer(capsys, "predict", "--tp", "2", "--device", "H100")
    assert other["step_time_s"] < plain["step_time_s"]


def test_hours_of_gpus_for_tokens_are_those_of_the_best_step(capsys: Out) -> None:
    found = answer(capsys, "plan", "--gpus", "4", "--price-per-gpu-hour", "3")
    config = found["config"]
    best_s = min(c["step_time_s"] for c in found["candidates"])
    tokens = config["batch"]["global_batch_size"] * config["model"]["seq_length"]
    hours = 4 * best_s * 1e9 / tokens / 3600
    assert found["gpu_hours_per_giga_token"] == pytest.approx(hours, rel=1e-9)


def test_the_cheapest_number_of_gpus_is_told_in_full(capsys: Out) -> None:
    for objective, number in (("time", "8"), ("cost", "2")):
        words = ["plan", str(GOLDEN), "--gpus", "2,8", "--gbs", "xGPUS", "--objective", objective]
        assert main(words) == ExitCode.ANSWER
        out = capsys.readouterr().out
        assert "The best on each number of GPUs" in out
        assert f"Layouts on {number} GPUs" in out


def test_a_number_that_nothing_runs_on_does_not_hide_the_others(capsys: Out) -> None:
    words = ["--gpus", "2,7,4", "--keep", "tp=1"]
    plans = answer(capsys, "plan", *words)["plans"]
    assert [bool(one["candidates"]) for one in plans] == [True, False, True]
    assert plans[1]["gpu_hours_per_giga_token"] is None
    assert main(["plan", str(GOLDEN), *words]) == ExitCode.ANSWER
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["7", "none", "fits"] in rows
    assert main(["plan", str(GOLDEN), "--gpus", "7,11"]) == ExitCode.USAGE
    assert "choose a number of ranks" in capsys.readouterr().err


def test_only_what_is_kept_is_listed(capsys: Out) -> None:
    found = answer(capsys, "plan", "--gpus", "4", "--keep", "tp=2,recompute=none|full")
    candidates = found["candidates"]
    assert candidates
    assert {(c["tp"], c["recompute"]) for c in candidates} <= {(2, "none"), (2, "full")}


def test_why_tells_what_is_in_the_way(capsys: Out) -> None:
    assert answer(capsys, "plan")["why"] is None
    found = answer(capsys, "plan", "--why", "tp=64")["why"]
    assert found["num_layouts"] == 0 and "do not split over tp 64" in found["text"]
    slower = answer(capsys, "plan", "--gpus", "4", "--why", "pp=2")["why"]
    assert slower["num_layouts"] > 0 and slower["best"] is not None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("plan --keep tp=64", "--why tp=64 tells"),
        ("plan --device B20", "did you mean B200"),
        ("predict --device B20", "did you mean B200"),
        ("predict --tpp 2", "nearest: --tp"),
        ("plan --gpus 7 --gbs 16", ""),
    ],
)
def test_what_cannot_be_is_one_line(words: str, told: str, capsys: Out) -> None:
    verb, *rest = words.split()
    code = main([verb, str(GOLDEN), *rest])
    out, err = capsys.readouterr()
    if not told:
        assert code in (ExitCode.ANSWER, ExitCode.USAGE)
        return
    assert code == ExitCode.USAGE and not out
    assert told in err and err.splitlines()[-1].startswith("forerun: ")
