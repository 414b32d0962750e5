"""House rules that a reader relies on: one direction of imports, a pure core, whole packages."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "calib": {"calib"},
    "hooks": {"hooks", "calib"},
    "launch": {"launch", "hooks", "calib", "recipes"},
}
AT_THE_ROOT = {"__version__", "_forerun_autoload"}
FORBIDDEN_IN_CALIB = {
    "torch",
    "megatron",
    "wandb",
    "os",
    "time",
    "socket",
    "subprocess",
    "random",
    "pickle",
    "rich",
    "urllib",
    "datetime",
}
STORES = {"samples/store.py", "samples/files.py"}
ALLOWED_IN = {"datetime": {"advice/transcript.py", "advice/forecast.py"}}


def modules(room: str) -> Iterator[Path]:
    yield from sorted((ROOT / room).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(dotted name from the root, is our own) for every import in the file."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
                names = [node.module] if node.module else [alias.name for alias in node.names]
                yield from ((".".join((*base, name)), True) for name in names)
            else:
                yield node.module or "", False


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_point_one_way(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(room)
        for name, is_own in imports(path)
        if (is_own and name.split(".")[0] not in MAY_IMPORT[room] | AT_THE_ROOT)
        or name.split(".")[0] == "forerun"
    ]
    assert not wrong


def test_the_core_is_pure() -> None:
    wrong = []
    for path in modules("calib"):
        inside = path.relative_to(ROOT / "calib").as_posix()
        for name, is_own in imports(path):
            top = name.split(".")[0]
            if is_own or top not in FORBIDDEN_IN_CALIB:
                continue
            if top == "os" and inside in STORES:
                continue
            if inside in ALLOWED_IN.get(top, set()):
                continue
            wrong.append(f"{inside} imports {name}")
    assert not wrong


def test_only_the_store_touches_files() -> None:
    touching = {"open", "read_text", "write_text", "read_bytes", "write_bytes", "mkdir", "unlink"}
    wrong = []
    for path in modules("calib"):
        if path.relative_to(ROOT / "calib").as_posix() in STORES:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                func = node.func
                name = func.id if isinstance(func, ast.Name) else getattr(func, "attr", "")
                if name in touching:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {name}")
    assert not wrong


def test_importing_the_facade_loads_nothing_heavy() -> None:
    code = (
        "import sys, forerun; "
        "print(sorted(set(sys.modules) & {'torch', 'numpy', 'pandas', 'wandb', 'megatron'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_folder_with_code_is_a_listed_package() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    found = {"forerun"} | {
        "forerun." + ".".join(path.parent.relative_to(ROOT).parts)
        for room in (*MAY_IMPORT, "recipes")
        for path in (ROOT / room).rglob("__init__.py")
    }
    assert listed == found


def test_no_file_outgrows_its_name() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for room in (*MAY_IMPORT, "recipes")
        for path in modules(room)
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert not long
