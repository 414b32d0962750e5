"""What the table of options says of Megatron-LM checkouts: modelled, without effect, not modelled.

    python benchmarks/option_table.py CLONE [CLONE ...]

Each checkout's own parser is built and read, on a CPU; options that the table does not know are
listed, and the exit code is 1 where there are any.  Checkouts of 0.19 and later want Python 3.12 or
typing_extensions.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from forerun.benchmarks.markdown_text import markdown_table
from forerun.calib.arguments.megatron_options import (
    ASIDE,
    DERIVED,
    LEFT_OUT,
    MODELLED,
    SPELLED,
    SWITCHED_OFF,
    is_known,
)

KINDS = ("modelled", "no effect", "beside the step", "not modelled", "unknown")


def main() -> int:
    """Print a row for each checkout; 1 where an option is unknown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("clones", type=Path, nargs="+", metavar="CLONE")
    parser.add_argument("--read", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        print(json.dumps(list(_options(args.clones[0]))))
        return 0
    rows, unknown = [], set()
    for clone in args.clones:
        found = {option: kind_of(option) for option in options_of(clone)}
        counts = Counter(found.values())
        rows.append([clone.name, str(len(found)), *(str(counts[kind]) for kind in KINDS)])
        unknown |= {option for option, kind in found.items() if kind == "unknown"}
    print(markdown_table(["checkout", "options", *KINDS], rows))
    print(f"\nUnknown: {', '.join(sorted(unknown)) or 'none'}.")
    return int(bool(unknown))


def kind_of(option: str) -> str:
    """What the table says of an option.

    >>> [kind_of(o) for o in ("--num-layers", "--lr", "--optimizer", "--timing-log-level", "--zz")]
    ['modelled', 'no effect', 'not modelled', 'beside the step', 'unknown']
    """
    plain = option.lstrip("-").replace("-", "_")
    name = SPELLED.get(plain, (plain, None))[0]
    if name in MODELLED | DERIVED:
        return "modelled"
    if name in ASIDE:
        return "beside the step"
    if name in LEFT_OUT or name in SWITCHED_OFF:
        return "not modelled"
    return "no effect" if is_known(plain) else "unknown"


def options_of(clone: Path) -> list[str]:
    """The long options of a checkout's parser, read in a process of its own."""
    command = [sys.executable, __file__, str(clone), "--read"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{clone}: its parser cannot be built: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _options(clone: Path) -> Iterator[str]:
    import typing_extensions

    from forerun.recipes.stand_in_cuda import install

    if not hasattr(typing, "override"):
        vars(typing)["override"] = typing_extensions.override
    install.install()
    with tempfile.TemporaryDirectory() as folder:
        _put_triton(Path(folder))
        sys.path.insert(0, str(clone.resolve()))
        arguments = importlib.import_module("megatron.training.arguments")
        parser = argparse.ArgumentParser(allow_abbrev=False)
        arguments.add_megatron_arguments(parser)
    for action in parser._actions:
        yield from (option for option in action.option_strings if option.startswith("--"))


def _put_triton(folder: Path) -> None:
    """Kernels in Triton are defined where modules of main are imported, and never run here."""
    import importlib.util

    importlib.import_module("torch._dynamo")
    importlib.import_module("torch._inductor.compile_fx")  # looks for Triton before there is one
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
