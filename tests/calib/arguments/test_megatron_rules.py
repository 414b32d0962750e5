"""Megatron's rules against megatron-core's own configuration, where it is installed."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest

from forerun.calib.arguments.megatron_args import rewrite_command
from forerun.calib.arguments.megatron_command import config_from_command
from forerun.calib.arguments.megatron_rules import environment, misplaced, refusals, required_values
from forerun.calib.arguments.megatron_values import layout_values, model_values
from forerun.calib.errors import ForerunError
from forerun.calib.workload.config import Fp8Recipe, Recompute, RunConfig, Sharding

DENSE = [
    *("t.py", "--num-layers", "8", "--hidden-size", "256", "--ffn-hidden-size", "1024"),
    *("--num-attention-heads", "16", "--seq-length", "128", "--max-position-embeddings", "128"),
    *("--vocab-size", "1000", "--micro-batch-size", "1", "--global-batch-size", "64", "--bf16"),
    *("--swiglu", "--disable-bias-linear", "--eval-iters", "0", "--use-distributed-optimizer"),
    "--untie-embeddings-and-output-weights",
]
EXPERTS = [
    *DENSE,
    *("--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "128"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm"),
]
DEGREES: list[dict[str, Any]] = [
    {"tp": 2, "dp": 4, "is_sequence_parallel": True},
    {"pp": 4, "dp": 2, "vp": 2},
    {"pp": 2, "dp": 4, "chunk_layers": (5, 3)},
    {"pp": 2, "vp": 2, "dp": 4, "chunk_layers": (3, 2, 2, 1)},
    {"cp": 2, "dp": 4},
    {"tp": 4, "cp": 2, "dp": 1},
]
RECOMPUTE: list[dict[str, Any]] = [
    {"recompute": Recompute.FULL},
    {"recompute": Recompute.FULL, "recompute_num_layers": 1},
    {"recompute": Recompute.SELECTIVE, "recompute_modules": ("mlp", "layernorm")},
    {"recompute": Recompute.SELECTIVE},
]


def running(words: list[str]) -> RunConfig:
    return replace(config_from_command(words, num_ranks=8).config, device="NVIDIA H100")


def transformer_config(words: tuple[str, ...]) -> Any:
    """megatron-core's own, of the line as it is read, as its ``core_transformer_config`` does."""
    core = pytest.importorskip("megatron.core.transformer.transformer_config")
    config = config_from_command(words, num_ranks=8).config
    values: dict[str, Any] = {**model_values(config), **layout_values(config)}
    values["pipeline_dtype"] = pytest.importorskip("torch").bfloat16
    values["num_moe_experts"] = values.get("num_experts")
    values["gated_linear_unit"] = config.model.is_gated
    values["add_bias_linear"] = config.model.has_bias
    if config.parallelism.vp > 1:
        values["virtual_pipeline_model_parallel_size"] = config.parallelism.vp
    if config.model.experts:
        values["moe_layer_freq"] = 1
    names = core.TransformerConfig.__dataclass_fields__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return core.TransformerConfig(**{n: v for n, v in values.items() if n in names})


@pytest.mark.parametrize("place", range(12))
def test_megatron_core_takes_what_is_written(place: int) -> None:
    here = running(DENSE)
    par = replace(here.parallelism, **DEGREES[place % len(DEGREES)])
    there = replace(here, parallelism=par, **RECOMPUTE[(place + place // 6) % len(RECOMPUTE)])
    assert refusals(there) == ()
    result = transformer_config(rewrite_command(DENSE, there, running=here))
    assert result.tensor_model_parallel_size == par.tp
    assert result.pipeline_model_parallel_size == par.pp
    assert result.sequence_parallel == par.is_sequence_parallel
    assert result.recompute_granularity == there.recompute.value
    assert (result.virtual_pipeline_model_parallel_size or 1) == par.vp


def test_megatron_core_refuses_what_is_refused_here() -> None:
    """Each of its own exceptions has a clause of ours."""
    pytest.importorskip("megatron.core")
    here = running(EXPERTS)
    experts = here.model.experts
    assert experts is not None
    ways: list[RunConfig] = [
        replace(here, recompute=Recompute.SELECTIVE, recompute_modules=("mla_up_proj",)),
        replace(here, offload_modules=("attn_proj", "qkv_linear")),
        replace(here, model=replace(here.model, experts=replace(experts, overlaps_exchange=True))),
        replace(
            here, model=replace(here.model, experts=replace(experts, is_grouped=False)),
            recompute=Recompute.SELECTIVE, recompute_modules=("moe_act",),
        ),
        replace(here, fp8=Fp8Recipe.DELAYED, wide_layers=(1, 1)),
        replace(here, fp8=Fp8Recipe.TENSORWISE, wide_layers=(0, 99)),
        replace(
            here, parallelism=replace(here.parallelism, pp=2, dp=here.parallelism.dp // 2),
            defers_head_gradients=True, fuses_gradient_accumulation=False,
        ),
    ]  # fmt: skip
    for way in ways:
        assert refusals(way) != ()
        line = rewrite_command(EXPERTS, way, running=here)
        with pytest.raises((ValueError, AssertionError)) as refused:
            transformer_config(line)
        assert not isinstance(refused.value, ForerunError)


def test_a_group_that_is_said_in_part_is_said_whole() -> None:
    """``--recompute-activations`` is selective; its modules alone would recompute nothing."""
    words = [*DENSE, "--recompute-activations"]
    here = running(words)
    there = replace(here, recompute_modules=("mlp",))
    written = rewrite_command(words, there, running=here)
    assert "--recompute-activations" not in written
    assert written[-4:] == ("--recompute-granularity", "selective", "--recompute-modules", "mlp")


def test_a_batch_that_followed_from_the_ranks_is_said_once_they_change() -> None:
    """Without ``--global-batch-size`` Megatron takes micro-batch x dp."""
    place = DENSE.index("--global-batch-size")
    words = DENSE[:place] + DENSE[place + 2 :]
    here = running(words)
    assert here.batch.global_batch_size == 8
    there = replace(here, parallelism=replace(here.parallelism, tp=2, dp=4))
    written = rewrite_command(words, there, running=here)
    assert written[written.index("--global-batch-size") + 1] == "8"
    other = replace(here, recompute=Recompute.FULL)
    assert "--global-batch-size" not in rewrite_command(words, other, running=here)


def test_what_the_model_does_otherwise_is_written_too() -> None:
    """A longer sequence needs as many positions; an overlap of experts is a switch."""
    here = running(EXPERTS)
    experts = here.model.experts
    assert experts is not None
    longer = replace(here, model=replace(here.model, seq_length=256))
    written = rewrite_command(EXPERTS, longer, running=here)
    assert written[written.index("--seq-length") + 1] == "256"
    assert written[written.index("--max-position-embeddings") + 1] == "256"
    overlapped = replace(
        here, model=replace(here.model, experts=replace(experts, overlaps_exchange=True))
    )
    there = rewrite_command(EXPERTS, overlapped, running=here)
    assert there[-1] == "--overlap-moe-expert-parallel-comm"
    assert rewrite_command(there, here, running=overlapped) == tuple(EXPERTS)


def test_what_another_layout_alone_takes_is_left_out() -> None:
    here = running(DENSE)
    given = {"fsdp_manual_registration": True, "lr": "1"}
    assert misplaced(here, given) == {"fsdp_manual_registration"}
    words = [*DENSE, "--fsdp-manual-registration", "--lr", "1"]
    assert rewrite_command(words, here, running=here) == (*DENSE, "--lr", "1")


def test_queues_follow_megatron_s_assertions() -> None:
    """1 where tp or cp split layers before Blackwell, anything else under FSDP."""
    here = running(DENSE)
    split = replace(here, parallelism=replace(here.parallelism, tp=2, dp=4))
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    assert environment(here, {}) == {} and environment(split, {}) == {name: "1"}
    assert environment(replace(split, device="NVIDIA B200"), {}) == {}
    par = replace(here.parallelism, sharding=Sharding.WEIGHTS)
    sharded = replace(here, parallelism=par)
    assert environment(sharded, {name: "1"}) == {name: "8"}
    assert required_values(sharded, {}) == {"ckpt_format": "fsdp_dtensor"}
    assert environment(replace(here, offload_modules=("core_attn",)), {}) == {
        "NVTE_CPU_OFFLOAD_V1": "1"
    }
