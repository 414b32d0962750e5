"""The lexicon names what breaks the glossary, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

from lexicon import Lexicon, Place, places, read_lexicon

GLOSSARY = """
| word | means | instead of |
|---|---|---|
| result | what a function returns | `found` |
| remaining | still to come | `left`, rest |

| name | why |
|---|---|
| `*_left` | keys of files |
"""


@pytest.fixture
def lexicon() -> Lexicon:
    """Return the lexicon of a small glossary."""
    return read_lexicon(GLOSSARY)


def written(folder: Path, text: str, lexicon: Lexicon) -> list[Place]:
    """Return the places of a file with this text."""
    path = folder / "one.py"
    path.write_text(text, encoding="utf-8")
    return list(places(path, folder, lexicon))


def test_words_in_code_type_are_replaced_and_others_are_not(lexicon: Lexicon) -> None:
    assert lexicon.replaced == {"found", "left"}
    assert lexicon.allows("steps_left") and lexicon.allows("_steps_left")
    assert not lexicon.allows("left_steps")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("foundry", []),
        ("is_found", ["found"]),
        ("FoundLeft", ["found", "left"]),
        ("FOUND_NS", ["found"]),
        ("test_what_is_found", []),
        ("FileNotFoundError", []),
    ],
)
def test_an_identifier_is_read_word_by_word(lexicon: Lexicon, name: str, words: list[str]) -> None:
    assert list(lexicon.words(name)) == words


def test_identifiers_and_openings_have_their_lines(tmp_path: Path, lexicon: Lexicon) -> None:
    text = '"""What it is."""\n\nfound = "found"  # Where it was left\n"""Of a kind."""\n'
    used = written(tmp_path, text, lexicon)
    assert [(place.line, place.word, place.is_opening) for place in used] == [
        (3, "found", False),
        (3, "Where", True),
        (1, "What", True),
        (4, "Of", True),
    ]


def test_running_text_is_not_read(tmp_path: Path, lexicon: Lexicon) -> None:
    text = '"""Return what was found, where it was left."""\n\nvalue = f"{1} found"\n# Not left.\n'
    assert written(tmp_path, text, lexicon) == []
