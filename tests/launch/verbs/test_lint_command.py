"""``forerun doctor`` of a launch: a run's own, another over its calibration, or words alone."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from golden_copies import golden_copy
from json_schema import check
from lint_cases import CASES, DENSE

from forerun.calib.arguments.megatron_values import as_options, layout_values, model_values
from forerun.launch.cli import ExitCode, main
from forerun.launch.known.machines import open_machine
from forerun.launch.verbs.arguments import FOLDER

GOLDEN = golden_copy("cpu_dp2")
SCHEMA = json.loads((FOLDER / "lint.schema.json").read_text("utf-8"))
WORSE = CASES["overlap-grad-reduce"].words
Out = pytest.CaptureFixture[str]


def answer(capsys: Out, *words: str) -> dict[str, Any]:
    assert main(["doctor", "--json", *words]) == ExitCode.ANSWER
    value = json.loads(capsys.readouterr().out)
    check(value, SCHEMA)
    return value


def rules(value: dict[str, Any]) -> dict[str, Any]:
    return {flaw["rule"]: flaw for flaw in value["flaws"]}


def test_another_command_is_asked_over_its_calibration(capsys: Out) -> None:
    """The run's own arguments in full; 1 % of its step is exposed, which no flaw is sold for."""
    config = open_machine(GOLDEN).running
    values = {**model_values(config), **layout_values(config)}
    values["vocab_size"] = values.pop("padded_vocab_size")
    words = [word for name, behind in as_options(values) for word in (name, *behind)]
    command = ["torchrun", "--nproc-per-node", "2", "t.py", *words, "--log-interval", "1"]
    result = rules(answer(capsys, str(GOLDEN), "--", *command))
    assert result == rules(answer(capsys, str(GOLDEN)))  # a CPU is not held up by a report
    assert "overlap-grad-reduce" not in result


@pytest.mark.parametrize("batch", [64, 512])
@pytest.mark.parametrize("switch", [(), ("--use-distributed-optimizer",)])
def test_a_remedy_gains_what_predict_gives_for_it(
    capsys: Out, batch: int, switch: tuple[str, ...]
) -> None:
    """An 8B over 64 GPUs, whose gradients are reduced with nothing beside them."""
    sizes = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192"
    words = f"--bf16 {sizes} --vocab-size 128256 --micro-batch-size 1 --global-batch-size {batch}"
    command = ["--", "torchrun", "--nproc-per-node", "8", "--nnodes", "8", "t.py", *words.split()]
    (flaw,) = [
        flaw
        for flaw in answer(capsys, "--device", "H100", *command, *switch)["flaws"]
        if flaw["rule"] == "overlap-grad-reduce"
    ]
    steps_s = []
    for option in ([], ["--overlap-grad-reduce"]):
        main(["predict", "--device", "H100", "--json", *option, *command, *switch])
        steps_s.append(json.loads(capsys.readouterr().out)["step_time_s"])
    assert flaw["gain"]["time_frac"] == pytest.approx(steps_s[1] / steps_s[0] - 1, rel=1e-9)


@pytest.mark.parametrize(("device", "is_reported"), [("V100", True), ("T4", True), ("A100", False)])
def test_bf16_before_ampere_is_the_first_finding(
    capsys: Out, device: str, is_reported: bool
) -> None:
    """Both take fp16 alone on tensor cores: eight times the rate of fp32 by their data sheets."""
    flaws = answer(capsys, "--device", device, "--", *shlex.split(DENSE))["flaws"]
    names = [flaw["rule"] for flaw in flaws]
    assert ("bf16-before-ampere" in names) is is_reported
    if is_reported:
        assert names[0] == "bf16-before-ampere" and flaws[0]["instead"].startswith("--fp16")
        assert -7 / 8 < flaws[0]["gain"]["time_frac"] < -0.1


def test_no_value_of_a_variable_is_shown_but_those_of_rules(capsys: Out) -> None:
    assert main(["doctor", "--json", "--", "HF_TOKEN=secret", *WORSE]) == ExitCode.ANSWER
    assert "secret" not in capsys.readouterr().out
