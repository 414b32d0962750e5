"""Commands of scripts, against what bash itself hands to a program."""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.arguments.shell_text import commands
from forerun.calib.errors import ConfigError

PLAIN = {
    "variables": 'N=2\nH=$((N * 64))\nprobe --layers $N --hidden "${H}" --heads ${HEADS:-4}',
    "arrays": 'A=(\n  --lr 1e-4  # a rate\n  --path "a b"\n)\nA+=(--bf16)\nprobe "${A[@]}" ${A[@]}',
    "text of options": 'O=" \\\n  --a 1 \\\n  --b 2"\nO+=" --c 3"\nprobe $O "$O" \'$O\'',
    "continued lines": "probe --a \\\n  1 --b \\\n  2; probe second",
    "defaults": 'X=${X:-7}\nY=${Z:-$X}\nexport W="${Y}0"\nprobe $X $Y $W',
    "a text in a text": 'C="probe --a 1"\nB="$C --b 2"\n$B --c 3',
    "arrays in a text": 'A=(--a 1)\nC="probe ${A[@]} --b"\n$C',
    "arithmetic": "G=8\nM=4\nprobe $((G*M)) $(( $G / $M )) $((G-M))",
    "comments": "# A=1\nA=2 # A=3\nprobe a#b $A # last",
    "a text for another shell": "export C='probe --a 1' R=3\nbash -c '$C --rank $R'",
    "a text for another shell, filled in": 'C="probe --a"\nbash -c "$C 1 && probe 2"',
    "a text to be read a second time": 'C="probe --a \'b c\'"\neval "$C"\neval $C --d',
    "defaults that are assigned": ': "${S:=4096}" "${B:=$S}"\nprobe $S $B ${X:-${Y:-2}}',
    "here-documents": 'cat > /dev/null <<END\n{"don\'t": [1]}\nprobe no\nEND\nprobe a\n'
    "bash <<'END'\nprobe $((1+1))\nEND\nprobe c",
    "functions that are not called": "function f {\n probe no\n}\ng() {\n probe no\n}\nprobe a",
    "functions": 'N=2\nfunction wide {\n  H=$(($1 * 64))\n  probe --hidden $H "${@:2}"\n}\n'
    "run()\n{\n  if [ $# -gt 1 ]; then\n    probe $# $1 $N\n    shift\n    probe ${@:1:1}\n  fi\n"
    "  N=4 # {\n}\nwith() { \"$@\"; }\nrun a b; run c\nwide 8 --x 'y z'\nwith probe $N $H",
    "functions that other shells have": "run() { probe a $1; }\nexport -f run\nbash -c 'run 1'",
    "functions of functions": "a() { probe a $1; }\nb() { a $2; probe b $1; a $1; }\nb 1 2\nb 3",
    "parts of lists": 'A=(1 2 3 4)\nprobe "${A[@]:1}" ${A[@]:1:2} "${A[@]: 3}"',
    "a case": "S=8B N=2\ncase $S in\n  800M)\n    L=1 ;;\n  8B|'70B') L=32\n    "
    "H=4 # wide\n    ;;\n  *) L=0;; esac\n"
    "case x$N in x1 ) N=7;; (x[2-3]) N=8;; *) N=9 ;; esac; probe $L $H $N",
    "elements of an array": "A=(1 2 4)\nI=1\nprobe ${A[0]} ${A[$I]} ${A[I+1]}",
    "redirections": "A='<b>'\nprobe a 2>&1 '<audio>,1' \"2>x\" $A 2> /dev/null c <&0 d>&1 e",
    "joined words": 'D=/data\nprobe --path=$D/x:${D}/y --q="$D z"',
}


def of_bash(script: str, *arguments: str) -> list[tuple[str, ...]]:
    """The words of each call of ``probe``, as bash expands them."""
    shown = "probe() { printf '%s\\0' probe \"$@\"; printf '\\n'; }\nexport -f probe\n"
    done = subprocess.run(
        ["bash", "-c", shown + script, "run.sh", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={},
    )
    return [tuple(line.split("\0")[:-1]) for line in done.stdout.splitlines()]


def ours(script: str) -> list[tuple[str, ...]]:
    return [one for one in commands(script) if one[0] == "probe"]


@pytest.mark.parametrize("script", PLAIN.values(), ids=PLAIN)
def test_plain_expansions_are_as_bash_makes_them(script: str) -> None:
    expected = of_bash(script)
    assert expected and ours(script) == expected


@pytest.mark.parametrize("arguments", [(), ("a",), ("--lr", "1 2", "c")])
def test_arguments_are_as_bash_passes_them(arguments: tuple[str, ...]) -> None:
    script = 'probe "$@" --n $# $@\nif [ $# -gt 1 ]; then\n  shift\nfi\nprobe "$@" $# "${2:-x}"'
    given = {"#": str(len(arguments)), **{str(n): one for n, one in enumerate(arguments, 1)}}
    results = [one for one in commands(script, given) if one[0] == "probe"]
    assert results == of_bash(script, *arguments)


_TEXT = st.text("abz019/-.= \"'$#", max_size=12)


@given(st.lists(_TEXT, min_size=1, max_size=5))
def test_quoted_words_come_back_as_they_are(words: list[str]) -> None:
    quoted = ["'" + word.replace("'", "'\\''") + "'" for word in words]
    results = ours(f'A=({" ".join(quoted)})\nprobe "${{A[@]}}"')
    assert results == [("probe", *(word for word in words if word))]


_SMALL = 'a 7 / - _ . : = , + % @ $A ${A} $B/ _$B. $1 \'$A\' "$A" "x$A/$B.z" \\$ ${L[1]} ${C:-$B}'
_PIECES = st.sampled_from(
    (*_SMALL.split(), "'q r'", '"$A $B"', '"${L[@]}"', "$((N*2))", "\\ ", "\\\n", "${C:-z}", '""')
)
_JOINED_NAME = re.compile(r"\$A\w")
"""A variable that nobody has set, which stays as it is written."""
_WORDS = (
    st.lists(_PIECES, min_size=1, max_size=6)
    .map("".join)
    .filter(lambda word: not _JOINED_NAME.search(word))
)


@pytest.mark.slow
@given(st.lists(_WORDS, min_size=1, max_size=3))
def test_any_joined_pieces_are_the_words_of_bash(words: list[str]) -> None:
    start = f"set -- one\nA=x.y\nB='p q'\nN=4\nL=(u 'v w')\nV={words[0]}\n"
    script = start + f'probe "$V" {" ".join(words)} | cat'
    expected = [tuple(word for word in call if word) for call in of_bash(f"set -f\n{script}")]
    assert [
        one for one in commands(script, {"#": "1", "1": "one"}) if one[0] == "probe"
    ] == expected


def test_what_only_a_run_can_tell_stays_as_it_is_written() -> None:
    text = 'if [ $X = 1 ]; then\n  LR=1\nelse\n  LR=2\nfi\nprobe --lr $LR --at $(pwd) "$1" `date`'
    assert ours(text) == [("probe", "--lr", "$LR", "--at", "$(pwd)", "$1", "`date`")]
    case = "case $X in\n  a) probe no;;\n  *) N=1;;\nesac\nprobe $N"
    assert ours(case) == [("probe", "$N")]
    loop = "for n in 1 2; do\n  probe $n\ndone\nprobe last"
    assert ours(loop) == [("probe", "last")]


def test_directives_of_slurm_are_its_variables() -> None:
    text = "#SBATCH --nodes=8\n#SBATCH --gpus-per-node=4\nprobe $SLURM_NNODES $SLURM_JOB_NUM_NODES"
    assert ours(text) == [("probe", "8", "8")]
    assert commands(text, {"SLURM_NNODES": "2"})[-1] == ("probe", "2", "8")


def test_steps_of_a_job_have_its_tasks() -> None:
    """Slurm's sbatch sets SLURM_NTASKS to nodes times --ntasks-per-node; srun starts as many."""
    text = "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\nsrun probe $SLURM_NTASKS"
    assert commands(text) == [("SLURM_NTASKS=16", "SLURM_NTASKS_PER_NODE=8", "srun", "probe", "16")]
    assert commands(text, {"SLURM_NNODES": "4"})[0][-1] == "32"
    text = "#SBATCH --gres=gpu:a100:4\nprobe $SLURM_GPUS_ON_NODE"
    assert ours(text) == [("probe", "4")]


def test_a_branch_that_the_text_settles_is_followed() -> None:
    """As in Megatron-LM's own examples/llama/train_llama3_8b_h100_fp8.sh."""
    text = (
        'ARG=${3:-"MOCK"}\nOTHER="${4:-MOCK}"\nLIST=()\n'
        'if [[ "$ARG" == "MOCK" ]] || [[ "$OTHER" == "MOCK" ]] || [[ -z "$ARG" ]]; then\n'
        '  LIST+=("--mock-data" --vocab 8)\nelse\n  LIST+=(--tokenizer "$ARG")\nfi\n'
        "probe ${LIST[@]} $1"
    )
    assert ours(text) == [("probe", "--mock-data", "--vocab", "8", "$1")]
    given = {"1": "a", "3": "path", "4": "data"}
    assert [one for one in commands(text, given) if one[0] == "probe"] == [
        ("probe", "--tokenizer", "path", "a")
    ]
    called = "X=1\ns() { X=2; }\nif [ -f a ]; then s; fi\nprobe $X"
    assert ours(called) == [("probe", "$X")]
    assert ours("f() { f; }\nf\nprobe $1") == [("probe", "$1")]
    calls = "\n".join(
        ["f() { :; }", *(f"{b}() {{\n{a}\n" + f"{a}\n" * 999 + "}" for a, b in ("fg", "gh", "hi"))]
    )
    assert ours(f"{calls}\ni\nprobe a") == [("probe", "a")]
    assert ours("X=1\n[[ -f a ]] && X=2\nprobe $X") == [("probe", "$X")]
    assert ours("X=1\n[[ $X == 1 ]] &&\n  X=2\nprobe $X") == [("probe", "2")]
    assert ours("cd dir && probe a || exit 1\nprobe b") == [("probe", "a"), ("probe", "b")]


_VALUES = st.sampled_from(["a", "b", "7", "10", ""])
_SIGNS = st.sampled_from(["=", "==", "!="])
_TESTS = st.one_of(
    st.builds('[[ "${}" {} "{}" ]]'.format, st.sampled_from("XY"), _SIGNS, _VALUES),
    st.builds('[ {} "${}" ]'.format, st.sampled_from(["-z", "-n", "! -z"]), st.sampled_from("XY")),
    st.builds(
        "[ 8 {} {} ]".format, st.sampled_from(["-eq", "-ne", "-lt", "-ge"]), st.integers(7, 9)
    ),
    st.sampled_from(["true", "false", "! true"]),
)
_CONDITIONS = st.lists(_TESTS, min_size=1, max_size=3).flatmap(
    lambda tests: st.lists(
        st.sampled_from([" && ", " || "]), min_size=len(tests) - 1, max_size=len(tests) - 1
    ).map(lambda signs: tests[0] + "".join(s + t for s, t in zip(signs, tests[1:], strict=True)))
)
_BODIES = st.sampled_from(["probe a", 'X="b"', "Y=7; probe $X", "L+=(--l $Y)"])


@st.composite
def _chosen(draw: st.DrawFn, depth: int = 2) -> str:
    body = _BODIES if depth == 0 else st.one_of(_BODIES, _chosen(depth=depth - 1))
    text = f"if {draw(_CONDITIONS)}; then\n{draw(body)}\n"
    for _ in range(draw(st.integers(0, 2))):
        text += f"elif {draw(_CONDITIONS)}\nthen\n  {draw(body)}\n"
    text += f"else\n{draw(body)}\n" if draw(st.booleans()) else ""
    return f"{text}fi\n{draw(_CONDITIONS)} && X=10\n{draw(_TESTS)} || {draw(_BODIES)}"


@pytest.mark.slow
@given(st.lists(_chosen(), min_size=1, max_size=3), _VALUES, _VALUES)
def test_branches_are_taken_as_bash_takes_them(parts: list[str], x: str, y: str) -> None:
    body = "\n".join(parts)
    script = f'X="{x}"\nY="{y}"\nL=()\n{body}\nprobe end "$X" "$Y" "${{L[@]}}"\ntrue'
    expected = [tuple(word for word in call if word) for call in of_bash(script)]
    assert ours(script) == expected


_CALLS = st.sampled_from(["f 1 2", "g x", 'g "$X" "a b"', "f", 'X=c; g $Y "z z"'])


@pytest.mark.slow
@given(_chosen(), _chosen(), st.lists(_CALLS, min_size=1, max_size=3), st.sampled_from("ab7"))
def test_functions_run_where_they_are_called(f: str, g: str, calls: list[str], x: str) -> None:
    inner = 'probe g "$#" "$1"\n' + g.replace("probe a", 'f "$2" q')
    body = f'f() {{\n{f}\nprobe f "$@"\n}}\nfunction g\n{{\n{inner}\n}}\n' + "\n".join(calls)
    script = f'X="{x}"\nY=7\nL=()\n{body}\nprobe end "$X" "$Y" "${{L[@]}}"\ntrue'
    expected = [tuple(word for word in call if word) for call in of_bash(script)]
    assert ours(script) == expected


def test_a_script_that_a_job_wraps_is_read() -> None:
    line = "sbatch -N 4 --gpus-per-node=8 {} 'srun probe --nodes $SLURM_NNODES'"
    for option in ("--wrap", "--wrap="):
        (words,) = commands(line.format(option).replace("= ", "="))
        assert words[-4:] == ("srun", "probe", "--nodes", "4")


@pytest.mark.parametrize("text", ["probe 'a", 'probe "a', "A=(1 2"])
def test_a_text_without_its_end_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no end"):
        commands(text)


@given(st.text("ab1 \n\"'$(){}[]=;&|#\\`*", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(ConfigError):
        commands(text)


@pytest.mark.parametrize("line", ['eval "$X"', 'bash -c "$X"', 'eval "$X$X"; eval "$X"'])
def test_a_script_that_holds_itself_ends(line: str) -> None:
    text = f"X='{line}'\n{line}\npython train.py --lr 1\n"
    result = commands(text, {})
    assert ("python", "train.py", "--lr", "1") in [words[-4:] for words in result]
