"""The shape of the code in figures: rooms, arrows, sizes, names used twice, comments, duplicates.

    python benchmarks/structure.py [CHECKOUT...] [--json OUT]

One column for each checkout, so that two of them stand beside each other.  Only text is read.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

PACKAGE = ("calib", "hooks", "launch", "recipes/stand_in_cuda")
TREES = {"package": PACKAGE, "tests": ("tests",), "benchmarks": ("benchmarks",)}
CROWDED = 16
LONG_LINES = 40
DUPLICATE_LINES = 10
_CHECKOUT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="The shape of the code in figures.")
    parser.add_argument("checkouts", type=Path, nargs="*", default=[_CHECKOUT], metavar="CHECKOUT")
    parser.add_argument("--json", type=Path, metavar="OUT", help="all figures, names included")
    arguments = parser.parse_args()
    told = {str(path): figures(path.resolve()) for path in arguments.checkouts}
    for line in table([figure["figures"] for figure in told.values()]):
        print(line)
    for figure in told.values():
        for name, members in figure["lists"].items():
            print(f"{name}: {'; '.join(members) or 'none'}")
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def figures(root: Path) -> dict[str, Any]:
    """Figures by name, and the members of some as text."""
    sources = {
        name: {path: path.read_text(encoding="utf-8") for path in _files(root, rooms)}
        for name, rooms in TREES.items()
    }
    package = sources["package"]
    trees = {path: ast.parse(text) for path, text in package.items()}
    arrows = _arrows(root, trees)
    rooms = Counter(path.parent.relative_to(root).as_posix() for path in package)
    twice = _names_used_twice(root, trees)
    long = [f for tree in trees.values() for f in _functions(tree) if _length(f) > LONG_LINES]
    whole = {path: text for tree in sources.values() for path, text in tree.items()}
    lines = {f"lines, {name}": _lines(texts.values()) for name, texts in sources.items()}
    return {
        "figures": {
            **lines,
            "lines, package and benchmarks": lines["lines, package"] + lines["lines, benchmarks"],
            "files, package": len(package),
            "rooms": len(rooms),
            f"rooms of more than {CROWDED} files": sum(n > CROWDED for n in rooms.values()),
            "most files in a room": max(rooms.values()),
            "files in circles of imports": sum(map(len, _circles(arrows))),
            "arrows that point up": _upward(root, arrows),
            "data classes": sum(map(_data_classes, trees.values())),
            "class names used twice": len(twice),
            f"functions over {LONG_LINES} lines": len(long),
            **_comments(package.values()),
            f"duplicates of {DUPLICATE_LINES} lines, package": _duplicates(package.values()),
            f"duplicates of {DUPLICATE_LINES} lines, all": _duplicates(whole.values()),
        },
        "lists": {
            "circles": [" ".join(sorted(circle)) for circle in _circles(arrows)],
            "names used twice": [f"{name} ({', '.join(at)})" for name, at in twice.items()],
            "files per room": [f"{room} {number}" for room, number in rooms.most_common()],
        },
    }


def table(columns: list[Mapping[str, Any]]) -> Iterator[str]:
    """Markdown: a line for each figure, a column for each checkout."""
    names = dict.fromkeys(name for column in columns for name in column)
    yield "| figure |" + " |" * len(columns)
    yield "| --- |" + " ---: |" * len(columns)
    for name in names:
        yield f"| {name} | {' | '.join(str(column.get(name, '')) for column in columns)} |"


def _files(root: Path, rooms: Iterable[str]) -> Iterator[Path]:
    for room in rooms:
        yield from sorted((root / room).rglob("*.py"))


def _lines(texts: Iterable[str]) -> int:
    return sum(len(text.splitlines()) for text in texts)


def _module(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _arrows(root: Path, trees: Mapping[Path, ast.Module]) -> dict[str, set[str]]:
    """Modules that each module imports, in functions and for types alone as well."""
    known = {_module(root, path) for path in trees}
    found: dict[str, set[str]] = {}
    for path, tree in trees.items():
        package = path.relative_to(root).parts[:-1]
        asked = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
                start = ".".join(part for part in base if part)
                asked |= {f"{start}.{alias.name}" for alias in node.names}
        name = _module(root, path)
        found[name] = {a if a in known else a.rpartition(".")[0] for a in asked} & known - {name}
    return found


def _circles(arrows: Mapping[str, set[str]]) -> list[set[str]]:
    """Sets of modules that reach each other."""
    names = list(arrows)
    leads = [[other in arrows[name] for other in names] for name in names]
    _, labels = connected_components(csr_array(np.array(leads)), connection="strong")
    circles: dict[int, set[str]] = defaultdict(set)
    for name, label in zip(names, labels.tolist(), strict=True):
        circles[label].add(name)
    return [circle for circle in circles.values() if len(circle) > 1]


def _upward(root: Path, arrows: Mapping[str, set[str]]) -> int | str:
    """Arrows against the order of ARCHITECTURE.md; words where none is declared."""
    declared = root / "ARCHITECTURE.md"
    if not declared.exists():
        return "no order declared"
    text = declared.read_text(encoding="utf-8").split("```rooms\n")[1].split("```")[0]
    order = {line.split()[0].replace("/", "."): i for i, line in enumerate(text.splitlines())}

    def place(module: str) -> int:
        return order.get(".".join(module.split(".")[:2]), len(order))

    return sum(place(other) > place(name) for name in arrows for other in arrows[name])


def _data_classes(tree: ast.Module) -> int:
    return sum(
        any("dataclass" in ast.unparse(one) for one in node.decorator_list)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )


def _names_used_twice(root: Path, trees: Mapping[Path, ast.Module]) -> dict[str, list[str]]:
    """Public classes of one name in several files."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(root).as_posix())
    return {name: at for name, at in sorted(places.items()) if len(at) > 1}


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def _comments(texts: Iterable[str]) -> dict[str, float]:
    """Per 100 lines that are not blank: comments, and texts under constants and fields."""
    comments = under = lines = 0
    for text in texts:
        lines += sum(bool(line.strip()) for line in text.splitlines())
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments += sum(token.type == tokenize.COMMENT for token in tokens)
        for node in ast.walk(ast.parse(text)):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                under += sum(_is_text(one) for one in body[1:])
    return {
        "comments per 100 lines": round(100 * comments / lines, 1),
        "texts under constants and fields per 100 lines": round(100 * under / lines, 1),
    }


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _duplicates(texts: Iterable[str]) -> int:
    """Runs of equal lines that stand in two places; blanks, comments, imports are passed over."""
    found: Counter[tuple[str, ...]] = Counter()
    for text in texts:
        lines = [line.strip() for line in text.splitlines()]
        kept = [s for s in lines if s and not s.startswith(("#", "import ", "from "))]
        runs = {tuple(kept[i : i + DUPLICATE_LINES]) for i in range(len(kept))}
        found.update(run for run in runs if len(run) == DUPLICATE_LINES)
    return sum(number > 1 for number in found.values())


if __name__ == "__main__":
    main()
