"""Which golden answer notices each chosen number of the models, moved by half of its size.

    python benchmarks/scoring/moved_constants.py [--only TEXT] [--jobs 1]

Each number within a constant of ``chosen_constants.py`` is moved alone where it is written (a count
by at least one), in a process that has imported nothing of the package; figures and answers of
``golden_answers.py``, which tests hold, are asked until one differs.  The exit code is 1 if nothing
notices a number.
"""

from __future__ import annotations

import argparse
import ast
import importlib.machinery
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CALIB = Path(__file__).parents[2] / "calib"
UNNOTICED = "-"
ASKED = (
    *(
        "h200_larger",
        "h200_running",
        "h200_like",
        "h200_plan",
        "h200_devices",
        "h200_records_report",
    ),
    *("nowhere_moe", "nowhere_long", "nowhere_predict", "nowhere_amd", "nowhere_hf"),
    *("nowhere_offload", "nowhere_latent", "cpu_larger", "cpu_running", "ep2_larger", "ep2_also"),
    *("table_predict", "mixed8_like", "mixed8_plan"),
)
"""Questions asked after the figures of a number's room, quickest first."""
OF_ROOM = {
    "network": ("links", "curves", "coll"),
    "fit": ("drawn", "ops"),
    "regressors": ("drawn", "ops"),
    "steps": ("steps",),
}
"""Beginnings of the names of figures that are asked first, by room."""


def main() -> int:
    """Print a line for each number: where it is, what it was moved to, what noticed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="constants with this text")
    parser.add_argument("--jobs", type=int, default=1, help="numbers at once (1)")
    parser.add_argument(
        "--one", nargs=3, metavar=("MODULE", "NAME", "INDEX"), help="in this process"
    )
    arguments = parser.parse_args()
    if arguments.one:
        module, name, index = arguments.one
        print(first_notice(module, name, int(index)))
        return 0
    found = [one for one in moved_numbers() if arguments.only in ".".join(one[:2])]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        notices = pool.map(lambda one: notice(*one[:3]), found)
        unnoticed = []
        for (module, name, index, text), seen in zip(found, notices, strict=True):
            print(f"{module}.{name}[{index}] {text}: {seen}", flush=True)
            unnoticed += [f"{module}.{name}[{index}]"] * (seen == UNNOTICED)
    print(f"{len(found) - len(unnoticed)} of {len(found)} are noticed", *unnoticed, sep="\n  ")
    return 1 if unnoticed else 0


def moved_numbers() -> Iterator[tuple[str, str, int, str]]:
    """Yield module, name, index and the move of each number within the chosen constants."""
    from forerun.benchmarks.scoring.chosen_constants import chosen

    for module, name in dict.fromkeys(chosen(CALIB)):
        tree = ast.parse(_path(module).read_text(encoding="utf-8"))
        for index, node in enumerate(_numbers(tree, name)):
            yield module, name, index, f"{node.value} -> {_moved(node.value)}"


def notice(module: str, name: str, index: int) -> str:
    """Return the first question whose answer differs with a number moved, in its own process."""
    command = [sys.executable, __file__, "--one", module, name, str(index)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"error: {done.stderr.strip().splitlines()[-1:]}"
    return done.stdout.strip().splitlines()[-1]


def first_notice(module: str, constant: str, index: int) -> str:
    """Return the first question whose answer differs with a number moved; ``-`` if none does."""
    sys.meta_path.insert(0, _Mover(f"forerun.calib.{module}", constant, index))
    from forerun.benchmarks import golden_answers as golden

    of_room = [name for name in golden.FIGURES if name.startswith(OF_ROOM[module.split(".")[0]])]
    others = [name for name in golden.FIGURES if name not in of_room]
    with tempfile.TemporaryDirectory() as home, golden.at_home(Path(home)):
        golden.make_directories(Path(home), packed=("quick", "ep2", "tp2", "mixed8"))
        for name in (*of_room, *ASKED, *others):
            if name in golden.QUESTIONS:
                stored, answer = name, golden.ask(golden.QUESTIONS[name])
            else:
                stored, answer = f"figures_{name}", golden.figures(name)
            if golden.answer_differences(stored, answer):
                return stored
    return UNNOTICED


def _path(module: str) -> Path:
    return CALIB / f"{module.replace('.', '/')}.py"


def _moved(value: float) -> float:
    """Return a number moved by half of its size: a count by at least one."""
    if isinstance(value, int):
        return value + max(1, abs(value) // 2)
    return 1.5 * value if value else 0.1


def _numbers(tree: ast.Module, name: str) -> list[ast.Constant]:
    """Return the numbers in what is assigned to a name."""
    for node in tree.body:
        targets: list[Any] = getattr(node, "targets", [getattr(node, "target", None)])
        names = [one for target in targets if target for one in ast.walk(target)]
        if any(isinstance(one, ast.Name) and one.id == name for one in names):
            return [
                one
                for one in ast.walk(node.value)  # type: ignore[attr-defined]
                if isinstance(one, ast.Constant) and type(one.value) in (int, float)
            ]
    return []


class _Mover(importlib.machinery.SourceFileLoader):
    """Finder and loader of one module, with one number moved."""

    def __init__(self, fullname: str, name: str, index: int) -> None:
        super().__init__(fullname, str(_path(fullname.removeprefix("forerun.calib."))))
        self._constant, self._index = name, index

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return a spec with this loader for the one module."""
        if fullname != self.name:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=self.path)

    def get_code(self, fullname: str) -> Any:
        """Return the code of the module with the number moved; nothing is cached."""
        tree = ast.parse(Path(self.path).read_text(encoding="utf-8"))
        node = _numbers(tree, self._constant)[self._index]
        node.value = _moved(node.value)  # type: ignore[arg-type]
        return compile(tree, self.path, "exec")


if __name__ == "__main__":
    sys.exit(main())
