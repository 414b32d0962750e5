"""A described run whose options are not all modelled: no number, or one that says so."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from forerun.calib.arguments.megatron_options import ASIDE, LEFT_OUT
from forerun.launch.cli import ExitCode, main

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
LINE = (
    "torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 "
    "--global-batch-size 8 --vocab-size 128"
)
Out = pytest.CaptureFixture[str]
READ_ELSEWHERE = {"spec", "yaml_cfg", "is_hybrid_model", "decoder_num_layers"}
"""Names whose values are words of their own kind, or that have no option."""
OPTIONS = sorted(set(LEFT_OUT) - ASIDE - READ_ELSEWHERE)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    there = tmp_path_factory.mktemp("other") / "run"
    shutil.copytree(GOLDEN, there)
    return there


def asked(home: Path, *more: str, line: str = LINE, own: tuple[str, ...] = ()) -> int:
    return main(["predict", str(home), "--json", *own, "--", *line.split(), *more])


def predicted(home: Path, capsys: Out, *more: str, own: tuple[str, ...] = ()) -> dict:
    assert asked(home, *more, own=own) == ExitCode.ANSWER
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_not_modelled_has_no_number(home: Path, capsys: Out, name: str) -> None:
    option = f"--{name.replace('_', '-')}"
    assert asked(home, option, "2") == ExitCode.NO_DATA
    said = capsys.readouterr()
    assert not said.out and len(said.err.splitlines()) == 1
    assert option in said.err and "--anyway" in said.err


def test_anyway_answers_with_an_interval_that_is_wider_and_marked(home: Path, capsys: Out) -> None:
    plain = predicted(home, capsys)
    wide = predicted(home, capsys, "--optimizer", "muon", own=("--anyway",))
    assert wide["step_time_s"] == pytest.approx(plain["step_time_s"], rel=1e-6)
    widths = [math.log(one["high_s"] / one["low_s"]) / 2 for one in (plain, wide)]
    assert widths[1] >= math.hypot(widths[0], math.log(2))
    assert not plain["left_out"] and "optimizer" in " ".join(wide["left_out"])
    assert main(["predict", str(home), "--anyway", "--", *LINE.split(), "--optimizer", "muon"]) == 0
    said = capsys.readouterr()
    assert "factor of 2" in said.out and "optimizer" in said.err


@pytest.mark.parametrize("verb", [["plan"], ["explain", "running"]])
def test_other_verbs_say_no_number_either(home: Path, capsys: Out, verb: list[str]) -> None:
    words = [verb[0], str(home), *verb[1:]]
    command = ["--", *LINE.split(), "--optimizer", "muon"]
    assert main([*words, *command]) == ExitCode.NO_DATA
    assert "--anyway" in capsys.readouterr().err
    assert main([*words, "--anyway", *command]) == ExitCode.ANSWER


def test_an_option_of_no_parser_is_the_scripts_own(home: Path, capsys: Out) -> None:
    line = LINE.replace("pretrain_gpt.py", "train.py")
    assert asked(home, "--my-flag", "3", line=line) == ExitCode.NO_DATA
    assert "--my-flag" in (said := capsys.readouterr().err) and "--assume-no-effect" in said
    assumed = ("--assume-no-effect", "my-flag")
    assert asked(home, "--my-flag", "3", line=line, own=assumed) == ExitCode.ANSWER
    capsys.readouterr()
    more = ("--my-flag", "3", "--optimizer", "muon")
    assert asked(home, *more, line=line, own=assumed) == ExitCode.NO_DATA
    # The run's own script had it in its steps.
    assert asked(home, "--my-flag", "3") == ExitCode.ANSWER


FILE = (
    "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 32\n"
    "max_position_embeddings: 32\nmicro_batch_size: 1\nglobal_batch_size: 8\nvocab_size: 128\n"
)
NESTED = "modules:\n  pre_trainer:\n    framework: megatron\n    overrides:\n"


def file_of(folder: Path, line: str, *, is_nested: bool) -> Path:
    path, text = folder / "run.yaml", FILE + line + "\n"
    indented = "".join(f"      {one}\n" for one in text.splitlines())
    path.write_text("work_group: amd\n" + (NESTED + indented if is_nested else text))
    return path


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize(
    ("line", "is_answered"),
    [
        ("my_flag: 3", False),
        ("use_turbo_attention: true", False),
        ("use_turbo_attention: false", True),
        ("my_flag: null", True),
        ("stderr_sink_level: DEBUG", True),
        ("activation_func: swiglu", True),
        ("optimizer: muon", False),
    ],
)
def test_a_key_of_no_parser_is_as_an_option_of_none(
    home: Path, tmp_path: Path, capsys: Out, line: str, is_answered: bool, is_nested: bool
) -> None:
    path = file_of(tmp_path, line, is_nested=is_nested)
    words = ["predict", str(home), "--config", str(path)]
    assert main(words) == (ExitCode.ANSWER if is_answered else ExitCode.NO_DATA)
    name = line.partition(":")[0]
    if not is_answered:
        assert f"--{name.replace('_', '-')} is" in capsys.readouterr().err
        assert main([*words, "--anyway"]) == ExitCode.ANSWER
    if "muon" not in line:
        assert main([*words, "--assume-no-effect", name]) == ExitCode.ANSWER


@pytest.mark.parametrize("option", ["--log-params-norm", "--timing-log-level=2"])
def test_what_only_logs_is_named(home: Path, capsys: Out, option: str) -> None:
    assert asked(home, option) == ExitCode.ANSWER
    assert option.lstrip("-").partition("=")[0].replace("-", "_") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "said"),
    [("NCCL_PROTO=LL", "NCCL_PROTO (NCCL may"), ("NCCL_OF_TOMORROW=1", "NCCL_OF_TOMORROW is")],
)
def test_a_variable_that_is_not_modelled_has_no_number(
    home: Path, tmp_path: Path, capsys: Out, variable: str, said: str
) -> None:
    other, script = LINE.replace("pretrain_gpt.py", "train.py"), tmp_path / "run.sh"
    script.write_text(f"export {variable}\n{other}\n")
    for line in (f"{variable} {other}", f"env {variable} {other}", f"bash {script}"):
        assert asked(home, line=line) == ExitCode.NO_DATA
        assert said in capsys.readouterr().err
        assert asked(home, line=line, own=("--anyway",)) == ExitCode.ANSWER
    assert asked(home, line=f"NCCL_DEBUG=INFO {LINE}") == ExitCode.ANSWER


def test_doctor_prices_nothing_there(capsys: Out) -> None:
    words = ["doctor", "--device", "H100", "--", *LINE.split(), "--bf16", "--optimizer", "muon"]
    assert main(words) == ExitCode.ANSWER
    said = capsys.readouterr()
    assert "--optimizer" in said.err and "less per step" not in said.out
