"""House rules that a reader relies on: one direction of imports, a pure core, whole packages."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path

import pytest

import forerun

ROOT = Path(__file__).parent.parent
TOP = ("calib", "hooks", "launch", "recipes")
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
STORES = {"samples/store.py", "records/files.py"}
ALLOWED_IN = {"datetime": {"records/iso_times.py", "workload/run_options.py"}}


def modules(folder: str) -> Iterator[Path]:
    yield from sorted((ROOT / folder).rglob("*.py"))


def declared() -> list[str]:
    """The rooms of ARCHITECTURE.md, lowest first."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    return [line.split()[0] for line in text.split("```rooms\n")[1].split("```")[0].splitlines()]


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    """The declared room of a module; of a package's own ``__init__``, the package."""
    parts = module.split(".")
    return parts[0] if parts[0] == "recipes" else "/".join(parts[:2])


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(dotted name from the root, is our own) for every import in the file, at any depth."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
                start = ".".join((*base, node.module) if node.module else base)
                yield from ((f"{start}.{alias.name}", True) for alias in node.names)
            else:
                yield node.module or "", False


@cache
def arrows() -> dict[str, set[str]]:
    """Which of our modules each of them imports, also in functions and for types alone."""
    known = {dotted(path): path for layer in TOP for path in modules(layer)}
    result: dict[str, set[str]] = {}
    for name, path in known.items():
        imported = {other for other, is_ours in imports(path) if is_ours}
        modules_of = {o if o in known else o.rpartition(".")[0] for o in imported}
        result[name] = modules_of & known.keys() - {name}
    return result


def test_imports_point_down_the_declared_order() -> None:
    order = {layer: place for place, layer in enumerate(declared())}
    wrong = []
    for name, others in arrows().items():
        for other in others:
            if other not in TOP and order[layer_of(other)] > order[layer_of(name)]:
                wrong.append(f"{name} imports {other}")
    assert not wrong


def is_own(module: str) -> bool:
    """Whether a module's name begins with an underscore: it is its room's own."""
    return any(part.startswith("_") for part in module.split("."))


def test_rooms_import_only_public_modules_of_others() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in arrows().items()
        for other in others
        if is_own(other) and layer_of(other) != layer_of(name)
    ]
    assert not wrong


def named_in_tables() -> set[str]:
    """Names of modules, without folders, in strings of modules that look up leaves."""
    ours = [path for layer in TOP[:3] for path in modules(layer)]
    looking = [path for path in ours if any(n.startswith("leaves.") for n, _ in imports(path))]
    return {
        node.value.partition(":")[0].rpartition(".")[2]
        for path in looking
        for node in ast.walk(syntax(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_a_public_module_is_imported_by_another_room_or_is_a_leaf() -> None:
    by_others = {
        other
        for name, others in arrows().items()
        for other in others
        if layer_of(other) != layer_of(name)
    }
    by_root = {
        name.rpartition(".")[0]
        for path in ROOT.glob("*.py")
        for name, is_ours in imports(path)
        if is_ours
    }
    reached = by_others | by_root
    leaves = named_in_tables()
    wrong = [
        name
        for name in map(dotted, (p for layer in TOP[:3] for p in modules(layer)))
        if name.count(".") > 1 and not is_own(name) and name not in reached
        if name.rpartition(".")[2] not in leaves
    ]
    assert not wrong, "begin their names with an underscore"


def test_nothing_of_ours_is_imported_by_its_installed_name() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for folder in TOP[:3]
        for path in modules(folder)
        for name, is_ours in imports(path)
        if not is_ours and name.split(".")[0] == "forerun"
    ]
    assert not wrong


def shortest_circle(of: Mapping[str, Set[str]]) -> list[str]:
    """A shortest way from a module back to itself, with it at both ends; empty if there is none."""
    remaining = dict(of)
    while free := [name for name, others in remaining.items() if not others & remaining.keys()]:
        for name in free:
            del remaining[name]
    circles = filter(None, (_way_back(start, remaining) for start in sorted(remaining)))
    return min(circles, key=len, default=[])


def _way_back(start: str, of: Mapping[str, Set[str]]) -> list[str]:
    ways, seen = deque([[start]]), set[str]()
    while ways:
        way = ways.popleft()
        for other in sorted(of[way[-1]] & of.keys() - seen):
            if other == start:
                return [*way, start]
            seen.add(other)
            ways.append([*way, other])
    return []


def test_no_module_imports_itself_by_way_of_others() -> None:
    circle = shortest_circle(arrows())
    assert not circle, f"imports go in a circle: {' -> '.join(circle)}"


@pytest.mark.parametrize(
    ("of", "circle"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, ""),
        ({"a": {"b"}, "b": {"a"}}, "a b a"),
        # A long circle, a short one below it, and what only leads there.
        ({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}, "d e d"),
        ({"a": {"a", "b"}, "b": set()}, "a a"),
    ],
)
def test_a_circle_is_named_as_the_circle(of: dict[str, set[str]], circle: str) -> None:
    assert " ".join(shortest_circle(of)) == circle


def test_the_declared_rooms_are_those_that_exist() -> None:
    names = [dotted(path) for folder in TOP for path in modules(folder)]
    assert sorted(declared()) == sorted({layer_of(n) for n in names if n not in TOP[:3]})


def test_the_core_is_pure() -> None:
    wrong = []
    for path in modules("calib"):
        inside = path.relative_to(ROOT / "calib").as_posix()
        for name, is_ours in imports(path):
            top = name.split(".")[0]
            if is_ours or top not in FORBIDDEN_IN_CALIB:
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
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.Call):
                func = node.func
                name = func.id if isinstance(func, ast.Name) else getattr(func, "attr", "")
                if name in touching:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {name}")
    assert not wrong


ANYTHING_IN = {
    "answers": "JSON that is not yet said as such",
    "fit": "JSON that is not yet said as such",
    "importers": "values of traces that others wrote",
    "marks": "shapes of tensors, and values of JSON that are only then checked",
    "regressors": "an estimator of XGBoost, which may not be installed",
    "workload/argument_fields.py": "a field of a dataclass, of whatever type it is",
    "workload/run_options.py": "what a field of a dataclass holds by default",
}
"""Modules of calib whose public signatures may still say ``Any``, and what it stands for there."""


def says_any(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    args = node.args
    given = (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg)
    hints = [arg.annotation for arg in given if arg is not None] + [node.returns]
    named = (part for hint in hints if hint is not None for part in ast.walk(hint))
    return any(isinstance(part, ast.Name) and part.id == "Any" for part in named)


def public_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions of a module and methods of its classes without an underscore before their names."""
    for node in tree.body:
        inside = node.body if isinstance(node, ast.ClassDef) and node.name[0] != "_" else [node]
        for one in inside:
            is_function = isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and (one.name[0] != "_" or one.name == "__init__"):
                yield one


def test_public_signatures_of_the_core_say_what_they_take() -> None:
    wrong, unsaid = [], set(ANYTHING_IN)
    for path in modules("calib"):
        inside = path.relative_to(ROOT / "calib")
        places = {inside.as_posix(), inside.parts[0]}
        for node in public_functions(syntax(path)):
            if says_any(node):
                unsaid -= places
                if not places & ANYTHING_IN.keys():
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not wrong
    assert not unsaid, "say so no more"


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
    results = {"forerun"} | {
        "forerun." + ".".join(path.parent.relative_to(ROOT).parts)
        for folder in TOP
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert listed == results


@pytest.mark.parametrize("name", forerun.__all__)
def test_every_name_of_the_facade_leads_to_what_it_names(name: str) -> None:
    assert getattr(forerun, name) is not None


def test_the_facade_does_not_hide_what_is_wrong_in_a_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(forerun._HOMES, "load", "calib.errors")
    monkeypatch.delitem(vars(forerun), "load", raising=False)
    with pytest.raises(ImportError, match=r"load of forerun\.calib\.errors: .*no attribute"):
        exec("from forerun import load")
    with pytest.raises(ImportError, match="cannot import name 'other'"):
        exec("from forerun import other")
