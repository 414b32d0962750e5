"""A device and a description of a run, and no directory: published measurements answer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from json_schema import check

from forerun.calib.arguments.megatron_command import config_from_command
from forerun.calib.arguments.option_words import options_of
from forerun.calib.fit.priors import device_prior
from forerun.calib.steps.model import FittedSteps
from forerun.launch.cli import ExitCode, main
from forerun.launch.known.machine_fits import device_machine
from forerun.launch.known.table_files import published_rows
from forerun.launch.verbs.arguments import ANSWERS
from forerun.launch.verbs.run_arguments import NO_DIRECTORY, with_directory_placeholder

H100 = "NVIDIA H100 80GB HBM3"
_LINE = (
    "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --bf16 --num-layers 24 "
    "--hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings "
    "2048 --micro-batch-size 2 --global-batch-size 64 --vocab-size 50304 "
    "--use-distributed-optimizer"
)
LINE = _LINE.split()
# Megatron-Bridge da871ee8, pull request 3880: 42.21 s on 16 H100s with ep 16, no graphs.
_QWEN3_30B = (
    "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --bf16 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--grad-reduce-in-bf16 --micro-batch-size 1 --global-batch-size 1024 --num-layers 48 "
    "--hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm --swiglu "
    "--seq-length 4096 --max-position-embeddings 40960 --vocab-size 151936 "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --normalization "
    "RMSNorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --num-experts "
    "128 --moe-ffn-hidden-size 768 --moe-router-topk 8 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-router-dtype fp32 "
    "--moe-router-force-load-balancing --expert-model-parallel-size 16"
)
QWEN3_30B = _QWEN3_30B.split()
LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
Out = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without a run, in which nothing may be written."""
    place = tmp_path / "empty"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def answer(capsys: Out, *words: str, line: list[str] | None = None) -> dict[str, Any]:
    command = ["--", *line] if line else []
    assert main([words[0], "--json", *words[1:], *command]) == ExitCode.ANSWER
    value = json.loads(capsys.readouterr().out)
    check(value, json.loads(ANSWERS.read_text(encoding="utf-8")))
    return value


def assert_modelled(nearest: str, steps: FittedSteps) -> None:
    """Names published runs of the device with the error of its own model for each."""
    stated_errors = re.findall(r"[,:] ([^,:]+? batch \d+) ([+-][\d.]+) %", nearest)
    assert len(stated_errors) == 3
    for name, percent in stated_errors:
        errors = [
            100 * (float(steps.median_times([row.config])[0]) / row.measured_s - 1)
            for row in published_rows()
            if row.group == name and device_prior(row.config.device).name == "h100"
        ]
        assert min(abs(error - float(percent)) for error in errors) < 0.06


def test_the_step_is_that_of_the_devices_data_sheet_and_says_so(nowhere: Path, capsys: Out) -> None:
    result = answer(capsys, "predict", "--device", "H100", line=LINE)
    config = config_from_command(LINE).config
    machine = device_machine(type(config).from_json({**config.to_json(), "device": H100}))
    (expected,) = machine.steps.estimates([machine.running])
    assert result["step_time_s"] == pytest.approx(expected.time_s, rel=1e-9)
    basis, _, nearest = result["basis"].partition("; ")
    assert basis == f"from published measurements of {H100}, no run of yours"
    assert_modelled(nearest, machine.steps)
    assert main(["predict", "--device", "H100", "--", *LINE]) == ExitCode.ANSWER
    assert result["basis"] in " ".join(capsys.readouterr().out.split())
    assert not [*nowhere.iterdir()]


def test_a_published_step_lies_in_the_interval(capsys: Out) -> None:
    result = answer(capsys, "predict", "--device", "H100", line=QWEN3_30B)
    assert result["low_s"] < 42.21 < result["high_s"]
    assert result["verdict"] != "does not fit"


@pytest.mark.parametrize(("device", "is_one"), [("GB200", True), ("GB300", True), ("H100", False)])
def test_hosts_that_nvlink_joins_are_one_node(capsys: Out, device: str, is_one: bool) -> None:
    """A command counts hosts; racks of GB200 and GB300 are one domain of NVLink each."""
    hosts = [*QWEN3_30B[:2], "4", "--nnodes", "4", *QWEN3_30B[5:]]
    whole = [*QWEN3_30B[:2], "16", "--nnodes", "1", *QWEN3_30B[5:]]
    steps = [
        answer(capsys, "predict", "--device", device, line=line)["step_time_s"]
        for line in (hosts, whole)
    ]
    assert (steps[0] == pytest.approx(steps[1], rel=1e-9)) is is_one


def test_a_checkpoint_is_no_directory_of_a_run(nowhere: Path) -> None:
    (nowhere / "iter_0001").mkdir()
    words = ["predict", "--device", "H100", "--config", "iter_0001"]
    assert with_directory_placeholder(words) == ["predict", NO_DIRECTORY, *words[1:]]
    assert with_directory_placeholder(["plan", "--device", "H100", "iter_0001"])[1] != NO_DIRECTORY


def test_options_complete_a_command_that_lacks_a_size(capsys: Out) -> None:
    """Mixtral of Megatron-LM's examples/mixtral leaves its vocabulary to a tokenizer's file."""
    place = LINE.index("--vocab-size")
    line = [*LINE[:place], *LINE[place + 2 :], "--tokenizer-type", "Llama2Tokenizer"]
    words = ["predict", "--device", "H100"]
    assert main([*words, "--", *line]) == ExitCode.USAGE
    assert "give --vocab-size" in capsys.readouterr().err
    assert main([*words, "--vocab-size", "50304", "--", *line]) == ExitCode.ANSWER
    completed = capsys.readouterr().out
    assert main([*words, "--", *LINE]) == ExitCode.ANSWER
    assert completed.splitlines()[0] == capsys.readouterr().out.splitlines()[0]


QWEN3_MOE = {
    **LLAMA_70B,
    **{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128},
    **{"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4},
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}


@pytest.mark.parametrize("option", ["--ep", "--expert-model-parallel-size"])
def test_options_beside_a_file_are_of_its_model(nowhere: Path, capsys: Out, option: str) -> None:
    file = nowhere.parent / "config.json"
    file.write_text(json.dumps(QWEN3_MOE))
    words = ["predict", "--device", "H100", "--gpus", "16", "--gbs", "512", "--config", str(file)]
    result = answer(capsys, *words, option, "16", "--seq", "4096")
    assert result["ep"] == 16 and "--expert-model-parallel-size" in result["options"]
    assert result["throughput"]["tokens_per_s"] * result["step_time_s"] == pytest.approx(512 * 4096)
    assert main([*words, option, "3"]) == ExitCode.USAGE
    assert "expert tp 1 x ep 3" in capsys.readouterr().err


def test_replicas_of_a_file_are_on_as_many_nodes_as_so_many_gpus(
    nowhere: Path, capsys: Out
) -> None:
    file = nowhere.parent / "config.json"
    file.write_text(json.dumps(LLAMA_70B))
    words = ["predict", "--device", "H100", "--gbs", "64", "--config", str(file)]
    steps = [
        answer(capsys, *words, *more)["step_time_s"] for more in (["--dp", "64"], ["--gpus", "64"])
    ]
    assert steps[0] == pytest.approx(steps[1], rel=1e-9)


@pytest.mark.parametrize("is_file", [False, True])
def test_short_names_complete_what_lacks_a_size(
    nowhere: Path, capsys: Out, *, is_file: bool
) -> None:
    """slime's lines state no length of a sample and no micro-batch."""
    line = LINE.copy()
    for option in ("--seq-length", "--micro-batch-size"):
        place = line.index(option)
        del line[place : place + 2]
    described = ["--", *line]
    if is_file:
        file = nowhere.parent / "run.json"
        given = options_of(line[line.index("pretrain_gpt.py") + 1 :])
        file.write_text(json.dumps({name: (words or [True])[0] for name, words in given}))
        described = ["--gpus", "16", "--config", str(file)]
    words = ["predict", "--json", "--device", "H100", "--sp", "off"]
    assert main([*words, *described]) == ExitCode.USAGE
    assert "--seq-length" in capsys.readouterr().err
    assert main([*words, "--seq", "2048", "--mbs", "2", *described]) == ExitCode.ANSWER
    completed = json.loads(capsys.readouterr().out)
    whole = answer(capsys, "predict", "--device", "H100", line=LINE)
    assert completed["step_time_s"] == pytest.approx(whole["step_time_s"], rel=1e-9)
