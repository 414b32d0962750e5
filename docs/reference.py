"""Generate the pages of docs/reference from the code alone.

python docs/reference.py    writes them; a test fails where they say something else than the code
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from forerun.calib.records.run_values import RUN_VALUES, SUMMARY_VALUES
from forerun.calib.workload.run_options import options
from forerun.launch.cli import build_parser
from forerun.launch.sinks.prometheus_sink import prometheus_name
from forerun.launch.verbs.arguments import ANSWERS, FILE_NAMES, file_schema

sys.path.insert(0, str(Path(__file__).parent))

from reference_schemas import key_rows, schema_of
from reference_words import (
    EXIT_CODES,
    FOREIGN_VARIABLES,
    OF_ANSWERS,
    OUTPUT_FILES,
    SAYS,
    VARIABLES,
    WRAPPER_EXIT_CODES,
)

PAGES = Path(__file__).parent / "reference"
_MADE = "<!-- Written by docs/reference.py: change the code, then run it. -->\n\n"


def pages() -> dict[str, str]:
    """Return the text of each page, by the name of its file in docs/reference."""
    made = {
        "flags.md": flags(),
        "verbs.md": verbs(),
        "files.md": files(),
        "answers.md": answers(),
        "values.md": values(),
        "exit_codes.md": exit_codes(),
        "environment.md": environment(),
        "python.md": python(),
    }
    return {name: _MADE + text.rstrip() + "\n" for name, text in made.items()}


def flags() -> str:
    """Return every ``--calibrate-...``, as declared."""
    rows = [
        (
            f"`--calibrate-{flag.name}={flag.metavar}`",
            flag.default,
            flag.description,
            flag.reader[0],
        )
        for flag, _ in options()
    ]
    return _page(
        "Flags of a launch",
        SAYS["flags"],
        table(("flag", "default", "meaning", "takes"), rows),
        SAYS["flags_end"],
    )


def verbs() -> str:
    """Return every verb with its arguments and options, as its parser has them."""
    return _page("Verbs", SAYS["verbs"], *(_verb(name, sub) for name, sub in parsers()))


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each verb and its parser."""
    yield from _verb_action().choices.items()


def _verb_action() -> Any:
    subparsers = build_parser()._subparsers
    assert subparsers is not None
    return subparsers._group_actions[0]


def _verb(name: str, sub: argparse.ArgumentParser) -> str:
    (help_text,) = (one.help for one in _verb_action()._choices_actions if one.dest == name)
    text = _sentence(help_text) + (f"\n\n{_sentence(sub.description)}" if sub.description else "")
    rows = [(_written(action), action.help or "") for action in shown_actions(sub)]
    return f"## {name}\n\n{text}\n\n{table(('word or option', 'meaning'), rows)}"


def shown_actions(sub: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments that a user can give to a verb, without help."""
    return [one for one in sub._actions if one.dest != "help" and one.help != argparse.SUPPRESS]


def _written(action: argparse.Action) -> str:
    value = ""
    if action.nargs != 0:
        words = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
        value = " ".join(words) if isinstance(words, tuple) else words or action.dest.upper()
        if isinstance(action.nargs, int) and isinstance(words, str):
            value = " ".join([value] * action.nargs)
    if not action.option_strings:
        return f"`{value}`" + (", one or more" if action.nargs == "+" else "")
    return ", ".join(f"`{f'{one} {value}'.strip()}`" for one in action.option_strings)


def files() -> str:
    """Return the files of a directory, and the keys of each that is JSON."""
    rows = [(f"`{name}`", description) for name, description in OUTPUT_FILES.items()]
    parts = [_file(name) for name in FILE_NAMES]
    return _page("Files of a directory", SAYS["files"], table(("file", "holds"), rows), *parts)


def _file(name: str) -> str:
    """Return the section of a file; parts that are files as well have their own section."""
    schema = file_schema(name)
    if name == "answer":
        properties = schema["$defs"][name]["properties"]
        for part in ("forecast", "decision"):
            properties[part] = {"type": "object", "description": properties[part]["description"]}
    return _schema(schema["title"], schema)


def answers() -> str:
    """Return the keys of the verbs' output with ``--json``."""
    parts = [
        _schema(description, schema_of(ANSWERS.with_name(file), root))
        for description, (file, root) in OF_ANSWERS.items()
    ]
    return _page("Answers of verbs as JSON", SAYS["answers"], *parts)


def _schema(title: str, schema: dict[str, Any]) -> str:
    head, _, rest = title.partition(": ")
    text = f"{_sentence(rest)}\n\n" if rest else ""
    return f"## {head}\n\n{text}{table(('key', 'type', 'meaning'), key_rows(schema))}"


def values() -> str:
    """Return values of each step and of the end, as sinks receive them."""
    steps = [
        (f"`{name}`", f"`{prometheus_name(name)[0]}`", value.meaning)
        for name, value in RUN_VALUES.items()
    ]
    ends = [(f"`{name}`", meaning) for name, meaning in SUMMARY_VALUES.items()]
    return _page(
        "Values of a run",
        SAYS["values"],
        table(("value", "Prometheus", "meaning"), steps),
        "## At the end",
        SAYS["summary"],
        table(("value", "meaning"), ends),
    )


def exit_codes() -> str:
    """Return exit codes of verbs, then those of ``forerun run``."""
    return _page(
        "Exit codes",
        SAYS["exit_codes"],
        table(("code", "means"), EXIT_CODES.items()),
        "## forerun run",
        SAYS["run_exit_codes"],
        table(("code", "means"), WRAPPER_EXIT_CODES.items()),
    )


def environment() -> str:
    """Return our environment variables, and those of others that are read."""
    return _page(
        "Environment variables",
        SAYS["environment"],
        table(("variable", "set by", "meaning"), ((f"`{k}`", *v) for k, v in VARIABLES.items())),
        "## Variables of others",
        SAYS["foreign"],
        table(("variable", "read for"), ((f"`{k}`", v) for k, v in FOREIGN_VARIABLES.items())),
    )


def python() -> str:
    """Return the names of ``forerun``, with their signatures and docstrings."""
    from reference_python import python_parts

    return _page("Python API", SAYS["python"], *python_parts())


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; a bar within a cell is escaped."""
    lines = [tuple(head), ("---",) * len(head), *rows]
    cells = ([str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _page(title: str, *parts: str) -> str:
    return "\n\n".join((f"# {title}", *(part.strip() for part in parts if part.strip())))


def _sentence(text: str | None) -> str:
    sentence = inspect.cleandoc(text or "").strip()
    return (
        f"{sentence[:1].upper()}{sentence[1:]}{'' if sentence.endswith('.') else '.'}"
        if sentence
        else ""
    )


def main() -> int:
    """Write the pages; return 0."""
    PAGES.mkdir(exist_ok=True)
    for name, text in pages().items():
        (PAGES / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
