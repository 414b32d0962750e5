"""Shared parts of verbs: declaring arguments, printing answers and schemas, exit codes."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

from ...calib.records.iso_times import stamped
from ...calib.shell import printable
from ...calib.workload.argument_values import shown


class ExitCode(IntEnum):
    """Exit code of the program."""

    ANSWER = 0
    THRESHOLD = 1
    USAGE = 2
    NO_DATA = 3


def print_json(value: Mapping[str, Any]) -> None:
    """Print a verb's answer as JSON, with ISO 8601 times added to Unix times."""
    print(json.dumps(stamped(value), indent=2))


def print_answer(args: Any, value: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Print an answer as JSON if a verb was asked for it, else as lines."""
    if args.json:
        print_json(value)
    else:
        print("\n".join(lines))


def print_notes(*lines: str) -> None:
    """Print notes on the answer to standard error."""
    for line in lines:
        print(f"forerun: {printable(line)}", file=sys.stderr)


FOLDER = Path(__file__).parents[1] / "views"
ANSWERS, FILES = FOLDER / "answers.schema.json", FOLDER / "files.schema.json"
"""Schemas of the output of ``predict`` and ``plan``, and of all files, which use their
definitions."""
FILE_NAMES = (
    *("answer", "decision", "forecast", "score", "drift", "request", "stop", "stop-request"),
    *("launch", "command", "forecasts", "status"),
)
DIRECTORY = "directory DIR  the directory that --calibrate-dir named\n"
RUN_ID = "--run-id RUN_ID  which run, if the directory holds several\n"
CLUSTER = (
    "JSON of the links between GPUs (joint, num_gpus, num_cards, domain, node_bytes_per_s, "
    "card_bytes_per_s): docs/cluster.md\n"
)
TIMELINE = (
    "--timeline FILE  write the steps as a trace into this file, which ui.perfetto.dev opens\n"
)
_TYPES = {"DIR": Path, "FILE": Path, "FILE|DIR": Path, "FRAC": float, "SECONDS": float, "H": float}
"""Types of values by metavar; others are text unless the verb states a type."""


def declare(parser: Any, text: str, **more: dict[str, Any]) -> None:
    """Add arguments declared as text to a parser or group: names, value, two spaces, help.

    Each argument begins a line; indented lines continue its help.  A name without a dash is a
    positional argument; an option without a value is a switch.  ``more`` has further keywords for
    ``add_argument`` by destination.

    >>> parser = argparse.ArgumentParser()
    >>> declare(parser, "file FILE  what is read\\n--top N  rows to show", top={"type": int})
    >>> parser.parse_args(["a.csv", "--top", "3"])
    Namespace(file=PosixPath('a.csv'), top=3)
    """
    for entry in re.split(r"\n(?=\S)", text.strip()):
        head, _, words = entry.partition("  ")
        names = [name for name in head.split() if name[:2] == "--"] or head.split()[:1]
        values = head.split()[len(names) :]
        dest = names[0].lstrip("-").replace("-", "_")
        spec: dict[str, Any] = {"help": " ".join(words.split()), **more.get(dest, {})}
        if values:
            spec["metavar"] = values[0] if len(values) == 1 else tuple(values)
            spec.setdefault("type", _TYPES.get(values[0], str))
        elif names[0][:2] == "--" and "action" not in spec:
            spec["action"] = "store_true"
        parser.add_argument(*names, **spec)


class VerbParser(argparse.ArgumentParser):
    """Parser whose errors are one line with a remedy."""

    def error(self, message: str) -> NoReturn:
        """Print the error to standard error and exit."""
        text = printable(f"{self.prog}: {message}; see {self.prog} --help")
        self.exit(ExitCode.USAGE, f"{text}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices
        if choices is not None and value not in choices:
            text = f"{shown(value)} is not a choice; {remedy(value, map(str, choices))}"
            raise argparse.ArgumentError(action, text)


def remedy(word: object, known: Iterable[str]) -> str:
    """Return a suggestion for an unknown word, else all known names."""
    names = [*known]
    return near(str(word), names) or f"there are {', '.join(names)}"


def near(word: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Return a question with the closest names; empty if none is close.

    >>> near("paln", ("plan", "predict"))
    'did you mean plan?'
    """
    import difflib  # only errors need it

    matches = difflib.get_close_matches(word, [*known], n=2, cutoff=cutoff)
    return f"did you mean {' or '.join(matches)}?" if matches else ""


def untaken_option_message(
    verbs: dict[str, argparse.ArgumentParser], verb: str, words: Sequence[str]
) -> str:
    """Return the error for an unknown option: the closest one, or the verbs that take it."""
    from ...calib.workload.choices import NAMED_CHOICES
    from ..options.launch_scripts import script_hint

    taken = {name: set(sub._option_string_actions) for name, sub in verbs.items()}
    option = next((word for word in words if word[:1] == "-"), "")
    if not option:
        return script_hint(words) or f"{verb} takes no {' '.join(words)}; see forerun {verb} --help"
    name = option.partition("=")[0]
    axis = name.removeprefix("--")
    if verb == "plan" and axis in {name for one in NAMED_CHOICES for name in one.names}:
        return f"plan takes no {name}; write --keep {axis}=VALUE for such layouts alone"
    others = [one for one, options in taken.items() if name in options]
    if hint := near(name, taken[verb], cutoff=0.6):
        return f"{verb} takes no {name}; {hint}"
    there = f"{', '.join(others)} {'do' if others[1:] else 'does'}; " if others else ""
    return f"{verb} takes no {name}; {there}see forerun {verb} --help"


def add_schema(sub: argparse.ArgumentParser, name: str) -> None:
    """Add ``--json-schema`` for a verb whose answers are described by the schema of this name."""
    text = "print the JSON Schema of --json and exit"
    path = FOLDER / f"{name}.schema.json"
    sub.add_argument("--json-schema", action=_Print, nargs=0, const=path, help=text)


def add_file_schema(sub: argparse.ArgumentParser) -> None:
    """Add ``--json-schema FILE`` for the files that a run writes, by name."""
    text = f"print the JSON Schema of a file of a run and exit: {', '.join(FILE_NAMES)}"
    names = sorted(FILE_NAMES)
    sub.add_argument("--json-schema", action=_Print, choices=names, metavar="FILE", help=text)


class _Print(argparse.Action):
    """Prints a schema and exits, as ``--help`` does."""

    def __call__(
        self, parser: argparse.ArgumentParser, _: Any, values: Any, __: Any = None
    ) -> None:
        if self.const is not None:
            print(self.const.read_text(encoding="utf-8"), end="")
        else:
            print(json.dumps(file_schema(values), indent=2))
        parser.exit()


def file_schema(name: str) -> dict[str, Any]:
    """Return the schema of a file, draft 2020-12, with only the definitions that it refers to.

    ``name`` is one of ``FILE_NAMES``, such as ``decision`` for ``decision.json``; for
    ``forecasts.jsonl`` the schema describes one line.  The number at the end of ``$id`` is the
    file's ``schema``.
    """
    whole, answers = (json.loads(path.read_text(encoding="utf-8")) for path in (FILES, ANSWERS))
    known = answers["$defs"] | whole["$defs"]
    used: dict[str, Any] = {}
    waiting = [name]
    while waiting:
        if (one := waiting.pop()) not in used:
            used[one] = known[one]
            waiting += _references(known[one])
    return {
        "$schema": whole["$schema"],
        "$id": f"urn:forerun:{name}:{known[name]['properties']['schema']['const']}",
        "title": known[name]["description"],
        "description": whole["description"].rpartition(" What is not")[0],
        "$ref": f"#/$defs/{name}",
        "$defs": {one: used[one] for one in sorted(used)},
    }


def _references(value: Any) -> Iterator[str]:
    """Yield the names of definitions that a schema refers to."""
    if isinstance(value, dict):
        if isinstance(reference := value.get("$ref"), str):
            yield reference.rpartition("/")[2]
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        yield from _references(one)
