"""``forerun.load``: the verbs' answers as objects, which say the same and show themselves."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import forerun
from forerun.calib.records.iso_times import iso_time
from forerun.calib.workload.choices import NAMED_CHOICES
from forerun.launch.cli import ExitCode, main
from forerun.launch.opened.run import Run

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
Out = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, where the fit is kept."""
    there = tmp_path_factory.mktemp("opened") / "run"
    shutil.copytree(GOLDEN, there)
    return there


@pytest.fixture(scope="module")
def run(home: Path) -> Run:
    return forerun.load(home)


def answer_of(capsys: Out, verb: str, home: Path, *words: str) -> object:
    assert main([verb, str(home), *words, "--json"]) == ExitCode.ANSWER
    return json.loads(capsys.readouterr().out)


def as_read(answer: Any) -> object:
    return json.loads(json.dumps(answer.to_json()))


def test_predict_says_what_the_verb_says(run: Run, home: Path, capsys: Out) -> None:
    value = answer_of(capsys, "predict", home, "--tp", "2", "--mbs", "4", "--swiglu")
    assert as_read(run.predict({"swiglu": True}, tp=2, mbs=4)) == value
    assert as_read(run.predict(["--swiglu", "--mbs=4"], tp=2)) == value
    long = {"tensor_model_parallel_size": 2, "--micro-batch-size": 4, "swiglu": True}
    assert as_read(run.predict(long)) == value


def test_plan_says_what_the_verb_says(run: Run, home: Path, capsys: Out) -> None:
    assert as_read(run.plan()) == answer_of(capsys, "plan", home)
    words = ["--gpus", "2..8", "--gbs", "xGPUS", "--top", "2", "--keep", "tp=1|2"]
    plan_answer = run.plan(gpus=[2, 4, 8], global_batch_size="xGPUS", top=2, keep={"tp": (1, 2)})
    assert as_read(plan_answer) == answer_of(capsys, "plan", home, *words)
    words = ["--device", "H100,B200", "--price-per-gpu-hour", "2,4", "--top", "1"]
    plan_answer = run.plan(device=["H100", "B200"], price_per_gpu_hour=[2, 4], top=1)
    assert as_read(plan_answer) == answer_of(capsys, "plan", home, *words)


def test_explain_and_report_say_what_the_verbs_say(run: Run, home: Path, capsys: Out) -> None:
    assert as_read(run.explain("tp2", "running")) == answer_of(
        capsys, "explain", home, "tp2", "running"
    )
    first = run.plan().candidates[0]
    assert as_read(run.explain(first, run.config)) == as_read(run.explain(1, "running"))
    report = run.report()
    assert as_read(report) == answer_of(capsys, "report", home)
    assert report.is_stop == run.decision.is_stop
    advised = str(run.decision).partition(" (")[0]
    assert report.answer.advice.startswith(f"[forerun] {advised} (")
    assert (
        iso_time(run.forecast.finish_p50_unix_s) == (report.to_json()["forecast"]["finish_p50_iso"])
    )


def test_diff_says_what_the_verb_says(run: Run, home: Path, capsys: Out) -> None:
    assert main(["diff", str(home), str(home), "--json"]) == ExitCode.ANSWER
    assert as_read(run.diff(run)) == json.loads(capsys.readouterr().out)


def test_another_device_is_asked_as_the_verbs_ask(home: Path, capsys: Out) -> None:
    other = forerun.load(home, device="H100")
    value = answer_of(capsys, "predict", home, "--tp", "2", "--device", "H100")
    assert as_read(other.predict(tp=2)) == value
    assert other.plan(top=1).plans[0].device == "NVIDIA H100 80GB HBM3"


def test_what_is_printed_is_what_shows_itself(run: Run, home: Path, capsys: Out) -> None:
    for words, answer in (
        (["plan", "--top", "3"], run.plan(top=3)),
        (["plan", "--gpus", "2,4", "--gbs", "8"], run.plan(gpus="2,4", global_batch_size=8)),
        (["predict", "--tp", "2"], run.predict(tp=2)),
        (["report", "--full"], run.report()),
    ):
        verb, *rest = words
        assert main([verb, str(home), *rest]) == ExitCode.ANSWER
        printed = [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()]
        assert [line.rstrip() for line in str(answer).strip().splitlines()] == printed


def test_a_notebook_shows_tables(run: Run) -> None:
    page = ElementTree.fromstring(f"<div>{run.plan(top=3)._repr_html_()}</div>")
    (body,) = page.iter("tbody")
    assert len(body.findall("tr")) == 4
    for shown in (run, run.report(), run.explain("running")):
        ElementTree.fromstring(f"<div>{shown._repr_html_()}</div>")
        assert repr(shown)


def test_what_is_told_cannot_write_a_page(home: Path, tmp_path: Path) -> None:
    there = tmp_path / "<script>alert(1)</script>"
    shutil.copytree(home, there)
    assert "<script>" not in forerun.load(there)._repr_html_()


def test_an_answer_is_frozen(run: Run) -> None:
    for answer in (run, run.predict(), run.plan(), run.report()):
        with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
            answer.run_id = "another"  # type: ignore[misc]


def test_a_row_is_a_command_of_the_same_words(run: Run, home: Path, capsys: Out) -> None:
    value = answer_of(capsys, "plan", home, "--show", "2")
    assert isinstance(value, dict) and value.pop("script") is None
    assert as_read(run.plan().command(2)) == value
    with pytest.raises(forerun.ForerunError, match="99 is not a row"):
        run.plan().command(99)


def test_the_layout_has_every_short_name(run: Run) -> None:
    names = [one.name for one in NAMED_CHOICES]
    assert [*run.layout] == names and run.layout["dp"] == 2
    assert run.predict(**run.layout).layout.config == run.config


def test_plan_refuses_what_no_option_is_named(run: Run) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'gbs'"):
        run.plan(gbs=64)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tpp": 4}, "did you mean tp?"),
        ({"microbatch": 4}, "is not an axis of a layout"),
        ({"tp": 0}, "tp"),
        ({"tp": "two"}, "tp"),
        ({"options": "--tp 4"}, "give a list of words"),
        ({"options": {"tensor_model_parallel": 4}}, "is not an option of a layout"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    layout: dict[str, object], message: str, run: Run
) -> None:
    with pytest.raises(forerun.ForerunError, match=r"^[^\n]*$") as err:
        run.predict(**layout)  # type: ignore[arg-type]
    assert message in str(err.value)


def test_a_directory_without_a_run_is_refused_at_once(tmp_path: Path) -> None:
    for home in (tmp_path, tmp_path / "none"):
        with pytest.raises(forerun.ForerunError, match="--calibrate-dir"):
            forerun.load(home)


def loaded_by(code: str, names: Sequence[str]) -> list[str]:
    script = f"import sys\n{code}\nprint(*sorted(set(sys.modules) & set({list(names)!r})))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_nothing_is_imported_before_it_is_asked_for(home: Path) -> None:
    code = f"import forerun; run = forerun.load({str(home)!r})"
    heavy = ("numpy", "pandas", "scipy", "sklearn", "torch", "rich", "pyarrow")
    assert loaded_by(code, heavy) == []
    # An answer of a cached fit reads no table.
    forerun.load(home).predict(tp=2)
    assert loaded_by(f"{code}; run.predict(tp=2)", ("pandas", "sklearn", "torch", "rich")) == []
