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
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

from forerun.benchmarks.markdown_text import markdown_table

Files = Mapping[str, str]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

ROOT_MODULES = ("__init__.py", "__main__.py", "_forerun_autoload.py", "companion.py")
PACKAGE = ("calib", "hooks", "launch")
OUTSIDE = ("benchmarks", "recipes", "tests")
_CHECKOUT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Print the table of two trees."""
    parser = argparse.ArgumentParser(description="The shape of the package in two trees.")
    parser.add_argument("old", metavar="OLD", help="a revision or a directory")
    parser.add_argument("new", metavar="NEW", help="a revision or a directory")
    arguments = parser.parse_args()
    print(table(tree_of(arguments.old), tree_of(arguments.new)))


def table(old: Files, new: Files) -> str:
    """Return each measure of both trees, with the difference, as Markdown."""
    before, after = shape_of(old), shape_of(new)
    rows = [
        [name, str(before[name]), str(value), f"{value - before[name]:+g}"]
        for name, value in after.items()
    ]
    rows += [[name, "", "", str(number)] for name, number in moves(old, new).items()]
    return markdown_table(["measure", "old", "new", "change"], rows)


def tree_of(name: str, repository: Path = _CHECKOUT) -> dict[str, str]:
    """Return the files of a directory, or else of a revision of the repository, by their paths."""
    if (directory := Path(name)).is_dir():
        places = [directory / one for one in ROOT_MODULES]
        for folder in (*PACKAGE, *OUTSIDE):
            places += sorted((directory / folder).rglob("*.py"))
        paths = [place for place in places if place.is_file()]
        return {one.relative_to(directory).as_posix(): one.read_text("utf-8") for one in paths}
    command = ["git", "-C", str(repository), "archive", "--format=tar", name]
    packed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    files = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            content = archive.extractfile(member) if _is_read(member.name) else None
            if content is not None:
                files[member.name] = content.read().decode("utf-8")
    return files


def shape_of(files: Files) -> dict[str, float]:
    """Return the figures of one tree by name."""
    package = {path: text for path, text in files.items() if _is_package(path)}
    trees = {path: ast.parse(text) for path, text in package.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, FunctionNode)]
    lengths = [(one.end_lineno or one.lineno) - one.lineno + 1 for one in functions]
    known = {*map(module_name, package)} - {""}
    arrows = [
        (module_name(path), other)
        for path, tree in trees.items()
        for other in _imported(path, tree) & known - {module_name(path)}
    ]
    is_within = [package_of(one) == package_of(other) for one, other in arrows]
    return {
        "modules": len(package),
        "lines": sum(len(text.splitlines()) for text in package.values()),
        **{f"lines of {folder}": _num_lines(files, folder) for folder in OUTSIDE},
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "dataclasses": sum(isinstance(node, ast.ClassDef) and _is_data(node) for node in nodes),
        "functions": len(functions),
        "lines of a function, median": median(lengths or [0]),
        "lines of a function, most": max(lengths, default=0),
        "imports across rooms": is_within.count(False),
        "imports within rooms": is_within.count(True),
    }


def moves(old: Files, new: Files) -> dict[str, int]:
    """Return the fate of the package's lines in files that differ."""
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
    result = {"lines that moved to another file": moved.total()}
    for folder, outside_lines in outside.items():
        result[f"lines that left for {folder}"] = (gone & outside_lines).total()
        gone -= outside_lines
    return result | {"lines that are gone": gone.total(), "lines that are new": came.total()}


def module_name(path: str) -> str:
    """Return the module of a path; the root's own ``__init__`` has an empty name."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    """Return the first two parts of a module."""
    return "/".join(module.split(".")[:2])


def _imported(path: str, tree: ast.Module) -> set[str]:
    """Return the modules that a module imports, in functions and for types as well."""
    package, imported = path.split("/")[:-1], set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *filter(None, [node.module])]
            imported |= {".".join([*base, alias.name]) for alias in node.names} | {".".join(base)}
    return imported


def _is_read(path: str) -> bool:
    is_code = path.endswith(".py") and path.partition("/")[0] in (*PACKAGE, *OUTSIDE)
    return is_code or path in ROOT_MODULES


def _is_package(path: str) -> bool:
    return path in ROOT_MODULES or path.partition("/")[0] in PACKAGE


def _num_lines(files: Files, folder: str) -> int:
    texts = (text for path, text in files.items() if path.startswith(f"{folder}/"))
    return sum(len(text.splitlines()) for text in texts)


def _filled(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line.strip())


def _is_data(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(one) for one in node.decorator_list)


if __name__ == "__main__":
    main()
