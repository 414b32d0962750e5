"""Every command of the pages is run on one calibrated directory, or says what it needs."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from forerun.launch.cli import ExitCode, build_parser, main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GOLDEN = ROOT / "tests" / "golden"
NEEDS = ("gpu", "cluster", "network")
OWN_TESTS = (
    "cluster", "diff", "explain", "lint", "measured-elsewhere", "plan", "python", "throughput",
)  # fmt: skip
"""Pages of questions: each command is taken by its parser here, and held by a test of its own."""
_STARTS = re.compile(r"(\w+=\S+ )*(forerun|torchrun|pip|make|sbatch|kubectl|bash|python|wandb) ")
_FENCE = re.compile(r"^```(sh|bash)$\n(.*?)^```$", re.M | re.S)
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?: {4}.+\n)+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Lines of a shell on a page, and what they need by the comment before them."""

    page: str
    lines: tuple[str, ...]
    needs: str


def blocks() -> list[Block]:
    found = []
    for path in sorted(DOCS.rglob("*.md")):
        page = str(path.relative_to(DOCS))
        if page.startswith(("reference/", "extending/")):
            continue
        text = path.read_text(encoding="utf-8")
        for match in (*_FENCE.finditer(text), *_INDENTED.finditer(text)):
            lines = [line.strip() for line in match[match.lastindex or 0].splitlines()]
            if not _STARTS.match(lines[0] + " "):
                continue
            before = text[: match.start()].rstrip().rpartition("\n")[2]
            needs = re.fullmatch(r"<!-- needs: (\w+) -->", before)
            shown = tuple(re.sub(r"\s+#.*", "", line) for line in lines if line)
            found.append(Block(page=page, lines=shown, needs=needs[1] if needs else ""))
    return found


BLOCKS = blocks()
RUN = [
    (block.page, line)
    for block in BLOCKS
    if not block.needs and block.page.removesuffix(".md") not in OWN_TESTS
    for line in block.lines
]
TAKEN = [
    (block.page, line)
    for block in BLOCKS
    if not block.needs and block.page.removesuffix(".md") in OWN_TESTS
    for line in block.lines
]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run and forecasts of runs that have ended, analysed once for all commands."""
    home = tmp_path_factory.mktemp("docs") / "quickstart-out"
    shutil.copytree(GOLDEN / "cpu_dp2", home)
    shutil.copy(GOLDEN / "megatron_forecasts" / "forecasts.jsonl", home)
    return home


@pytest.mark.parametrize(("page", "line"), RUN)
def test_a_command_answers(
    page: str, line: str, calibrated: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program, *argv = shlex.split(line)
    assert program == "forerun", f"{page}: {line} is run by nothing; say what it needs"
    stands_for = {"DIR": calibrated, "quickstart-out": calibrated}
    written = {word: calibrated.with_name(word) for word in argv if word.endswith(".json.gz")}
    words = [str((stands_for | written).get(word, word)) for word in argv]
    assert main(words) == ExitCode.ANSWER, capfd.readouterr().err


@pytest.mark.parametrize(("page", "line"), TAKEN)
def test_a_command_of_a_question_is_taken(page: str, line: str) -> None:
    program, *argv = shlex.split(line.partition(" > ")[0])
    assert program == "forerun", f"{page}: {line} is run by nothing; say what it needs"
    words = argv[: [*argv, "--"].index("--")]
    assert build_parser(words).parse_args(words).verb == argv[0]


def test_what_a_block_needs_is_one_of_three() -> None:
    assert {block.needs for block in BLOCKS} <= {"", *NEEDS}
    assert len(RUN) > 12 and len(TAKEN) > 12


def test_every_recipe_that_is_shown_is_there() -> None:
    shown = [
        name
        for path in DOCS.rglob("*.md")
        for name in re.findall(r"^--8<--\n(\S+)\n--8<--$", path.read_text("utf-8"), re.M)
    ]
    assert len(shown) > 6 and all((ROOT / name).is_file() for name in shown)


def test_make_targets_that_are_named_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {line.split()[1] for block in BLOCKS for line in block.lines if line[:5] == "make "}
    assert named and all(re.search(rf"^{name}:", makefile, re.M) for name in named)


def said() -> str:
    """All text of the code; what is filled in is an ellipsis."""
    found = []
    for room in ("_forerun_autoload.py", "calib", "hooks", "launch"):
        paths = [ROOT / room] if room.endswith(".py") else sorted((ROOT / room).rglob("*.py"))
        for path in paths:
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [getattr(one, "value", "…") for one in node.values]
                    found.append("".join(one if isinstance(one, str) else "…" for one in parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def test_each_message_of_troubleshooting_is_said_by_the_code() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `([^`]+)`(?: at .*?)? \|", page, re.M)
    text = re.sub(r"%[sd]", "…", said())
    missing = [
        message
        for message in told
        for part in message.split("…")
        if len(part.strip()) > 3 and part.strip(" ;,") not in text
    ]
    assert len(told) > 40 and not missing


def test_the_page_of_figures_stays_short() -> None:
    assert len((DOCS / "accuracy.md").read_text("utf-8").splitlines()) <= 120
