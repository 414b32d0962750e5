"""Coverage of Megatron-LM checkouts by the option table: modelled, no effect, not modelled.

    python benchmarks/option_table.py CLONE [CLONE ...]

Each checkout's own parser is built and read, on a CPU; options that the table does not know are
listed, and the exit code is 1 if there are any.  Then the launch lines of ``pretrain_gpt.py`` in
its functional tests and in its examples' scripts are predicted, on the ranks given by the recipes
of the tests (``tests/test_utils/recipes``), or on eight if not stated; reasons for lines without a
prediction are printed below.  Checkouts of 0.19 and later need Python 3.12 or typing_extensions.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from forerun.benchmarks.markdown_text import markdown_table
from forerun.calib.arguments import (
    ASIDE,
    DERIVED,
    MODELLED,
    SPELLED,
    SWITCHED_OFF,
    UNMODELLED_SETTINGS,
    Described,
    config_from_command,
    config_from_mapping,
    is_known,
)
from forerun.calib.errors import ForerunError
from forerun.launch.opened import OtherRun
from forerun.launch.options import inner_launch_line

SCRIPT = "pretrain_gpt.py"
_USUAL_RANKS = 8
KINDS = ("modelled", "no effect", "beside the step", "not modelled", "unknown")


def main() -> int:
    """Print a row for each checkout; return 1 if an option is unknown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("clones", type=Path, nargs="+", metavar="CLONE")
    parser.add_argument("--read", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        print(json.dumps(dict(_options(args.clones[0]))))
        return 0
    rows, unknown = [], set()
    for clone in args.clones:
        kind_by_option = {option: kind_of(option) for option in options_of(clone)}
        counts = Counter(kind_by_option.values())
        rows.append([clone.name, str(len(kind_by_option)), *(str(counts[kind]) for kind in KINDS)])
        unknown |= {option for option, kind in kind_by_option.items() if kind == "unknown"}
    print(markdown_table(["checkout", "options", *KINDS], rows))
    print(f"\nUnknown: {', '.join(sorted(unknown)) or 'none'}.\n")
    for clone in args.clones:
        _print_lines(clone)
    return int(bool(unknown))


def _print_lines(clone: Path) -> None:
    answers = [why_not(described) for described in (*_tests(clone), *_scripts(clone))]
    number = sum(not answer for answer in answers)
    print(f"{clone.name}: {number} of {len(answers)} launch lines have a number")
    for answer, count in Counter(filter(None, answers)).most_common():
        print(f"    {count}  {answer}")


def why_not(described: Callable[[], Described]) -> str:
    """Return why a line has no prediction; empty if it has one."""
    try:
        return OtherRun().open_names(described(), None).partition(", so there")[0]
    except ForerunError as err:
        return str(err)


def _tests(clone: Path) -> Iterator[Callable[[], Described]]:
    import yaml

    tests, launches = clone / "tests", _launches(clone)
    for model in ("gpt", "moe"):
        place = tests / "functional_tests" / "test_cases" / model
        for path in sorted(place.glob("*/model_config.yaml")):
            script, num_ranks = launches.get((model, path.parent.name), (SCRIPT, _USUAL_RANKS))
            value = yaml.safe_load(path.read_text(encoding="utf-8"))
            is_training = "--num-layers" in (value.get("MODEL_ARGS") or {})
            if is_training and script == SCRIPT and "inference" not in path.parent.name:
                yield partial(config_from_mapping, value, num_ranks=num_ranks)


def _launches(clone: Path) -> dict[tuple[str, str], tuple[str, int]]:
    """Return script and ranks of each functional test by model and name, preferably for H100."""
    import yaml

    launches: dict[tuple[str, str], tuple[str, int]] = {}
    for path in sorted((clone / "tests" / "test_utils" / "recipes").rglob("*.yaml"), reverse=True):
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
        spec = recipe.get("spec") or {}
        script = re.search(r"TRAINING_SCRIPT_PATH=([\w./]+)", str(spec.get("script")))
        for product in recipe.get("products") or () if script else ():
            for case in product.get("test_case") or ():
                num_ranks = int(spec["nodes"]) * int(spec["gpus"])
                key = (spec["model"], case)
                if "h100" in path.parts or key not in launches:
                    launches[key] = (script[1], num_ranks)
    return launches


def _scripts(clone: Path) -> Iterator[Callable[[], Described]]:
    for path in sorted((clone / "examples").rglob("*.sh")):
        if SCRIPT in path.read_text(encoding="utf-8", errors="replace"):
            yield partial(_of_script, path)


def _of_script(path: Path) -> Described:
    return config_from_command(inner_launch_line(["bash", str(path)]), num_ranks=_USUAL_RANKS)


def kind_of(option: str) -> str:
    """Return the table's category of an option.

    >>> [kind_of(o) for o in ("--num-layers", "--lr", "--optimizer", "--timing-log-level", "--zz")]
    ['modelled', 'no effect', 'not modelled', 'beside the step', 'unknown']
    """
    plain = option.lstrip("-").replace("-", "_")
    name = SPELLED.get(plain, (plain, None))[0]
    if name in MODELLED | DERIVED:
        return "modelled"
    if name in ASIDE:
        return "beside the step"
    if name in UNMODELLED_SETTINGS or name in SWITCHED_OFF:
        return "not modelled"
    return "no effect" if is_known(plain) else "unknown"


def options_of(clone: Path) -> list[str]:
    """Return the long options of a checkout's parser."""
    return [*samples_of(clone)]


def samples_of(clone: Path) -> dict[str, str]:
    """Return these options with a sample argument, "" for a switch; read in a child process."""
    command = [sys.executable, __file__, str(clone), "--read"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{clone}: its parser cannot be built: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _options(clone: Path) -> Iterator[tuple[str, str]]:
    import typing_extensions

    from forerun.recipes.stand_in_cuda import install

    if not hasattr(typing, "override"):
        setattr(typing, "override", typing_extensions.override)  # noqa: B010
    install.install()
    with tempfile.TemporaryDirectory() as folder:
        _put_triton(Path(folder))
        sys.path.insert(0, str(clone.resolve()))
        arguments = importlib.import_module("megatron.training.arguments")
        parser = argparse.ArgumentParser(allow_abbrev=False)
        arguments.add_megatron_arguments(parser)
    for action in parser._actions:
        word = "" if action.nargs == 0 else _word(action)
        yield from ((option, word) for option in action.option_strings if option[:2] == "--")


def _word(action: argparse.Action) -> str:
    usual = [action.default, *UNMODELLED_SETTINGS.get(action.dest, ())]
    others = [str(choice) for choice in action.choices or () if choice not in usual]
    return others[0] if others else {int: "2", float: "0.5"}.get(action.type, "x")


def _put_triton(folder: Path) -> None:
    """Stub Triton: modules of main define kernels at import, which never run here."""
    import importlib.util

    importlib.import_module("torch._dynamo")
    importlib.import_module("torch._inductor.compile_fx")  # looks for Triton: before the stub
    if importlib.util.find_spec("triton") is not None:
        return
    looked_for = importlib.import_module("torch.utils._triton")
    for name in dir(looked_for):
        if name.startswith("has_triton"):
            setattr(looked_for, name, lambda *_, **__: False)
    for place in ("triton", "triton/language"):
        (folder / place).mkdir()
        (folder / place / "__init__.py").write_text(_TRITON)
    sys.path.append(str(folder))


_TRITON = """
from unittest.mock import MagicMock

__version__ = "3.3.0"
jit = lambda function=None, **_: function or (lambda inner: inner)
autotune = heuristics = lambda *_, **__: lambda inner: inner

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()
"""


if __name__ == "__main__":
    sys.exit(main())
