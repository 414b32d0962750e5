"""Options that a program lacks, read from real modules and from Megatron's namespace."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from forerun.calib.arguments.taken_options import (
    LAYOUT_OPTIONS,
    TRAINER_OPTIONS,
    TRANSFORMER_ENGINE,
)
from forerun.hooks.process import launch_note
from forerun.hooks.process.launch_note import absent_features

CORE = {"megatron.core": ModuleType("megatron.core"), TRANSFORMER_ENGINE: ModuleType("te")}
MICRO, TENSOR = "--micro-batch-size", "--tensor-model-parallel-size"
Imported = Callable[[Path, str], ModuleType]


@pytest.fixture
def imported() -> Imported:
    """Writes a module that names an option, and imports it."""

    def load(path: Path, option: str) -> ModuleType:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"OPTION = {option!r}\n")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_the_script_and_its_own_modules_are_read(tmp_path: Path, imported: Imported) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"parser.add_argument({MICRO!r})\n")
    user_module = imported(tmp_path / "more.py", TENSOR)
    installed = imported(tmp_path / "site-packages" / "other.py", "--context-parallel-size")
    core = imported(tmp_path / "megatron" / "core.py", "--recompute-modules")
    modules = {**CORE, "more": user_module, "other": installed, "megatron.part": core}
    assert set(absent_features(str(script), modules)) == LAYOUT_OPTIONS.keys() - {MICRO, TENSOR}
    assert set(absent_features(str(script), CORE)) == LAYOUT_OPTIONS.keys() - {MICRO}


def test_only_what_runs_on_megatron_is_asked(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(repr(MICRO))
    assert absent_features(str(script), {}) == ()
    assert absent_features(str(script), {**CORE, "megatron.bridge": ModuleType("b")}) == ()
    assert absent_features(str(script), {"megatron.core": CORE["megatron.core"]})[-1] == (
        TRANSFORMER_ENGINE
    )


def test_megatrons_namespace_comes_first(tmp_path: Path) -> None:
    global_vars = ModuleType("megatron.training.global_vars")
    modules = {**CORE, global_vars.__name__: global_vars}
    script = tmp_path / "train.py"
    script.write_text(repr(MICRO))
    names = dict.fromkeys(LAYOUT_OPTIONS.values())
    del names["recompute_modules"]
    vars(global_vars)["_GLOBAL_ARGS"] = Namespace(**names)
    assert absent_features(str(script), modules) == ("--recompute-modules",)
    vars(global_vars)["_GLOBAL_ARGS"] = None
    assert set(absent_features(str(script), modules)) == LAYOUT_OPTIONS.keys() - {MICRO}


@pytest.mark.parametrize("program", ["", "not-there.py", "-c"])
def test_a_program_that_cannot_be_read_is_not_known(program: str) -> None:
    assert absent_features(program, CORE) == ()


def test_what_is_too_long_is_not_judged_by_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(repr(MICRO) + "\n" * 100)
    monkeypatch.setattr(launch_note, "_MOST_TEXT_NBYTES", 100)
    assert absent_features(str(script), CORE) == ()


def test_a_lazy_module_stays_unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "later.py").write_text("raise SystemExit('loaded')\n")
    script = tmp_path / "train.py"
    script.write_text(repr(MICRO))
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = importlib.util.find_spec("later")
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "later", module)
    spec.loader.exec_module(module)
    assert set(absent_features(str(script), {**CORE, "later": module})) == LAYOUT_OPTIONS.keys() - {
        MICRO
    }


def test_a_trainers_script_takes_what_its_sources_name(tmp_path: Path) -> None:
    script, trainer = tmp_path / "train.py", {"transformers.trainer": ModuleType("t")}
    script.write_text('parser.add_argument("--max-steps")\nparser.add_argument("--fsdp")\n')
    assert absent_features(str(script), trainer) == TRAINER_OPTIONS[:-1]
    script.write_text("(arguments,) = HfArgumentParser(TrainingArguments).parse_args()\n")
    assert absent_features(str(script), trainer) == ()
