"""The reference is what the code says, and leaves nothing of it out."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forerun
from forerun.calib.records.run_values import RUN_VALUES, SUMMARY_VALUES
from forerun.calib.workload.run_options import options
from forerun.launch.store.run_folders import SAMPLES
from forerun.launch.store.run_log import STEPS
from forerun.launch.verbs.arguments import FILE_NAMES, FILES, ExitCode
from forerun.launch.verbs.run import SCRIPT, STOP_EXIT_CODE
from forerun.launch.views.answer_tables import summary_values
from forerun.launch.views.answers import PAGE, TRACE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = [
    ROOT / "_forerun_autoload.py",
    *(
        path
        for folder in ("calib", "hooks", "launch", "recipes/stand_in_cuda")
        for path in (ROOT / folder).rglob("*.py")
    ),
]
_NOT_OURS = {"TORCHDYNAMO_DISABLE", "PYTHON_COLORS"}
"""Set by the CPU stand-in alone."""


@pytest.fixture(scope="module")
def reference() -> Any:
    sys.path.insert(0, str(DOCS))
    try:
        import reference
    finally:
        sys.path.remove(str(DOCS))
    return reference


def page(name: str) -> str:
    return (DOCS / "reference" / name).read_text(encoding="utf-8")


def first_cells(text: str) -> list[str]:
    return [
        cell.replace("\\|", "|") for cell in re.findall(r"^\| ((?:\\\||[^|])*?) \|", text, re.M)
    ]


def test_it_was_written_from_this_code(reference: Any) -> None:
    """If this fails: run python docs/reference.py, and commit what it wrote."""
    made = reference.pages()
    assert {path.name for path in (DOCS / "reference").glob("*.md")} == set(made)
    for name, text in made.items():
        assert page(name) == text, f"docs/reference/{name} is of other code"


def test_every_flag_has_a_line_with_its_meaning() -> None:
    rows = first_cells(page("flags.md"))[2:]
    assert rows == [f"`--calibrate-{flag.name}={flag.metavar}`" for flag, _ in options()]
    assert all(flag.description and flag.default for flag, _ in options())


def test_every_word_and_option_of_a_verb_has_a_meaning(reference: Any) -> None:
    verbs = dict(reference.parsers())
    assert set(re.findall(r"^## (\w+)$", page("verbs.md"), re.M)) == set(verbs)
    for verb, parser in verbs.items():
        for action in reference.shown_actions(parser):
            assert action.help, f"forerun {verb}: {action.dest} has no help"


def keys(value: Any) -> Iterator[tuple[str, Any]]:
    """All properties in a schema, wherever they stand, with what is said of them."""
    if isinstance(value, dict):
        if isinstance(properties := value.get("properties"), dict):
            yield from ((name, spec.get("description")) for name, spec in properties.items())
        value = value.values()
    for one in value if not isinstance(value, (str, int, float, bool, type(None))) else ():
        yield from keys(one)


@pytest.mark.parametrize("path", [*FILES.parent.glob("*.schema.json")], ids=lambda path: path.name)
def test_a_schema_says_of_every_key_what_it_means(path: Path) -> None:
    """So that ``--json-schema`` says it too."""
    silent = [
        name for name, description in keys(json.loads(path.read_text("utf-8"))) if not description
    ]
    assert not silent


def test_no_cell_of_a_table_is_empty() -> None:
    """But for defaults: a field or a flag may have none."""
    for path in (DOCS / "reference").glob("*.md"):
        for line in re.findall(r"^\| (.*) \|$", path.read_text("utf-8"), re.M):
            cells = re.split(r" (?<!\\)\| ", line)
            assert all(one.strip() for one in (*cells[:2], cells[-1])), f"{path.name}: {line}"


def test_every_key_of_every_file_and_answer_has_a_line() -> None:
    documented = {
        re.split(r"\.|\[\]", cell.strip("`"))[-1] or re.split(r"\.|\[\]", cell.strip("`"))[-2]
        for name in ("files.md", "answers.md")
        for cell in first_cells(page(name))
    }
    schemas = FILES.parent.glob("*.schema.json")
    results = {key for path in schemas for key, _ in keys(json.loads(path.read_text("utf-8")))}
    assert len(results) > 200 and results <= documented, results - documented


def test_every_file_of_a_launch_has_a_line() -> None:
    documented = [cell.strip("`") for cell in first_cells(page("files.md").split("## ")[0])[2:]]
    written = {SAMPLES, STEPS, PAGE, TRACE, SCRIPT, *(f"{name}.json" for name in FILE_NAMES)}
    elsewhere = {"launch.json", "command.json", "stop-request.json", "forecasts.json"}
    assert not [
        one for one in written - elsewhere if not any(fnmatch(one, name) for name in documented)
    ]


def test_every_value_of_a_run_and_of_its_end_has_a_line() -> None:
    rates = {"tokens_per_s": 1.0}
    texts = {"decision": "continue", "advice": "decision: keep running"}
    answer: Any = SimpleNamespace(rates=rates, decision_texts=texts)
    assert summary_values(answer).keys() - rates.keys() <= SUMMARY_VALUES.keys()
    documented = {cell.strip("`") for cell in first_cells(page("values.md"))}
    assert documented >= RUN_VALUES.keys() | SUMMARY_VALUES.keys()


def test_every_exit_code_has_a_line() -> None:
    verbs, wrapper = page("exit_codes.md").split("## forerun run")
    assert first_cells(verbs)[2:] == [str(int(code)) for code in ExitCode]
    assert str(STOP_EXIT_CODE) in first_cells(wrapper)


def test_every_public_name_has_a_section() -> None:
    documented = set(re.findall(r"^## forerun\.(\w+)$", page("python.md"), re.M))
    assert documented == {name for name in forerun.__all__ if name != "__version__"}


def read_variables() -> Iterator[str]:
    """Names that the code reads of an environment, or writes to one, where they stand as text."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(r"FORERUN_[A-Z_]+", text):
                yield text
            args = node.args if isinstance(node, ast.Call) else []
            is_read = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("environ.get")
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
                is_read, args = True, [node.slice]
            if is_read and args and isinstance(args[0], ast.Constant):
                yield str(args[0].value)


def test_every_variable_has_a_line() -> None:
    cells = first_cells(page("environment.md"))
    documented = [name for cell in cells for name in cell.strip("`").split(", ")]
    results = set(read_variables()) - _NOT_OURS
    missing = {name for name in results if not any(fnmatch(name, one) for one in documented)}
    assert len(results) > 25 and not missing, missing
    ours = {one for one in documented if one.startswith("FORERUN_")}
    assert ours <= results, "told, and read by nobody"
