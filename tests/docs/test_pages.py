"""Every command of the pages is run as it stands, or says what it needs and is read with care."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from page_commands import DOCS, ROOT, Command, commands, placeholder_directories

from forerun.calib.workload.run_options import options
from forerun.launch.cli import ExitCode, build_parser, main
from forerun.launch.options.flags import parse, split

pytestmark = pytest.mark.nightly

NEEDS = ("gpu", "cluster", "network")
COMMANDS = [*commands()]
RUN = [one for one in COMMANDS if not one.needs and one.words[0] == "forerun"]
TRAINED = [one for one in COMMANDS if not one.needs and one.words[0] == "torchrun"]
"""By ``test_trained_pages.py``."""
UNRUNNABLE = [one for one in COMMANDS if one.needs]


def command_id(one: Command) -> str:
    return f"{one.page}: {one.line}"


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Directories that commands read, analysed once for all of them."""
    return placeholder_directories(tmp_path_factory.mktemp("docs"))


@pytest.mark.parametrize("one", RUN, ids=command_id)
def test_a_command_answers(
    one: Command,
    homes: dict[str, dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    names = homes.get(one.page, homes[""])
    words = [
        re.sub(r"^\w+(?=@|$)", lambda m: names.get(m[0], m[0]), word) for word in one.words[1:]
    ]
    words = [names.get(word, word) for word in words]
    code, (out, err) = main(words), capfd.readouterr()
    assert code == ExitCode.ANSWER and out, err


def test_each_command_is_run_or_says_what_it_needs() -> None:
    assert len(RUN) > 30 and len(TRAINED) > 4
    assert {one.needs for one in UNRUNNABLE} == {*NEEDS}
    assert [one for one in COMMANDS if one not in (*RUN, *TRAINED, *UNRUNNABLE)] == []


@pytest.mark.parametrize("one", [pytest.param(one, id=command_id(one)) for one in UNRUNNABLE])
def test_a_command_that_cannot_run_here_is_one(one: Command) -> None:
    """As much of it as can be held against what there is."""
    words = [*one.words]
    while re.match(r"\w+=", words[0]):
        words.pop(0)
    program, *words = words
    known = {"torchrun": _torchrun, "pip": _pip, "make": _make}
    known |= dict.fromkeys(("srun", "mpirun", "accelerate", "python"), _launch)
    known.get(program, _file)(words)


def _launch(words: list[str]) -> None:
    """A launch of another's program, whose only word of ours is a flag."""
    flag_split = split(words)
    assert flag_split.flags and not [word for word in flag_split.rest if "calibrate" in word]


def _torchrun(words: list[str]) -> None:
    """Its own words are torchrun's, ours are ours, and none is left over."""
    launcher = pytest.importorskip("torch.distributed.run").get_args_parser()
    launch = launcher.parse_args(words)
    if launch.module and launch.training_script == "forerun":
        assert build_parser().parse_args(launch.training_script_args).verb == "probe"
        return
    assert not launch.module or launch.training_script == "forerun.launch"
    flag_split = split(launch.training_script_args)
    assert flag_split.flags and not [word for word in flag_split.rest if "calibrate" in word]
    parse(flag_split.flags, {"RANK": "0", "WORLD_SIZE": "1"}, (), ())
    if (script := launch.training_script).startswith("recipes/"):
        assert (ROOT / script).is_file()


def _pip(words: list[str]) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    name, _, extra = words[-1].rstrip("]").partition("[")
    assert words[0] == "install" and Path(name).name == setup["metadata"]["name"]
    assert not extra or extra in setup["options.extras_require"]


def _make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert words and all(re.search(rf"^{name}:", text, re.M) for name in words)


def _file(words: list[str]) -> None:
    """A script that bash reads, or objects of a cluster; ``tests/recipes`` hold what is in them."""
    path = ROOT / words[-1]
    if path.suffix == ".yaml":
        results = [*yaml.safe_load_all(path.read_text("utf-8"))]
        assert results and all({"apiVersion", "kind"} <= one.keys() for one in results)
    else:
        subprocess.run(["bash", "-n", str(path)], check=True)


INLINE = [
    (str(path.relative_to(DOCS)), span)
    for path in sorted(DOCS.rglob("*.md"))
    for span in re.findall(r"`(forerun [a-z][^`]*)`", path.read_text("utf-8"))
]


def test_a_command_within_a_sentence_has_a_verb_and_options_that_there_are() -> None:
    verbs = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    wrong = []
    for page, span in INLINE:
        words = span.partition(" -- ")[0].split()
        known = {name for one in verbs[words[1]]._actions for name in one.option_strings}
        wrong += [
            (page, span) for word in words[2:] if word[:2] == "--" and word not in {"--", *known}
        ]
    assert len(INLINE) > 40 and not wrong


def test_a_flag_within_a_sentence_is_one() -> None:
    verbs = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    others = {
        name for verb in verbs.values() for one in verb._actions for name in one.option_strings
    }
    known = {f"--calibrate-{flag.name}" for flag, _ in options()} | others
    named = {
        (path.name, name)
        for path in DOCS.rglob("*.md")
        for name in re.findall(r"--calibrate-[a-z-]*[a-z]", path.read_text("utf-8"))
    }
    assert len(named) > 20 and not [one for one in named if one[1] not in known]


def test_every_recipe_that_is_shown_is_there() -> None:
    shown = [
        name
        for path in DOCS.rglob("*.md")
        for name in re.findall(r"^--8<--\n(\S+)\n--8<--$", path.read_text("utf-8"), re.M)
    ]
    assert len(shown) > 6 and all((ROOT / name).is_file() for name in shown)


def code_text() -> str:
    """All text of the code; what is filled in is an ellipsis."""
    results = []
    for folder in ("_forerun_autoload.py", "calib", "hooks", "launch", "recipes/stand_in_cuda"):
        paths = [ROOT / folder] if folder.endswith(".py") else sorted((ROOT / folder).rglob("*.py"))
        for path in paths:
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [getattr(one, "value", "…") for one in node.values]
                    results.append("".join(one if isinstance(one, str) else "…" for one in parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    results.append(node.value)
    return "\n".join(results)


def test_each_message_of_troubleshooting_is_said_by_the_code() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)`(?: at .*?)? \|", page, re.M)
    text = re.sub(r"%[sd]", "…", code_text())
    missing = [
        message
        for message in messages
        for part in message.split("…")
        if len(part.strip()) > 3 and part.strip(" ;,") not in text
    ]
    assert len(messages) > 40 and not missing


def test_the_page_of_figures_stays_short() -> None:
    assert len((DOCS / "accuracy.md").read_text("utf-8").splitlines()) <= 120
