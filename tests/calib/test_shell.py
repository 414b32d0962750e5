"""Words and variables as real shells take them: what is said is passed, nothing else happens."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.calib.arguments.launch_words import plain, variables, with_blanks
from forerun.calib.errors import ConfigError
from forerun.calib.shell import assigned, joined, printable, quoted, required, without_others

ROOT = Path(__file__).parents[2]
SHELLS = [name for name in ("sh", "bash") if shutil.which(name)]
SAYS = """import json, os, sys
said = [[k.hex(), v.hex()] for k, v in sorted(os.environb.items())]
print(json.dumps([said, [os.fsencode(word).hex() for word in sys.argv[1:]]]))
"""
HOSTILE = (
    *("X=1; touch PWNED; Y", "$(touch PWNED)", "`touch PWNED`", "A\ntouch PWNED\n", "-n", ""),
    *(
        'it\'s "it" \\ $HOME !x %s %%',
        "\x1b]0;x\x07",
        "\u202eab\u202c",
        "tab\there",
        "end\n\n",
        "\n",
    ),
    *("{a,b}", "~", "*", "a=b", "#", "\udcff\udce9", "PWNED; touch PWNED", "a&touch PWNED&", "\0"),
)
TEXTS = st.sampled_from(HOSTILE) | st.text(max_size=8) | st.binary(max_size=8).map(os.fsdecode)
NAMES = TEXTS | st.sampled_from(("A", "_B", "IFS", "LC_X")) | st.from_regex(r"[A-Za-z_]\w{3,8}\n?")
# Variables that a shell itself writes, reads before the program, or forbids.
OF_SHELLS = {"PATH", "PWD", "OLDPWD", "SHLVL", "_", "UID", "EUID", "PPID", "OPTIND", "LC_CTYPE"}


def run_in_shell(
    shell: str, command: str, home: Path
) -> tuple[dict[bytes, bytes], tuple[bytes, ...], list[str]]:
    """Variables and words of the program that a shell starts, and files that came to be."""
    home.mkdir(exist_ok=True)
    base_environ = {"PATH": os.environ["PATH"], "HOME": "/nowhere"}
    done = subprocess.run(
        [shell, "-euc", command], capture_output=True, cwd=home, env=base_environ, check=True
    )
    printed, words = json.loads(done.stdout)
    seen = {bytes.fromhex(name): bytes.fromhex(value) for name, value in printed}
    shell_variables = {os.fsencode(name) for name in (*base_environ, *OF_SHELLS)}
    new = {name: value for name, value in seen.items() if name not in shell_variables}
    return new, tuple(map(bytes.fromhex, words)), sorted(os.listdir(home))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("shell")
    (home / "says.py").write_text(SAYS)
    (home / "cwd").mkdir()
    return home


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
@settings(max_examples=25)
@given(environment=st.dictionaries(NAMES, TEXTS, max_size=4), words=st.lists(TEXTS, max_size=3))
def test_a_shell_sets_the_variables_and_passes_the_words_and_does_nothing_else(
    home: Path, shell: str, environment: dict[str, str], words: list[str]
) -> None:
    """In front of a command, and by ``env`` as in scripts."""
    accepted, notes = without_others(environment)
    accepted = {name: value for name, value in accepted.items() if name not in OF_SHELLS}
    assert len(notes) == sum(
        not is_valid_variable(name, value) for name, value in environment.items()
    )
    assert all(note.isprintable() for note in notes)
    words = [word for word in words if can_be_passed(word)]
    front = [phrase.shell for phrase in variables(accepted)]
    program = joined([sys.executable, "-IS", str(home / "says.py"), *words])
    wanted = {os.fsencode(name): os.fsencode(value) for name, value in accepted.items()}
    for start in ([], ["exec env"]):
        command = " ".join([*start, *front, program])
        assert command.isprintable()
        result, printed_words, files = run_in_shell(shell, command, home / "cwd")
        assert (result, printed_words, files) == (wanted, tuple(map(os.fsencode, words)), [])


def is_valid_variable(name: str, value: str) -> bool:
    """By the standard's own words, and what ``execve`` takes."""
    letters = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
    is_name = bool(name) and name[0] in letters and set(name) <= letters | set("0123456789")
    return is_name and name != "IFS" and can_be_passed(value)


def can_be_passed(word: str) -> bool:
    try:
        return b"\0" not in os.fsencode(word)
    except UnicodeEncodeError:
        return False


def is_no_blank(word: str) -> bool:
    return can_be_passed(word) and "***" not in word


@pytest.mark.parametrize("shell", SHELLS)
@settings(max_examples=30)
@given(option=TEXTS.filter(is_no_blank), value=TEXTS.filter(can_be_passed).filter(bool))
def test_a_blank_is_asked_for_in_words_that_do_nothing(
    home: Path, shell: str, option: str, value: str
) -> None:
    """The hint names the option, which anybody may have written; the value is the user's."""
    masked = with_blanks([f"--{option}***", f"--x{option}", "***"])
    command = joined([sys.executable, "-IS", str(home / "says.py")])
    command += "".join(f" {word.shell}" for word in masked)
    assert command.isprintable()
    stopped = subprocess.run([shell, "-uc", command], capture_output=True, cwd=home / "cwd")
    assert stopped.returncode != 0 and b"not kept" in stopped.stderr
    assert os.listdir(home / "cwd") == []
    names = [word.blank.name for word in masked if word.blank is not None]
    given = " ".join(assigned(name, value) for name in dict.fromkeys(names))
    _, printed_words, files = run_in_shell(shell, f"export {given}\n{command}", home / "cwd")
    parts = [f"--{option}***".replace("***", value), f"--x{option}", value]
    assert files == [] and printed_words == tuple(map(os.fsencode, parts))


@pytest.mark.parametrize("name", ["", "1A", "A B", "A=1; touch PWNED; B", "é", "A\n", "\x1b[1m"])
def test_a_name_that_no_shell_takes_is_refused_where_it_would_be_written(name: str) -> None:
    for write in (assigned, required):
        with pytest.raises(ConfigError) as exception_info:
            write(name, "x")
        assert str(exception_info.value).isprintable() and printable(name) in str(
            exception_info.value
        )


def test_a_word_that_no_process_is_given_is_refused() -> None:
    for word in ("a\0b", "\ud800"):
        with pytest.raises(ConfigError, match="cannot be a word of a command"):
            quoted(word + "\n")


def test_words_that_need_no_quotes_have_none() -> None:
    assert joined(["t.py", "--lr", "1e-4", "a=b", "x y"]) == "t.py --lr 1e-4 a=b 'x y'"
    assert [word.shell for word in plain(("a", "é"))] == ["a", "é".join("''")]


def texts(tree: ast.AST) -> Sequence[str]:
    generator = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [text for text in generator if isinstance(text, str)]


def test_only_one_file_knows_how_a_shell_quotes() -> None:
    """Whatever is written for a shell goes through ``calib.shell``."""
    wrong = []
    for folder in ("calib", "hooks", "launch", "recipes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path in (ROOT / "calib" / "shell.py", ROOT / "calib/arguments/shell_text.py"):
                continue  # the second reads what others have written
            tree = ast.parse(path.read_text(encoding="utf-8"))
            named = {
                alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names
            }
            named |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
            quotes = "shlex" in named or any(
                text.startswith(("export ", "$'", "${")) for text in texts(tree)
            )
            wrong += [path.relative_to(ROOT).as_posix()] * quotes
    assert not wrong
