"""Check identifiers and docstring openings against the glossary (``python docs/lexicon.py``).

    python docs/lexicon.py                 every place that breaks it; status 1 where there is one
    python docs/lexicon.py --count [DIR]   how often each word stands, here or in another checkout

Words come from ``docs/glossary.md``: an identifier may not contain a word that is in ``code`` type
in its third column, except for the names in its last table.  Names of tests are sentences, and are
not checked.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = "docs/glossary.md"
FOLDERS = ("calib", "hooks", "launch", "recipes", "benchmarks", "docs", "tests")
OPENINGS = ("Of", "What", "Where", "Whether", "By how")
_CODE = re.compile(r"`([^`]+)`")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_OPENING = re.compile(rf"\s*({'|'.join(OPENINGS)})\b")
_BUILTINS = frozenset(dir(builtins))


@dataclass(frozen=True, kw_only=True)
class Lexicon:
    """Words that the glossary replaces, and patterns of names that may contain them."""

    replaced: frozenset[str]
    exceptions: tuple[str, ...]

    def words(self, name: str) -> Iterator[str]:
        """Yield the replaced words that are parts of an identifier; exceptions are not applied."""
        if not name.startswith("test_") and name not in _BUILTINS:
            yield from (w for w in map(str.lower, _WORDS.findall(name)) if w in self.replaced)

    def allows(self, name: str) -> bool:
        """Return True for a name in the last table."""
        return any(fnmatch(name.strip("_"), pattern) for pattern in self.exceptions)


@dataclass(frozen=True, kw_only=True)
class Place:
    """One use of a replaced word or opening: ``name`` is the identifier or the whole opening."""

    path: str
    line: int
    name: str
    word: str
    is_opening: bool


def read_lexicon(text: str) -> Lexicon:
    """Return the lexicon of a glossary's text: its tables of three columns and of two."""
    replaced, exceptions = set[str](), list[str]()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3:
            replaced.update(_CODE.findall(cells[2]))
        elif line.startswith("|") and len(cells) == 2:
            exceptions.extend(_CODE.findall(cells[0]))
    return Lexicon(replaced=frozenset(replaced), exceptions=tuple(exceptions))


def places(path: Path, root: Path, lexicon: Lexicon) -> Iterator[Place]:
    """Yield every violation in a Python file, exceptions included."""
    text, shown = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
    openings = list[tuple[int, str]]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            for word in lexicon.words(token.string):
                yield Place(
                    path=shown, line=token.start[0], name=token.string, word=word, is_opening=False
                )
        elif token.type == tokenize.COMMENT:
            openings.append((token.start[0], token.string.lstrip("#:! ")))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            openings.append((node.lineno, str(node.value.value)))
    for line, opening in openings:
        if match := _OPENING.match(opening):
            first = opening.strip().splitlines()[0]
            yield Place(path=shown, line=line, name=first, word=match[1], is_opening=True)


def sources(root: Path) -> Iterator[Path]:
    """Yield the Python files of a checkout."""
    below = (sorted((root / folder).rglob("*.py")) for folder in FOLDERS)
    yield from chain(sorted(root.glob("*.py")), *below)


def main(argv: list[str] | None = None) -> int:
    """Print violations of the glossary, or counts of its words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", metavar="DIR", nargs="?", type=Path, const=ROOT)
    root = parser.parse_args(argv).count
    lexicon = read_lexicon((ROOT / GLOSSARY).read_text(encoding="utf-8"))
    used = [p for path in sources(root or ROOT) for p in places(path, root or ROOT, lexicon)]
    if root is not None:
        counts = Counter(place.word for place in used)
        print("\n".join(f"{word:12}{number:7,}" for word, number in counts.most_common()))
        return 0
    broken = [place for place in used if place.is_opening or not lexicon.allows(place.name)]
    for place in dict.fromkeys(broken):
        rule = "begins with" if place.is_opening else f"{place.name} has"
        print(f"{place.path}:{place.line}: {rule} {place.word!r}; {GLOSSARY} has the word for it")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
