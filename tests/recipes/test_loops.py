"""The loops that a user copies, as two ranks on the CPU: each is seen, described and answered.

That a recipe starts as its page says, frameworks and all, only a launch of it shows.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from launched import Launch

from forerun.calib.layers.blocks import chunk_blocks
from forerun.calib.records.record_kinds import CoverageRecord, StepRecord
from forerun.calib.samples.store import read_run
from forerun.calib.workload.config import Sharding

pytest.importorskip("torch")
RECIPES = Path(__file__).parents[2] / "recipes"
STEPS = 60
LOOPS = {
    "hf_trainer": ("transformers", "accelerate"),
    "lightning_loop": ("lightning", "transformers"),
    "fsdp2_loop": ("transformers",),
    "own_loop": (),
}
"""Packages that each recipe needs besides torch."""
SAYS_NO_END = "fsdp2_loop"
"""Nothing in such a loop says how long it is."""


def launch(name: str, directory: Path, *words: str, **environ: str) -> str:
    """Return the output of two ranks."""
    command = ("--standalone", "--nproc-per-node", 2, RECIPES / f"{name}.py", *words)
    variables = {"WANDB_MODE": "disabled", **environ}
    return Launch(directory, *command, num_workers=2, **variables).end_well().stdout


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_seen_described_and_answered(name: str, tmp_path: Path) -> None:
    for package in LOOPS[name]:
        pytest.importorskip(package)
    output = launch(name, tmp_path, *() if name == "own_loop" else ("--calibrate",))
    assert "[forerun] checked: " in output and "[forerun] report: " in output
    out = tmp_path / "forerun-out"
    assert (out / "latest" / "report.html").is_file()
    run = read_run(out)
    assert run.problems == () and sorted(run.records) == [0, 1]
    for records in run.records.values():
        coverage = [one for one in records if isinstance(one, CoverageRecord)]
        assert coverage and all(one.fired == one.installed for one in coverage)
        assert any(isinstance(one, StepRecord) and one.is_hooked for one in records)
    config = run.configs[0]
    model, par = config.model, config.parallelism
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (4, 128, 4)
    assert (model.seq_length, model.vocab_size) == (64, 256)
    assert par.dp == par.num_ranks == 2 and config.batch.micro_batch_size == 4
    assert (par.sharding is Sharding.WEIGHTS) == (name == "fsdp2_loop")
    assert config.num_microbatches == (2 if name in ("hf_trainer", "lightning_loop") else 1)
    decision = json.loads((out / "latest" / "decision.json").read_text(encoding="utf-8"))
    # Nothing is decided of a run whose end nobody has told.
    assert (decision["action"] == "abstain") == (name == SAYS_NO_END)
    if name != SAYS_NO_END:
        assert config.cadence.train_iters == STEPS
        forecast = json.loads((out / "latest" / "forecast.json").read_text(encoding="utf-8"))
        assert forecast["steps_done"] + forecast["steps_left"] == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_alike_without_us_and_on_the_stand_in(name: str, tmp_path: Path) -> None:
    """``FORERUN_DEVICE=cpu`` alone calibrates nothing, and a script believes in a GPU.

    A loop of one's own calibrates without a flag, so that it trains a third time, with us; a worker
    that has no flag is as if we were not installed: ``test_autoload.py``.
    """
    for package in LOOPS[name]:
        pytest.importorskip(package)
    length = {"fsdp2_loop": "--steps=20", "own_loop": "--steps=60"}.get(name, "--max-steps=20")
    environs: list[dict[str, str]] = [{"FORERUN_OFF": "1"}, {"FORERUN_DEVICE": "cpu"}]
    if name == "own_loop":
        environs.append({})
    printed = [launch(name, tmp_path, length, **environ) for environ in environs]
    if name != "own_loop":
        assert [text.count("[forerun]") for text in printed] == [0, 1]
        assert not (tmp_path / "forerun-out").exists()
    losses = [re.findall(r"(?:^step \d+: loss|'loss':) '?([\d.]+)", text, re.M) for text in printed]
    assert len(losses[0]) == {"lightning_loop": 0, "own_loop": 3}.get(name, 1)
    assert losses == losses[:1] * len(environs)


def test_the_described_model_has_the_parameters_of_the_real_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = loaded("own_loop", monkeypatch)
    config = recipe.run_config(STEPS, 2, "cpu")
    blocks = chunk_blocks(config, 0)
    described = sum(count * block.numel.dense for block, count in blocks)
    assert described == sum(weight.numel() for weight in recipe.Gpt().parameters())


def test_bridge_gets_the_words_that_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are those of Megatron-Bridge v0.3.1 to v0.6.0, which needs a GPU to be imported."""
    arguments: dict[str, Any] = {}

    def overridden(config: str, cli_overrides: list[str]) -> tuple[str, ...]:
        return (config, *cli_overrides)

    homes: dict[str, dict[str, object]] = {
        "recipes.llama": {"llama32_1b_pretrain_config": lambda: "recipe"},
        "training.gpt_step": {"forward_step": "forward step"},
        "training.pretrain": {"pretrain": lambda **given: arguments.update(given)},
        "training.utils.omegaconf_utils": {"process_config_with_overrides": overridden},
    }
    for home, names in homes.items():
        parts = ["megatron", "bridge", *home.split(".")]
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for name, value in names.items():
            monkeypatch.setattr(sys.modules[f"megatron.bridge.{home}"], name, value, raising=False)
    recipe = loaded("bridge", monkeypatch)
    words = ["model.tensor_model_parallel_size=2", "train.train_iters=10"]
    monkeypatch.setattr(sys, "argv", ["bridge.py", *words])
    recipe.main()
    assert arguments == {"config": ("recipe", *words), "forward_step_func": "forward step"}
