"""Trainings of the pages run as they stand, on the CPU of this machine; long ones are cut short.

Only a real launch shows that a line of a page is one.  Lines that ``tests/recipes/test_loops.py``
launches word by word are not launched again here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launched import Launch
from page_commands import ROOT, Command, commands

pytestmark = pytest.mark.nightly

pytest.importorskip("torch")
PACKAGES = {"hf_trainer": ("transformers", "accelerate"), "lightning_loop": ("lightning",)}
"""Packages that a recipe needs besides torch and ``transformers``."""
SHORTER = {"200": "40"}
"""Iterations: a window and some steps after it show as much."""
LOOPS = {"lightning_loop": "--calibrate", "hf_trainer": "--calibrate", "own_loop": ""}
"""Arguments that ``test_loops.py`` adds to each recipe."""
LAUNCHED = {
    f"torchrun --standalone --nproc-per-node 2 recipes/{name}.py {more}".strip()
    for name, more in LOOPS.items()
}
LINES = [one for one in commands() if not one.needs and one.words[0] == "torchrun"]
TRAINED = [one for one in LINES if one.line not in LAUNCHED]


def test_what_is_launched_elsewhere_is_on_a_page() -> None:
    assert {one.line for one in LINES} > LAUNCHED


@pytest.mark.parametrize("one", [pytest.param(one, id=one.line) for one in TRAINED])
def test_a_training_of_a_page_is_calibrated(one: Command, tmp_path: Path) -> None:
    words = [SHORTER.get(word, word) for word in one.words[1:]]
    (recipe,) = re.findall(r"recipes/(\w+)\.py", one.line)
    for package in ("transformers", *PACKAGES.get(recipe, ())):
        pytest.importorskip(package)
    if recipe == "pretrain_gpt":
        pytest.importorskip("megatron.core")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    output = Launch(tmp_path, *words, num_workers=2, WANDB_MODE="disabled").end_well().stdout
    assert "[forerun] checked: " in output and "[forerun] report: " in output
    (page,) = tmp_path.glob("*/latest/report.html")
    assert page.with_name("decision.json").is_file()
