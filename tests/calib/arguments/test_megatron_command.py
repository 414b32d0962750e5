"""Whole commands and files of arguments: launchers, unknown arguments, other spellings."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.arguments._megatron_model import expert_layers
from forerun.calib.arguments.megatron_command import config_from_command, config_from_mapping
from forerun.calib.errors import ConfigError
from forerun.calib.workload.config import Recompute

SIZES = shlex.split(
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 1 --global-batch-size 32 --vocab-size 1000"
)


def test_given_ranks_replace_those_that_a_layout_cannot_run_on() -> None:
    """Megatron-LM's examples/gpt3/train_gpt3_175b_distributed.sh starts 8 ranks for tp 8, pp 16."""
    line = ["torchrun", "--nproc_per_node", "8", "--nnodes", "1", "pretrain_gpt.py"]
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "8"]
    with pytest.raises(ConfigError, match="give --gpus 16"):
        config_from_command([*line, *SIZES, *layout])
    par = config_from_command([*line, *SIZES, *layout], num_ranks=16).config.parallelism
    assert (par.num_ranks, par.ranks_per_node) == (16, 8)


def test_unknown_arguments_are_returned_in_order() -> None:
    words = ["train.py", "stray", *SIZES, "--make-it-fast", "twice", "--swiglu", "--mtp-layers=2"]
    description = config_from_command(words)
    assert description.unknown == ("stray", "--make-it-fast", "--mtp-layers")
    assert description.config.model.is_gated


def test_the_last_of_two_wins_as_in_argparse() -> None:
    description = config_from_command([*SIZES, "--num-layers=4"])
    assert description.config.model.num_layers == 4


def test_variables_of_a_shell_are_named() -> None:
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size '\$TP': a variable"):
        config_from_command([*SIZES, "--tensor-model-parallel-size", "$TP"])


@given(
    st.permutations(
        [["--kv-channels", "32"], ["--bf16"], ["--lr", "1"], ["--disable-bias-linear"]]
    ),
    st.lists(st.sampled_from(["$vp_option", "${MOE[@]}", "`cat f`", "$(cat f)"]), max_size=3),
    st.integers(0, 4),
)
def test_what_only_a_shell_resolves_is_named_and_is_no_value(
    options: list[list[str]], expansions: list[str], place: int
) -> None:
    """Pai-Megatron-Patch's examples/qwen3/run_mcore_qwen3.sh has one behind --kv-channels 128."""
    parts = [*options[:place], expansions, *options[place:]]
    description = config_from_command([*SIZES, *(word for part in parts for word in part)])
    plain = config_from_command([*SIZES, *(word for part in options for word in part)])
    assert description.config == plain.config
    assert description.unknown == tuple(expansions)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("t.py --bf16 ${SIZES[@]}", r"no layers .*\(not read: '\$\{SIZES\[@\]\}'\)"),
        ("t.py model.num_layers=40 a=1 b=2 c=3", r"read: 'model.num_layers=40', .* and 1 more\)"),
        ("t.py --num-layers 2 --hidden-size 8 $SIZES", r"is missing .* \(not read: '\$SIZES'\)"),
    ],
)
def test_a_line_without_sizes_is_told_which_words_were_not_read(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_command(line.split())


def test_model_args_of_functional_tests_and_flat_names_mean_the_same() -> None:
    named: dict[str, Any] = {
        "num_layers": 8,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 32,
        "micro_batch_size": 1,
        "global_batch_size": 32,
        "vocab_size": 1000,
        "add_bias_linear": False,
        "recompute_granularity": "selective",
        "recompute_modules": ["mlp", "layernorm"],
        "pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": "Et*2|(tt|)*2ttL",
        "rampup_batch_size": [8, 8, 100],
        "lr": 1e-4,
    }
    options: dict[str, Any] = {"--" + k.replace("_", "-"): v for k, v in named.items()}
    options.pop("--add-bias-linear")
    options |= {
        "--disable-bias-linear": True,
        "--swiglu": False,
        "--recompute-modules": "[mlp layernorm]",
        "--rampup-batch-size": "8 8 100",
        "--pipeline-model-parallel-layout": r"Et*2\\|\\(tt\\|\\)*2ttL",
    }
    flat = config_from_mapping(named, num_ranks=2)
    tests = config_from_mapping({"ENV_VARS": {}, "MODEL_ARGS": options}, num_ranks=2)
    assert flat == tests
    assert flat.unknown == () and not flat.config.model.has_bias
    assert flat.config.recompute is Recompute.SELECTIVE
    assert flat.config.recompute_modules == ("mlp", "layernorm")
    assert (flat.config.parallelism.vp, flat.config.chunk_layers) == (2, (2, 2, 2, 2))


def test_sections_of_megatrons_own_yaml_are_looked_into() -> None:
    description = config_from_mapping(
        {
            "language_model": {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4},
            "model_parallel": {"tensor_model_parallel_size": 2},
            "seq_length": 32,
            "micro_batch_size": 1,
            "vocab_size": 1000,
            "who_knows": 3,
        },
        num_ranks=4,
    )
    assert (description.config.parallelism.tp, description.config.parallelism.dp) == (2, 2)
    assert description.unknown == ("who_knows",)


@pytest.mark.parametrize(
    ("freq", "expected"),
    [
        (1, ()),
        ("1", ()),
        (3, (True, False, False, True, False, False)),
        ("([0]*2+[1]*4)", (False, False, True, True, True, True)),
        ("([0]+[1])*3", (False, True) * 3),
        ([1] * 6, ()),
        # ``i % freq == 0`` of megatron.core.models.gpt.gpt_layer_specs has no sign.
        *((-1, ()), ("-1", ()), ("-3", (True, False, False, True, False, False))),
    ],
)
def test_expert_layers_by_every_spelling(freq: Any, expected: tuple[bool, ...]) -> None:
    assert expert_layers(freq, 6) == expected


@pytest.mark.parametrize("freq", ["__import__('os')", "[0]*10**9", "0", "[1]*99999999", "x", 0, ""])
def test_no_other_expression_is_evaluated(freq: Any) -> None:
    with pytest.raises(ConfigError, match="--moe-layer-freq"):
        expert_layers(freq, 6)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--num-experts many", "--num-experts 'many' is not a whole number"),
        ("--moe-expert-capacity-factor big --num-experts 4", "is not a number"),
        ("--rampup-batch-size 1 2", "START INCREMENT SAMPLES"),
        ("--pipeline-model-parallel-size 3", "does not split over pp 3"),
        ("--kv-channels 16 --num-attention-heads 0", "num_attention_heads 0 is below 1"),
        ("--num-attention-heads 5", "not a multiple of num_attention_heads 5"),
        ("--pipeline-model-parallel-layout Et*7|tmL", "has 1 m, not mtp_num_layers 0"),
        ("--moe-token-dispatcher-type pigeon --num-experts 4", "Dispatcher 'pigeon' is not known"),
        ("--num-layers-per-virtual-pipeline-stage 0", "choose a divisor of 8"),
    ],
)
def test_impossible_arguments_are_named(more: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_command([*SIZES, *more.split()])


def test_a_tokenizer_of_unknown_size_is_asked_for() -> None:
    words = [*SIZES[:-2], "--tokenizer-type", "GPTSentencePieceTokenizer"]
    with pytest.raises(ConfigError, match="give --vocab-size"):
        config_from_command(words)
    gpt2 = config_from_command([*SIZES[:-2], "--tokenizer-type", "GPT2BPETokenizer"])
    assert gpt2.config.model.vocab_size == 50304
