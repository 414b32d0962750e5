"""A described run whose options are not all modelled: no number, or one that says so."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from forerun.calib.arguments.megatron_options import (
    ASIDE,
    MOVES_ALONE,
    SPELLED,
    UNMODELLED_SETTINGS,
)
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
OPTIONS = sorted(
    set(UNMODELLED_SETTINGS) - ASIDE - READ_ELSEWHERE - SPELLED.keys() - MOVES_ALONE["memory"]
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    there = tmp_path_factory.mktemp("other") / "run"
    shutil.copytree(GOLDEN, there)
    return there


def run_predict(
    home: Path, *more: str, line: str = LINE, verb_options: tuple[str, ...] = ()
) -> int:
    return main(["predict", str(home), "--json", *verb_options, "--", *line.split(), *more])


def predicted(home: Path, capsys: Out, *more: str, verb_options: tuple[str, ...] = ()) -> dict:
    assert run_predict(home, *more, verb_options=verb_options) == ExitCode.ANSWER
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_not_modelled_has_no_number(home: Path, capsys: Out, name: str) -> None:
    option = f"--{name.replace('_', '-')}"
    assert run_predict(home, option, "2") == ExitCode.NO_DATA
    output = capsys.readouterr()
    assert not output.out and len(output.err.splitlines()) == 1
    assert option in output.err and "--anyway" in output.err


def test_a_step_stays_where_an_option_moves_memory_alone(home: Path, capsys: Out) -> None:
    capacity = ("--device", "H100")
    plain = predicted(home, capsys, verb_options=capacity)
    option = "--megatron-fsdp-max-pool-double-buffer"
    answer = predicted(home, capsys, option, verb_options=capacity)
    assert [answer[n] for n in ("step_time_s", "low_s", "high_s")] == [
        plain[n] for n in ("step_time_s", "low_s", "high_s")
    ]
    # Twice as much would fit as well.
    assert plain["verdict"] == answer["verdict"] == "fits"
    assert answer["memory"]["open_nbytes"] > plain["memory"]["open_nbytes"]
    assert option in " ".join(answer["left_out"])


def test_a_layout_that_fits_by_less_than_a_factor_of_two_is_tight(home: Path, capsys: Out) -> None:
    line = LINE.replace("--num-layers 2 --hidden-size 64", "--num-layers 40 --hidden-size 4096")
    option, bf16 = "--megatron-fsdp-max-pool-double-buffer", "--bf16 --use-distributed-optimizer"
    for words, verdict in (((), "fits"), ((option,), "tight")):
        command = ["--", *line.replace("node 2", "node 8").split(), *bf16.split(), *words]
        assert main(["predict", str(home), "--json", "--device", "H100", *command]) == 0
        assert json.loads(capsys.readouterr().out)["verdict"] == verdict


def test_memory_stays_where_an_option_moves_time_alone(home: Path, capsys: Out) -> None:
    capacity = ("--device", "H100")
    assert run_predict(home, "--use-sharp", verb_options=capacity) == ExitCode.NO_DATA
    errors = capsys.readouterr().err
    assert "may change time, so" in errors and "; memory " in errors
    anyway = predicted(home, capsys, "--use-sharp", verb_options=(*capacity, "--anyway"))
    plain = predicted(home, capsys, verb_options=capacity)
    assert anyway["memory"] == plain["memory"]
    assert run_predict(home, "--use-sharp", "--optimizer", "muon") == ExitCode.NO_DATA
    assert "; memory " not in capsys.readouterr().err
    muon = predicted(home, capsys, "--optimizer", "muon", verb_options=(*capacity, "--anyway"))
    assert muon["memory"]["open_nbytes"] > plain["memory"]["open_nbytes"]


def test_anyway_answers_with_an_interval_that_is_wider_and_marked(home: Path, capsys: Out) -> None:
    plain = predicted(home, capsys)
    wide = predicted(home, capsys, "--optimizer", "muon", verb_options=("--anyway",))
    assert wide["step_time_s"] == pytest.approx(plain["step_time_s"], rel=1e-6)
    widths = [math.log(one["high_s"] / one["low_s"]) / 2 for one in (plain, wide)]
    assert widths[1] >= math.hypot(widths[0], math.log(2))
    assert not plain["left_out"] and "optimizer" in " ".join(wide["left_out"])
    assert main(["predict", str(home), "--anyway", "--", *LINE.split(), "--optimizer", "muon"]) == 0
    output = capsys.readouterr()
    assert "factor of 2" in output.out and "optimizer" in output.err


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
