"""The structure of the package in two trees: sizes, kinds, imports between rooms, and moved lines.

    python benchmarks/structure.py OLD NEW

OLD and NEW are revisions of this repository, or directories.  Only text is read.  A line moved if
it is not blank, disappeared from one file of the package and appears verbatim in another that did
not have it before; common lines, such as ``return None``, may match by chance.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median

from forerun.benchmarks.markdown_text import markdown_table

Files = Mapping[str, str]
Arrows = Mapping[str, frozenset[str]]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

ROOT_MODULES = ("__init__.py", "__main__.py", "_forerun_autoload.py", "faces.py", "companion.py")
PACKAGE = ("calib", "hooks", "launch")
OUTSIDE = ("benchmarks", "recipes", "tests")
ORDER = "ARCHITECTURE.md"
COUNTED_NAME = "MeasuredAnswer"
_CHECKOUT = Path(__file__).resolve().parents[1]
_NAMED = re.compile(r"(\.*)(?:forerun\.)?(\w+(?:\.\w+)+)(?::\w+)?")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Figures of one tree; the upward ones are None if no order of rooms is declared."""

    num_modules: int
    num_lines: int
    num_classes: int
    num_dataclasses: int
    num_functions: int
    median_function: float
    longest_function: int
    num_to_json: int
    num_counted_name: int
    num_imports_across: int
    num_imports_within: int
    upward_imports: tuple[str, ...] | None
    upward_names: tuple[str, ...] | None
    num_circles: int


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Non-blank lines of the package, by their fate from one tree to the next."""

    num_moved: int
    num_moved_out: Mapping[str, int]
    num_gone: int
    num_new: int


def main() -> None:
    """Print the table of two trees, and the upward imports of the newer one."""
    parser = argparse.ArgumentParser(description="The shape of the package in two trees.")
    parser.add_argument("old", metavar="OLD", help="a revision or a directory")
    parser.add_argument("new", metavar="NEW", help="a revision or a directory")
    arguments = parser.parse_args()
    old, new = tree_of(arguments.old), tree_of(arguments.new)
    shape = shape_of(new)
    print(table(shape_of(old), shape, moves(old, new)))
    for arrow in (*(shape.upward_imports or ()), *(shape.upward_names or ())):
        print(f"up: {arrow}")


def table(old: Shape, new: Shape, moved: Moves) -> str:
    """Return each measure of both trees, with the difference, as Markdown."""
    rows = [(name, *_change_cells(before, after)) for name, before, after in _measures(old, new)]
    lines = [
        ("lines that moved to another file", moved.num_moved),
        *((f"lines that left for {name}", n) for name, n in moved.num_moved_out.items()),
        ("lines that are gone", moved.num_gone),
        ("lines that are new", moved.num_new),
    ]
    rows[2:2] = [(name, "", "", str(number)) for name, number in lines]
    return markdown_table(["measure", "old", "new", "change"], rows)


def tree_of(name: str, repository: Path = _CHECKOUT) -> dict[str, str]:
    """Return the files of a directory, or else of a revision of the repository, by their paths."""
    if (directory := Path(name)).is_dir():
        places = [directory / one for one in (*ROOT_MODULES, ORDER)]
        for folder in (*PACKAGE, *OUTSIDE):
            places += sorted((directory / folder).rglob("*.py"))
        file_paths = [place for place in places if place.is_file()]
        return {one.relative_to(directory).as_posix(): one.read_text("utf-8") for one in file_paths}
    command = ["git", "-C", str(repository), "archive", "--format=tar", name]
    packed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    files = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            content = archive.extractfile(member) if _is_read(member.name) else None
            if content is not None:
                files[member.name] = content.read().decode("utf-8")
    return files


def shape_of(files: Files) -> Shape:
    """Return the figures of one tree."""
    package = {path: text for path, text in files.items() if _is_package(path)}
    trees = {path: ast.parse(text) for path, text in package.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    functions = [node for node in nodes if isinstance(node, FunctionNode)]
    lengths = [(one.end_lineno or one.lineno) - one.lineno + 1 for one in functions]
    known = _known(files)
    imports = {module_name(path): _imported(path, tree, known) for path, tree in trees.items()}
    named = {module_name(path): _named(path, tree, known) for path, tree in trees.items()}
    is_within = [package_of(a) == package_of(b) for a, others in imports.items() for b in others]
    order = _declared(files.get(ORDER, ""))
    return Shape(
        num_modules=len(package),
        num_lines=sum(len(text.splitlines()) for text in package.values()),
        num_classes=len(classes),
        num_dataclasses=sum(map(_is_dataclass, classes)),
        num_functions=len(functions),
        median_function=median(lengths or [0]),
        longest_function=max(lengths, default=0),
        num_to_json=sum(one.name == "to_json" for one in functions),
        num_counted_name=sum(COUNTED_NAME in _names(node) for node in nodes),
        num_imports_across=is_within.count(False),
        num_imports_within=is_within.count(True),
        upward_imports=_upward(imports, order),
        upward_names=_upward(named, order),
        num_circles=len(import_cycles(imports)),
    )


def moves(old: Files, new: Files) -> Moves:
    """Return the fate of the lines in files that differ."""
    gone, came = Counter[str](), Counter[str]()
    outside = {folder: Counter[str]() for folder in OUTSIDE}
    for path in old.keys() | new.keys():
        before, after = (Counter(_filled(files.get(path, ""))) for files in (old, new))
        folder = path.partition("/")[0]
        if _is_package(path):
            gone += before - after
            came += after - before
        elif folder in outside:
            outside[folder] += after - before
    moved = gone & came
    gone, came = gone - moved, came - moved
    moved_out = {}
    for folder, outside_lines in outside.items():
        moved_out[folder] = (gone & outside_lines).total()
        gone -= outside_lines
    return Moves(
        num_moved=moved.total(),
        num_moved_out=moved_out,
        num_gone=gone.total(),
        num_new=came.total(),
    )


def import_cycles(arrows: Arrows) -> set[frozenset[str]]:
    """Return sets of modules that import each other, directly or indirectly."""
    reached = {name: _reached(name, arrows) for name in arrows}
    candidates = (
        frozenset(other for other in others if name in reached.get(other, ()))
        for name, others in reached.items()
    )
    return {circle for circle in candidates if circle}


def module_name(path: str) -> str:
    """Return the module of a path; the root's own ``__init__`` has an empty name."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    """Return the first two parts of a module, its room; a package is a room of its own."""
    parts = module.split(".")
    return parts[0] if parts[0] == "recipes" else "/".join(parts[:2])


def _measures(old: Shape, new: Shape) -> Iterator[tuple[str, float | None, float | None]]:
    """Yield each measure of both trees, in the order of the table."""
    names = {
        "modules": "num_modules",
        "lines": "num_lines",
        "classes": "num_classes",
        "dataclasses": "num_dataclasses",
        "functions": "num_functions",
        "lines of a function, median": "median_function",
        "lines of a function, most": "longest_function",
        "definitions of `to_json`": "num_to_json",
        f"occurrences of `{COUNTED_NAME}`": "num_counted_name",
        "imports across rooms": "num_imports_across",
        "imports within rooms": "num_imports_within",
        "imports that point up": "upward_imports",
        "modules above, named in strings": "upward_names",
        "circles of imports": "num_circles",
    }
    for name, field in names.items():
        both = (getattr(shape, field) for shape in (old, new))
        before, after = (len(one) if isinstance(one, tuple) else one for one in both)
        yield name, before, after


def _change_cells(before: float | None, after: float | None) -> tuple[str, str, str]:
    """Return both figures and their difference as text; a dash means no figure."""
    change = "-" if before is None or after is None else f"{after - before:+g}"
    old, new = ("-" if one is None else str(one) for one in (before, after))
    return old, new, "0" if change == "+0" else change


def _is_read(path: str) -> bool:
    is_code = path.endswith(".py") and path.partition("/")[0] in (*PACKAGE, *OUTSIDE)
    return is_code or path in (*ROOT_MODULES, ORDER)


def _is_package(path: str) -> bool:
    return path in ROOT_MODULES or path.partition("/")[0] in PACKAGE


def _known(files: Files) -> set[str]:
    """Return the modules that may be imported; others import only its version from the root."""
    paths = (path for path in files if _is_package(path) or path.startswith("recipes/"))
    return {*map(module_name, paths)} - {""}


def _filled(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _declared(text: str) -> list[str]:
    """Return the rooms of ARCHITECTURE.md, lowest first."""
    listed = text.partition("```rooms\n")[2].partition("```")[0]
    return [line.split()[0] for line in listed.splitlines() if line.strip()]


def _imported(path: str, tree: ast.Module, known: set[str]) -> frozenset[str]:
    """Return the modules that a module imports, in functions and for types as well."""
    package = path.split("/")[:-1]
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *filter(None, [node.module])]
            imported |= {".".join([*base, alias.name]) for alias in node.names}
    modules = {one if one in known else one.rpartition(".")[0] for one in imported}
    return frozenset(modules & known - {module_name(path)})


def _named(path: str, tree: ast.Module, known: set[str]) -> frozenset[str]:
    """Return the modules that strings of a module name, from the root or its own package."""
    package, imported = path.split("/")[:-1], set()
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and (match := _NAMED.fullmatch(text)):
            base = package[: len(package) - len(match[1]) + 1] if match[1] else []
            imported |= {match[2], ".".join([*base, match[2]])}
    return frozenset(imported & known - {module_name(path)})


def _upward(arrows: Arrows, order: list[str]) -> tuple[str, ...] | None:
    """Return imports from a declared room to one above it; None if no order is declared."""
    place = {package: number for number, package in enumerate(order)}
    between = [(name, other) for name, others in arrows.items() for other in others]
    declared = [pair for pair in between if {*map(package_of, pair)} <= place.keys()]
    up = [f"{a} -> {b}" for a, b in declared if place[package_of(b)] > place[package_of(a)]]
    return tuple(sorted(up)) if order else None


def _reached(name: str, arrows: Arrows) -> set[str]:
    """Return all modules that a module imports, transitively; itself if it is in a cycle."""
    reached: set[str] = set()
    open_ones = [*arrows[name]]
    while open_ones:
        if (one := open_ones.pop()) not in reached:
            reached.add(one)
            open_ones += arrows.get(one, ())
    return reached


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in _names(part) for part in _parts(node.decorator_list))


def _parts(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    return chain.from_iterable(map(ast.walk, nodes))


def _names(node: ast.AST) -> tuple[str | None, ...]:
    """Return the names that a node itself contains; a string may be one, as in ``__all__``."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.ClassDef(name=name):
            return (name,)
        case ast.alias(name=name, asname=other):
            return (name, other)
        case ast.Constant(value=str(text)):
            return (text,)
    return ()


if __name__ == "__main__":
    main()
