"""Every word of a command survives: read, printed for the same layout, read again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from model_options import model_options

from forerun.calib.arguments.megatron_args import apply_options, options, rewrite_command
from forerun.calib.arguments.megatron_command import config_from_command
from forerun.calib.arguments.megatron_options import MODELLED, SPELLED, SWITCHES
from forerun.calib.arguments.megatron_rules import required_values
from forerun.calib.arguments.megatron_values import as_options
from forerun.calib.arguments.option_words import options_of
from forerun.calib.errors import ConfigError
from forerun.calib.workload.config import RunConfig

FRONT = ("torchrun", "--nproc-per-node=8", "--nnodes", "4", "pretrain_gpt.py")
SIZES: Mapping[str, str] = {
    "--num-layers": "16",
    "--hidden-size": "256",
    "--num-attention-heads": "16",
    "--seq-length": "128",
    "--micro-batch-size": "2",
    "--vocab-size": "32000",
}
"""Options that every line needs."""
CHOICES = """
    attention-backend: auto / flash / fused / unfused / local; attention-dropout: 0 / 0.0 / 0.1;
    context-parallel-size: 1 / 2; cp-comm-type: p2p / a2a / all_gather / a2a+p2p / p2p a2a;
    cross-entropy-fusion-impl: native / te; cuda-graph-impl: none / local / transformer_engine;
    cuda-graph-scope: full / attn / attn mlp / full_iteration;
    data-parallel-sharding-strategy: no_shard / optim / optim_grads_params;
    ddp-bucket-size: 1000000 / 40000000; decoder-first-pipeline-num-layers: 2 / 4;
    decoder-last-pipeline-num-layers: 2 / 4; encoder-num-layers: 16;
    hybrid-layer-pattern: *-*-*-*- / *-*-|*--*; hybrid-override-pattern: *-*-*-*-;
    encoder-seq-length: 128; eval-interval: 100 / 1000; eval-iters: 0 / 10 / 100;
    exp-avg-dtype: fp32 / fp16 / bf16 / fp8; exp-avg-sq-dtype: fp32 / fp16 / bf16 / fp8;
    expert-model-parallel-size: 1 / 2; expert-tensor-parallel-size: 1 / 2;
    ffn-hidden-size: 512 / 1024; fp4-format: e2m1; fp8-format: e4m3 / hybrid;
    fp8-recipe: delayed / tensorwise / mxfp8 / blockwise / custom; global-batch-size: 64 / 128;
    hidden-dropout: 0 / 0.0 / 0.1; hierarchical-context-parallel-sizes: 1 2 / 2 1;
    kv-channels: 16 / 32; kv-lora-rank: 32 / 512; main-grads-dtype: fp32 / bf16;
    main-params-dtype: fp32 / fp16; make-vocab-size-divisible-by: 1 / 128 / 256;
    max-position-embeddings: 128 / 256; megatron-fsdp-grad-comm-dtype: auto / fp32 / bf16;
    megatron-fsdp-main-grads-dtype: auto / fp32 / bf16;
    microbatch-group-size-per-virtual-pipeline-stage: 4 / 8;
    moe-expert-capacity-factor: 1 / 1.0 / 1.25; moe-expert-rank-capacity-factor: 1.5;
    moe-ffn-hidden-size: 64 / 128; moe-layer-freq: 1 / 2 / ([0]*2+[1]*14);
    moe-paged-stash-buffer-size-factor-cuda: 1.1 / 1.10; moe-router-dtype: fp32 / fp64;
    moe-router-topk: 1 / 2; moe-shared-expert-intermediate-size: 64 / 128;
    moe-token-dispatcher-type: allgather / alltoall / flex; mtp-num-layers: 1 / 2;
    normalization: LayerNorm / RMSNorm; num-distributed-optimizer-instances: 1 / 2;
    num-experts: 4 / 8; num-layers-per-virtual-pipeline-stage: 1 / 2 / 4;
    num-layers-at-end-in-bf16: 0 / 2; num-layers-at-start-in-bf16: 0 / 2; num-query-groups: 2 / 16;
    num-virtual-stages-per-pipeline-rank: 1 / 2;
    offload-modules: core_attn / core_attn attn_proj / expert_fc1;
    optimizer-offload-fraction: 0.5 / 1.0 / 1;
    pipeline-model-parallel-layout: Et*8|t*8L / Et*4|t*4|t*4|t*4,L;
    pipeline-model-parallel-size: 1 / 2 / 4;
    position-embedding-type: learned_absolute / rope / none; q-lora-rank: 96 / 128;
    qk-head-dim: 32 / 128; qk-pos-emb-head-dim: 16 / 64;
    rampup-batch-size: 16 16 1000 / 32 32 10000; recompute-granularity: full / selective;
    recompute-method: uniform / block;
    recompute-modules: core_attn / mlp / layernorm core_attn / moe_act;
    recompute-num-layers: 1 / 2 / 5; save-interval: 100 / 1000; persistent-save-interval: 500;
    step-batch-size-schedule: 0:32,1B:64 / 0:64,200B:128; tensor-model-parallel-size: 1 / 2 / 4;
    tokenizer-model: Qwen/Qwen3-8B / own.model; tokenizer-type: GPT2BPETokenizer / NullTokenizer;
    train-iters: 100 / 500000; train-samples: 640000; transformer-impl: local / transformer_engine;
    v-head-dim: 32 / 128; wgrad-deferral-limit: 0 / 2 / 22;
    window-attn-skip-freq: 2 / 16 / [1]*12+[0]*4; window-size: 127,0 / (63,0) / -1,0
"""
"""Options and the values that each may have."""
_NO_OPTION = {"padded_vocab_size", "framework", "torch_compile"}
"""Derived ones, and what a user says of other stacks than Megatron."""
VALUES: Mapping[str, tuple[str, ...]] = {
    **{option: ("",) for name in SWITCHES - _NO_OPTION for option, _ in as_options({name: True})},
    **{
        f"--{name.strip()}": tuple(value.strip() for value in values.split(" / "))
        for name, values in (row.split(": ") for row in CHOICES.split(";"))
    },
}
"""Values that each option may have, words separated by spaces."""
FEW = 8

USUAL = ("--pipeline-model-parallel-size", "--num-experts", "--use-distributed-optimizer", "--bf16")
"""Options that many others require."""
REQUIRED_WITH = {
    "--optimizer-cpu-offload": "--use-precision-aware-optimizer",
    "--use-torch-fsdp2": "--no-gradient-accumulation-fusion",
}
"""Options that Megatron requires with another one."""


def target(option: str) -> str:
    name = option[2:].replace("-", "_")
    return SPELLED.get(name, (name, None))[0]


@st.composite
def lines(draw: st.DrawFn) -> tuple[str, ...]:
    """A launch line: sizes, and some of all options in any order."""
    chosen = draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=FEW, unique=True))
    chosen += draw(st.lists(st.sampled_from(USUAL), unique=True))
    chosen += [REQUIRED_WITH[option] for option in chosen if option in REQUIRED_WITH]
    values = {**SIZES, **{option: draw(st.sampled_from(VALUES[option])) for option in chosen}}
    order = draw(st.permutations(sorted(values)))
    return (*FRONT, *(word for option in order for word in (option, *values[option].split())))


def read(words: Sequence[str]) -> RunConfig:
    """The run of a line; lines that cannot run are drawn anew."""
    try:
        description = config_from_command(words)
    except ConfigError:
        assume(False)
        raise
    assert not description.unknown
    return description.config


def option_words(words: Sequence[str]) -> dict[str, list[str]]:
    """Options with the words behind them."""
    return dict(options_of(words[len(FRONT) :]))


FSDP2_LINE = (
    *("--use-torch-fsdp2", "--megatron-fsdp-main-grads-dtype", "bf16", "--num-layers", "16"),
    *("--hidden-size", "256", "--num-attention-heads", "16", "--seq-length", "128"),
    *("--vocab-size", "32000", "--micro-batch-size", "2", "--no-gradient-accumulation-fusion"),
)
"""The types are of Megatron's FSDP, which is not used here: the option stays as it was given."""


def test_every_modelled_option_is_drawn() -> None:
    assert {target(option) for option in (*VALUES, *SIZES)} == MODELLED - _NO_OPTION


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(line=lines())
@example(line=(*FRONT, "--bf16", *FSDP2_LINE))
def test_the_same_layout_is_printed_as_it_was_given(line: tuple[str, ...]) -> None:
    config = read(line)
    printed = rewrite_command(line, config, running=config)
    required = dict(as_options(required_values(config, {})))
    before = option_words(line)
    printed_words = {
        o: words for o, words in option_words(printed).items() if o in before or o not in required
    }
    assert printed_words == before
    assert config_from_command(printed).config == config


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(line=lines())
def test_options_of_a_layout_keep_values_that_were_given(line: tuple[str, ...]) -> None:
    config = read(line)
    printed = (*FRONT, *model_options(config), *options(config))
    reread = config_from_command(printed).config
    assert reread == config and options(reread) == options(config)
    layout, before = option_words((*FRONT, *options(config))), option_words(line)
    assert all(layout[o] == words for o, words in before.items() if words and o in layout)
    assert apply_options(config, []) == config
    assert RunConfig.from_json(config.to_json()).given == config.given


@pytest.mark.slow
@settings(max_examples=70, deadline=None)
@given(line=lines(), option=st.sampled_from(["--micro-batch-size 1", "--ddp-bucket-size 7000000"]))
def test_another_layout_changes_its_own_options_alone(line: tuple[str, ...], option: str) -> None:
    config = read(line)
    try:
        other = apply_options(config, option.split())
    except ConfigError:
        assume(False)
        raise
    printed = rewrite_command(line, other, running=config)
    assert config_from_command(printed).config == other
    changed, *words = option.split()
    after, before = option_words(printed), option_words(line)
    assert after[changed] == words
    assert all(after[o] == words for o, words in before.items() if o != changed)


@pytest.mark.parametrize(
    "words",
    [
        "--fp8-format e4m3",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 5",
        "--cp-comm-type a2a+p2p",
        "--use-precision-aware-optimizer --exp-avg-dtype fp16 --exp-avg-sq-dtype fp8",
        "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1 "
        "--decoder-last-pipeline-num-layers 3 --fp8-format e4m3 "
        "--recompute-activations --accumulate-allreduce-grads-in-fp32",
    ],
)
def test_words_that_the_model_does_not_tell_apart_are_kept(words: str) -> None:
    sizes = {**SIZES, "--global-batch-size": "64"}
    line = (*FRONT, *(word for pair in sizes.items() for word in pair), *words.split())
    config = config_from_command(line).config
    assert rewrite_command(line, config) == line
    for one in (config, apply_options(config, ["--tp", "2"])):
        printed = option_words((*FRONT, *options(one)))
        assert printed | option_words((*FRONT, *words.split())) == printed
