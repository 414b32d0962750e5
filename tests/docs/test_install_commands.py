"""No page, recipe or message names a package that no registry has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forerun.hooks.process import interpreter

ROOT = Path(__file__).parents[2]
PLACES = {
    ".": ("README.md", "*.py"),
    "docs": ("**/*.md", "*.py"),
    "recipes": ("**/*.py", "*.md", "*.sh", "*.sbatch", "*.yaml"),
    **dict.fromkeys(("calib", "hooks", "launch"), ("**/*.py", "**/*.json", "**/*.html")),
}
FILES = [p for place, ends in PLACES.items() for end in ends for p in (ROOT / place).glob(end)]
_INSTALLED = r"pip install(?:(?!uninstall)[^`\n])*[ '\"]forerun(?=['\"`=\s]|$)"
_BARE = re.compile(rf"(?<![\w/}}])forerun\[|{_INSTALLED}", re.MULTILINE)


@pytest.mark.parametrize(
    "text", ["pip install forerun", "pip install --no-deps 'forerun==0.1'", "needs forerun[all]"]
)
def test_a_bare_name_is_found(text: str) -> None:
    assert _BARE.search(text)


def test_every_command_names_a_place_to_install_from() -> None:
    assert len(FILES) > 300
    texts = {path: path.read_text(encoding="utf-8") for path in FILES}
    found = {str(path): _BARE.findall(text) for path, text in texts.items()}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_place_is_the_clone_or_what_pip_has_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interpreter.install_source() == ROOT.resolve()
    elsewhere = Path("/site-packages/forerun/hooks/process/interpreter.py")
    monkeypatch.setattr(interpreter, "__file__", str(elsewhere))
    (folder, _) = interpreter.install_origin()
    assert interpreter.install_source() == (folder or Path("/path/to/forerun"))
    assert interpreter.install_command().startswith(f"pip install '{interpreter.install_source()}[")
