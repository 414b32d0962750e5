"""The lint of a launch: silent where all is well, and after its own remedies."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
from lint_cases import CASES, CLEAN, DENSE, GPU, launch_of, remedied

from forerun.calib.arguments.taken_options import TRANSFORMER_ENGINE
from forerun.calib.lint.linter import RULES, UNASKED, lint
from forerun.calib.lint.rule import Harm

MODEL_RULES = ("eval-interval", "save-interval")
"""Rules that have nothing to say without a model."""
NAMES = [rule.name for rule in RULES if rule.name not in MODEL_RULES]


def remedies(words: list[str], device: str = GPU) -> dict[str, str]:
    """Return the remedy of each flaw, by rule."""
    launch = launch_of(words, device=device)
    return {flaw.rule.name: flaw.remedy.instead for flaw in lint(launch).flaws}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_launch_has_no_flaw(name: str) -> None:
    assert remedies(shlex.split(CLEAN[name])) == {}


def test_every_rule_has_a_case_and_a_name_of_its_own() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert {*NAMES, *MODEL_RULES} == set(CASES)


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_speaks_and_is_silent_after_its_remedy(name: str) -> None:
    case = CASES[name]
    flaws = {flaw.rule.name: flaw for flaw in lint(case.launch).flaws}
    assert name in flaws
    remedy = flaws[name].remedy
    after = remedied(case.words, remedy)
    assert name not in remedies(after, case.device)
    if remedy.layout is not None:  # what the model is asked for is what the words then mean
        assert launch_of(after, device=case.device).config == remedy.layout


@pytest.mark.parametrize("name", NAMES)
def test_all_remedies_together_leave_nothing(name: str) -> None:
    words, device = CASES[name].words, CASES[name].device
    for _ in range(4):
        flaws = lint(launch_of(words, device=device)).flaws
        for flaw in flaws:
            words = remedied(words, flaw.remedy)
    assert not lint(launch_of(words, device=device)).flaws


@pytest.mark.parametrize("name", NAMES)
def test_what_the_program_does_not_take_is_not_offered(name: str) -> None:
    launch = CASES[name].launch
    flaws = {flaw.rule.name: flaw for flaw in lint(launch).flaws}
    put = [phrase[0] for phrase in flaws[name].remedy.put]
    absent = replace(launch.config, absent=tuple(put), program="t.py")
    repeated = lint(replace(launch, config=absent))
    assert not put or name not in {flaw.rule.name for flaw in repeated.flaws}


def test_without_a_model_no_number_is_made_up() -> None:
    for case in CASES.values():
        for flaw in lint(case.launch).flaws:
            assert flaw.gain is None and flaw.unpriced == (flaw.rule.unpriced or UNASKED)


def test_without_the_engine_nothing_of_it_is_offered() -> None:
    words = CASES["tp-comm-overlap"].words
    launch = launch_of(words)
    bare = replace(launch.config, absent=(TRANSFORMER_ENGINE,), program="t.py")
    assert not lint(replace(launch, config=bare)).flaws


def test_a_loop_of_ones_own_is_asked_for_no_option() -> None:
    words = ["NCCL_DEBUG=INFO", *CASES["log-interval"].words]
    launch = launch_of(words)
    custom = replace(launch.config, framework="PyTorch 2.13")
    assert [f.rule.name for f in lint(replace(launch, config=custom)).flaws] == []
    debugged = replace(launch, config=custom, variables={"NCCL_DEBUG": "INFO"})
    assert [f.rule.name for f in lint(debugged).flaws] == ["NCCL_DEBUG"]


def test_on_a_cpu_nothing_of_gpus_is_said() -> None:
    worse = "CUDA_LAUNCH_BLOCKING=1 " + DENSE.replace("--manual-gc ", "--log-interval 1 ")
    assert not lint(launch_of(shlex.split(worse), device="cpu")).flaws


@pytest.mark.parametrize("front", ["A=1 NCCL_DEBUG=INFO srun", "srun env NCCL_DEBUG=INFO", "env"])
def test_variables_stand_in_front_or_behind_env(front: str) -> None:
    words = shlex.split(DENSE)[2:]
    launch = launch_of([*front.split(), *words])
    assert launch.variables.get("NCCL_DEBUG") == (None if front == "env" else "INFO")
    assert launch.config == launch_of(words).config


def test_values_of_options_are_no_variables() -> None:
    words = ["torchrun", "--rdzv-conf", "NCCL_DEBUG=INFO", *shlex.split(DENSE)[3:]]
    assert launch_of(words).variables == {}


def test_flaws_stand_in_the_order_of_their_harm() -> None:
    words = CASES["timing-log-level"].words
    words = ["CUDA_DEVICE_MAX_CONNECTIONS=8", *words[1:], "--log-params-norm"]
    harms = [flaw.rule.harm for flaw in lint(launch_of(words)).flaws]
    assert harms == [Harm.DISTORTS, Harm.WASTES, Harm.RISKS]


def test_blackwell_needs_no_single_queue() -> None:
    words = CASES["CUDA_DEVICE_MAX_CONNECTIONS"].words
    assert lint(launch_of(words, device=GPU)).flaws
    assert not lint(launch_of(words, device="NVIDIA B200")).flaws
