from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.calib.arguments._megatron_model import usual_vocab_size
from forerun.calib.arguments.megatron_args import apply_options, rewrite_command
from forerun.calib.arguments.megatron_namespace import from_namespace
from forerun.calib.arguments.megatron_options import (
    DERIVED,
    MODELLED,
    SWITCHED_OFF,
    UNMODELLED_SETTINGS,
)
from forerun.calib.errors import ConfigError
from forerun.calib.workload.argument_values import Arguments
from forerun.calib.workload.config import Recompute, RunConfig

Layout = Callable[..., RunConfig]
ALL_ON = {
    "is_sequence_parallel": True,
    "is_optimizer_distributed": True,
    "overlaps_grad_reduce": True,
    "overlaps_param_gather": True,
}


def test_the_number_of_ranks_stays_unless_given(layout: Layout) -> None:
    start = layout(tp=2, pp=2, dp=2)
    assert apply_options(start, ["--tensor-model-parallel-size=1"]).parallelism.dp == 4
    assert apply_options(start, ["--gpus", "16"]).parallelism.dp == 4
    assert apply_options(start, ["--data-parallel-size", "4"]).parallelism.num_ranks == 16


def test_model_sizes_and_switches_are_read(layout: Layout) -> None:
    text = (
        "--num-layers 8 --hidden-size=128 --no-sequence-parallel --recompute-granularity selective "
        "--global-batch-size 32"
    )
    config = apply_options(layout(tp=2, par=ALL_ON), text.split())
    assert (config.model.num_layers, config.model.hidden_size) == (8, 128)
    assert not config.parallelism.is_sequence_parallel
    assert config.recompute is Recompute.SELECTIVE
    assert config.batch.global_batch_size == 32


def test_virtual_stages_follow_from_their_layers(layout: Layout) -> None:
    argv = ["--num-layers-per-virtual-pipeline-stage", "1"]
    assert apply_options(layout(pp=2), argv).parallelism.vp == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tensor-parallel-size", "2"], "nearest: --tensor-model-parallel-size"),
        (["--tensor-model-parallel-size", "3"], "8 ranks do not split over tp 3 x pp 2; give"),
        (["--tensor-model-parallel-size", "0"], "give degrees of at least 1"),
        (["--micro-batch-size"], "has no value"),
        (["--micro-batch-size", "two"], "'two' is not a whole number"),
        (["--recompute-granularity", "some"], "choose from none, selective, full"),
        (["--gpus", "8", "--data-parallel-size", "4"], "leave one of them out"),
        (["--num-layers-per-virtual-pipeline-stage", "3"], "choose a divisor of 2"),
        (["--gpus", "2"], "2 ranks do not split over tp 2 x pp 2; give --gpus 4"),
    ],
)
def test_impossible_options_are_named(layout: Layout, argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_options(layout(tp=2, pp=2, dp=2), argv)


def test_a_command_keeps_everything_but_the_layout(layout: Layout) -> None:
    host = (
        "pretrain_gpt.py --num-layers 4 --tensor-model-parallel-size=1 --lr 3e-4 "
        "--micro-batch-size 1 --sequence-parallel --data-path a b --recompute-granularity full "
        "--recompute-method=uniform --recompute-num-layers 1"
    )
    config = layout(tp=4, dp=2, micro=4, par={"is_optimizer_distributed": True})
    assert " ".join(rewrite_command(host.split(), config)) == (
        "pretrain_gpt.py --num-layers 4 --tensor-model-parallel-size=4 --lr 3e-4 "
        "--micro-batch-size 4 --data-path a b --global-batch-size 16 --use-distributed-optimizer"
    )


class Recorder:
    """A namespace that has nothing, and keeps what it was asked for."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values, read_names=set())

    def __getattr__(self, name: str) -> Any:
        self.__dict__["read_names"].add(name)
        raise AttributeError(name)


def test_what_is_called_modelled_is_read() -> None:
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size")
    read: set[str] = {*sizes, "micro_batch_size"}
    for switches in (
        {"num_experts": 8, "multi_latent_attention": True, "bf16": True, "fp8": "hybrid"}
        | {"first_last_layers_bf16": True},
        {"group_query_attention": True, "fp16": True, "recompute_granularity": "full"},
        {"moe_layer_recompute": True, "num_layers_per_virtual_pipeline_stage": 16},
        {"recompute_granularity": "full", "recompute_method": "block"},
        {"use_megatron_fsdp": True, "use_precision_aware_optimizer": True},
        {"num_experts": 8, "moe_expert_rank_capacity_factor": 1.5, "moe_paged_stash": True},
        {"fine_grained_activation_offloading": True, "window_size": (127, 0)}
        | {"cross_entropy_loss_fusion": True},
        {"use_torch_fsdp2": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
        | {"global_batch_size": 16, "defer_embedding_wgrad_compute": True},
        {"vocab_size": None, "tokenizer_model": "Qwen/Qwen3-30B-A3B"},
        {"context_parallel_size": 4, "cp_comm_type": "a2a+p2p"}
        | {"hierarchical_context_parallel_sizes": [2, 2], "seq_length": 16},
        {"seq_length": None, "encoder_seq_length": 16, "num_layers": None, "encoder_num_layers": 2},
    ):
        values = {**dict.fromkeys(sizes, 16), "micro_batch_size": 1, **switches}
        given = Recorder(**{name: value for name, value in values.items() if value is not None})
        from_namespace(given)
        read |= given.__dict__["read_names"] | switches.keys()
    assert read >= MODELLED
    cadence = {"save", "exit_interval", "full_batch_size", "num_final_evals", "ckpt_format"}
    not_modelled = {*UNMODELLED_SETTINGS, *SWITCHED_OFF, "fp8_format"}
    assert read - MODELLED - DERIVED - cadence <= not_modelled


def test_sizes_that_follow_from_another_go_with_it() -> None:
    """As Megatron's defaults: another width has its own MLP and heads, unless the run said them."""
    sizes = {"num_layers": 4, "num_attention_heads": 16, "seq_length": 64, "vocab_size": 512}
    usual = from_namespace(SimpleNamespace(hidden_size=1024, micro_batch_size=1, **sizes))
    wide = apply_options(usual, ["--hidden-size", "2048"]).model
    assert (wide.ffn_hidden_size, wide.kv_channels) == (8192, 128)
    gated = apply_options(usual, ["--hidden-size", "2048", "--swiglu"]).model
    assert gated.ffn_hidden_size == 5440
    stated = from_namespace(
        SimpleNamespace(
            hidden_size=1024, micro_batch_size=1, ffn_hidden_size=3000, kv_channels=32, **sizes
        )
    )
    preserved = apply_options(stated, ["--hidden-size", "2048"]).model
    assert (preserved.ffn_hidden_size, preserved.kv_channels) == (3000, 32)
    overridden = apply_options(usual, ["--hidden-size", "2048", "--ffn-hidden-size", "6144"]).model
    assert (overridden.ffn_hidden_size, overridden.kv_channels) == (6144, 128)


@pytest.mark.parametrize(
    ("path", "size"),
    [
        ("Qwen/Qwen3-30B-A3B", 151_936), ("unsloth/Meta-Llama-3.1-8B-Instruct", 128_256),
        ("mistralai/Mistral-7B-Instruct-v0.3", 32_768), ("mistralai/Mixtral-8x7B-v0.1", 32_000),
        ("$DATA/utils/nemotron_2_256k.model", 256_000), ("unsloth/gpt-oss-20b-BF16", 201_088),
        ("deepseek-ai/DeepSeek-V3", 129_280), ("/data/own.model", 0),
    ],
)  # fmt: skip
def test_a_published_tokenizers_name_is_a_vocabulary(path: str, size: int) -> None:
    given = Arguments({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": path})
    assert usual_vocab_size(given) == size
