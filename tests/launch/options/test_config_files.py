"""``--config FILE`` and ``-- COMMAND``: another run over a calibration."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden_copies import golden_copy
from model_options import model_options

from forerun.calib.arguments.megatron_args import apply_options, options
from forerun.calib.arguments.megatron_command import config_from_command
from forerun.calib.errors import ConfigError
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.calib.workload.config import Precision, RunConfig
from forerun.launch.cli import ExitCode, main
from forerun.launch.options.config_files import read_config

GOLDEN = golden_copy("cpu_dp2")
ARGUMENTS = """
MODEL_ARGS:
  --num-layers: 4
  --hidden-size: 64
  --num-attention-heads: 4
  --seq-length: 64
  --micro-batch-size: 2
  --global-batch-size: 16
  --vocab-size: 256
  --swiglu: true
  --bf16: false
  --lr: 1.0e-4
"""


@pytest.fixture(scope="module")
def running_config() -> RunConfig:
    return build_table(read_run(GOLDEN, None)).config()


def test_arguments_as_yaml(tmp_path: Path, running_config: RunConfig) -> None:
    file = tmp_path / "model_config.yaml"
    file.write_text(ARGUMENTS + "  --surprise: 1\n")
    description = read_config(file, running_config)
    assert description.unknown == ("--surprise",)
    assert (description.config.model.num_layers, description.config.model.is_gated) == (4, True)
    assert description.config.parallelism.num_ranks == running_config.parallelism.num_ranks == 2
    assert read_config(file, running_config, num_ranks=8).config.parallelism.dp == 8


ROWS = json.loads(
    (Path(__file__).parents[2] / "golden" / "megatron_args" / "core_v0.16.1.json").read_text()
)


def printed(arguments: dict[str, Any], prefix: str = "") -> str:
    """The list at the begin of a log, as ``_print_args`` of Megatron-LM core_v0.16.1 prints it."""
    lines = sorted(f"{prefix}  {n} {'.' * (48 - len(n))} {v}" for n, v in arguments.items())
    begin, end = "-" * 24 + " arguments " + "-" * 24, "-" * 20 + " end of arguments " + "-" * 21
    return "\n".join([f"{prefix}{begin}", *lines, f"{prefix}{end}"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
@pytest.mark.parametrize("prefix", ["", "[default0]:"])
def test_the_list_of_arguments_in_a_log(
    row: dict[str, Any], prefix: str, tmp_path: Path, running_config: RunConfig
) -> None:
    file = tmp_path / "train.log"
    text = f"> building indices ... done\n{printed(row['validated'], prefix)}\n"
    file.write_text(text + "time to wait ...... 3\n" + printed({"hidden_size": 1}) + "x" * 2**20)
    argv = row["argv"].split()
    described = read_config(file, running_config)
    assert described.unknown == ()
    assert described.config == config_from_command(argv, num_ranks=row["num_ranks"]).config


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_options_from_a_log_are_those_of_its_command(
    row: dict[str, Any], tmp_path: Path, running_config: RunConfig
) -> None:
    """A log has all arguments, which say what was given no longer from what is a default."""
    file = tmp_path / "train.log"
    file.write_text(printed(row["validated"] | {"offload_modules": []}))
    logged = read_config(file, running_config).config
    given = config_from_command(row["argv"].split(), num_ranks=row["num_ranks"]).config
    ours = options(replace(given, given=()))
    assert {*options(logged)} <= {*options(given), *ours}
    assert apply_options(given, options(logged)) == given


def test_a_log_without_arguments_is_named(tmp_path: Path, running_config: RunConfig) -> None:
    file = tmp_path / "train.log"
    file.write_text("  hidden_size ........ 64\n")
    with pytest.raises(ConfigError, match="begins with no list of Megatron's arguments; give the"):
        read_config(file, running_config)


LLAMA = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128},
}


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"torch_dtype": "bfloat16"}, "--bf16"),
        ({"dtype": "bfloat16"}, "--bf16"),
        ({"torch_dtype": "float16"}, "--fp16"),
        ({"text_config": {"torch_dtype": "bfloat16"}}, "--bf16"),
        ({"text_config": {"dtype": "float16"}}, "--fp16"),
        ({"torch_dtype": "torch.bfloat16"}, "--bf16"),
        ({"torch_dtype": "float32"}, None),
    ],
)
def test_the_dtype_of_config_json_is_megatrons_flag(
    fields: dict[str, Any], flag: str | None, tmp_path: Path, running_config: RunConfig
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, **fields}))
    description = read_config(file, running_config)
    bare = replace(
        description.config, precision=running_config.precision, reduces_grads_in_bf16=False
    )
    assert description.config == apply_options(bare, [flag] if flag else [])
    assert not description.notes


@pytest.mark.parametrize("fields", [{}, {"torch_dtype": None}, {"dtype": "float32"}])
def test_where_config_json_leaves_it_open_the_precision_is_told(
    fields: dict[str, Any], tmp_path: Path, running_config: RunConfig
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, **fields}))
    running = apply_options(running_config, ["--bf16"])
    description = read_config(file, running)
    assert description.config.precision is running.precision is Precision.BF16
    (note,) = description.notes
    assert "bf16" in note and ("float32" in note) is bool(fields.get("dtype"))


def test_an_option_is_over_the_dtype_of_config_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    steps = {}
    for dtype in ("bfloat16", "float32"):
        file.write_text(json.dumps({**LLAMA, "dtype": dtype}))
        words = ["predict", str(GOLDEN), "--json", "--config", str(file), "--device", "H100"]
        for flags in ((), ("--bf16",)):
            assert main([*words, *flags]) == ExitCode.ANSWER
            steps[dtype, flags] = json.loads(capsys.readouterr().out)["step_time_s"]
    assert len(set(steps.values())) == 2
    assert steps["float32", ("--bf16",)] == steps["bfloat16", ()] == steps["bfloat16", ("--bf16",)]


def test_our_own_config_as_json(tmp_path: Path, running_config: RunConfig) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(running_config.to_json()))
    assert read_config(file, running_config).config == running_config


def test_a_model_of_hugging_face_takes_the_place_of_ours(
    tmp_path: Path, running_config: RunConfig
) -> None:
    file = tmp_path / "config.json"
    model = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 6, "n_positions": 128}
    file.write_text(json.dumps({**model, "vocab_size": 1000}))
    config = read_config(file, running_config).config
    assert (config.model.num_layers, config.model.vocab_size) == (6, 1024)
    assert config.model.seq_length == running_config.model.seq_length
    assert config.parallelism == running_config.parallelism


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "- 1\n- 2\n", "holds no mapping"),
        ("a.yaml", "a: [", "is not YAML"),
        ("a.json", "{", "is not JSON"),
        ("a.json", '{"model_type": "gpt9"}', "model_type 'gpt9' is not known"),
        ("a.yaml", "x: !!python/object/apply:os.getcwd []", "is not YAML"),
        (
            "a.sbatch",
            "#!/bin/sh\ntorchrun t.py\n",
            "is a script; give it after --, such as -- bash",
        ),
        ("a.json", '{"model_type": "t5", "is_encoder_decoder": true, "num_layers": 6}', "encoder"),
    ],
)
def test_bad_files_are_one_line(
    tmp_path: Path, running_config: RunConfig, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message) as err:
        read_config(tmp_path / name, running_config)
    assert "\n" not in str(err.value)


def test_a_missing_file_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["predict", str(GOLDEN), "--config", str(tmp_path / "none.yaml")])
    assert code == ExitCode.USAGE
    assert "cannot be read" in capsys.readouterr().err


def step_s(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["predict", str(GOLDEN), "--json", *words]) == ExitCode.ANSWER
    return json.loads(capsys.readouterr().out)


def test_a_command_that_says_the_running_layout_predicts_its_step(
    capsys: pytest.CaptureFixture[str], running_config: RunConfig
) -> None:
    command = ["torchrun", "--nproc-per-node", "2", "train.py"]
    command += [*model_options(running_config), *options(running_config), "--lr", "1e-4"]
    plain, described = step_s(capsys), step_s(capsys, "--", *command)
    assert described["step_time_s"] == pytest.approx(plain["step_time_s"], rel=1e-6)
    deeper = step_s(
        capsys, "--", *command, "--num-layers", str(3 * running_config.model.num_layers)
    )
    assert deeper["step_time_s"] > 1.3 * plain["step_time_s"]
    wider = step_s(capsys, "--gpus", "4", "--", *command[4:])
    assert wider["dp"] == 4


def test_plan_of_a_described_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model_config.yaml"
    file.write_text(ARGUMENTS + "  --surprise: 1\n  --use-sharp: true\n")
    assert (
        main(["plan", str(GOLDEN), "--json", "--config", str(file), "--gpus", "4", "--anyway"]) == 0
    )
    out, err = capsys.readouterr()
    value = json.loads(out)
    assert value["config"]["model"]["num_layers"] == 4
    assert {c["num_ranks"] for c in value["candidates"]} == {4}
    assert value["measured_step_time_s"] is None
    assert "--surprise" in err and "use_sharp" in err


def test_other_verbs_take_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["report", str(GOLDEN), "--", "train.py"])
    assert stop.value.code == ExitCode.USAGE
    assert main(["plan", str(GOLDEN), "--config", "x.yaml", "--", "train.py"]) == ExitCode.USAGE


class Malicious:
    """Would run a command when unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("name", ["common.pt", "iter_0000010"])
def test_a_checkpoint_is_refused_unread(
    name: str, tmp_path: Path, running_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "common.pt").write_bytes(pickle.dumps(Malicious()))
    (tmp_path / "iter_0000010").mkdir()
    with pytest.raises(ConfigError, match=f"{name} is a checkpoint, and only text is read; give"):
        read_config(tmp_path / name, running_config)
    assert not (tmp_path / "ran").exists()
