"""Which options a program takes: against parsers of argparse, and Megatron itself."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from every_layout import every_layout

from forerun.calib.arguments.megatron_args import options, rewrite_command
from forerun.calib.arguments.taken_options import (
    LAYOUT_OPTIONS,
    NEEDS_ENGINE,
    TRANSFORMER_ENGINE,
    absent_options,
    options_in,
    unsupported_options_reason,
)
from forerun.calib.workload.config import Precision, Recompute, RunConfig

Layout = Callable[..., RunConfig]
RECIPES = Path(__file__).parents[3] / "recipes"
NAME_ERROR = """
import torch
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput, initialize_rng_tracker
from forerun.recipes.stand_in_cuda import install
install.install()
initialize_rng_tracker()
x = torch.ones(2, requires_grad=True)
try:
    CheckpointWithoutOutput().checkpoint(torch.sin, x)
except NameError as err:
    print("NameError", err)
"""


def test_every_option_that_a_layout_prints_is_in_the_table(layout: Layout) -> None:
    settings = {"precision": Precision.BF16, "device": "NVIDIA H100", "par": {"ranks_per_node": 4}}
    running = layout(dp=8, **settings)
    words = {
        word
        for config in every_layout(running, 8)
        for word in (*options(config), *rewrite_command((), config, running=running))
        if word.startswith("--")
    }
    assert "--use-megatron-fsdp" in words and "--pipeline-model-parallel-layout" in words
    assert words <= LAYOUT_OPTIONS.keys()


def test_a_namespace_tells_what_its_parser_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser of the recipe itself, as argparse has it."""
    monkeypatch.syspath_prepend(str(RECIPES))
    import gpt_arguments

    seen: list[argparse.ArgumentParser] = []
    parse = argparse.ArgumentParser.parse_args

    def noted(self: argparse.ArgumentParser, *args: object) -> argparse.Namespace:
        seen.append(self)
        return parse(self, [])

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", noted)
    names = vars(gpt_arguments.parse_args([]))
    taken = {name for action in seen[0]._actions for name in action.option_strings}
    assert options_in(names) == taken & LAYOUT_OPTIONS.keys()
    assert set(absent_options(taken)) == LAYOUT_OPTIONS.keys() - taken
    assert options_in({"learning_rate"}) == frozenset()


def test_a_namespace_has_what_its_parser_took() -> None:
    assert options_in(LAYOUT_OPTIONS.values()) == LAYOUT_OPTIONS.keys()
    assert options_in({"recompute_modules", "lr"}) == {"--recompute-modules"}


def test_what_differs_must_be_said_and_what_does_not_need_not(layout: Layout) -> None:
    running = layout(dp=2, program="t.py", absent=("--pipeline-model-parallel-size",))
    assert unsupported_options_reason(running, running) == ""
    assert unsupported_options_reason(layout(tp=2), running) == ""
    assert (
        unsupported_options_reason(layout(pp=2), running)
        == "t.py takes no --pipeline-model-parallel-size"
    )
    assert unsupported_options_reason(layout(pp=2), replace(running, absent=())) == ""
    piped = layout(pp=2, program="t.py", absent=running.absent)
    assert unsupported_options_reason(layout(pp=2, micro=4), piped) == ""


def test_a_library_that_is_not_there_is_asked_of_nothing_new(layout: Layout) -> None:
    running = layout(absent=(TRANSFORMER_ENGINE,))
    selective = {"recompute": Recompute.SELECTIVE}
    for name in ("core_attn", "mlp", *NEEDS_ENGINE):
        config = layout(recompute_modules=(name,), **selective)
        assert ("needs Transformer Engine" in unsupported_options_reason(config, running)) is (
            name in NEEDS_ENGINE
        )
        assert unsupported_options_reason(config, replace(config, absent=running.absent)) == ""


@pytest.mark.slow
def test_megatron_drops_no_output_without_transformer_engine() -> None:
    """If this fails, a release has mended it: ``NEEDS_ENGINE`` is for those before it."""
    pytest.importorskip("megatron")
    done = subprocess.run([sys.executable, "-c", NAME_ERROR], capture_output=True, text=True)
    assert "NameError name 'FP8GlobalStateManager'" in done.stdout, done.stderr[-2000:]
