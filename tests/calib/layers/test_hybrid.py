"""Hybrid models: Megatron's pattern, equal to a GPT where it has a GPT's layers, else measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.calib.arguments._hybrid_pattern import (
    delta_net_layer,
    mamba_layer,
    parse_pattern,
    write_pattern,
)
from forerun.calib.arguments.megatron_args import apply_options, options, rewrite_command
from forerun.calib.arguments.megatron_command import config_from_command
from forerun.calib.errors import ConfigError
from forerun.calib.importers.canonical_tables import OPERATOR_COLUMNS
from forerun.calib.layers.model_size import model_flop_per_token
from forerun.calib.layers.stage_work import collective_uses, stage_parameters
from forerun.calib.memory.peak import memory, stage_memories
from forerun.calib.memory.pipelines import needed_nbytes
from forerun.calib.search.best_layouts import best_layouts
from forerun.calib.search.space import splits
from forerun.calib.steps.base_times import prior_times, table_times
from forerun.calib.steps.model import fit_steps
from forerun.calib.workload.config import RunConfig
from forerun.calib.workload.layout_table import LayoutTable

GPU = "NVIDIA H100 80GB HBM3"
LINE = (
    *("torchrun", "--nproc-per-node=8", "--nnodes=2", "pretrain_hybrid.py", "--bf16"),
    *("--hidden-size", "4096", "--ffn-hidden-size", "14336", "--num-attention-heads", "32"),
    *("--swiglu", "--group-query-attention", "--num-query-groups", "8", "--vocab-size", "32000"),
    *("--seq-length", "4096", "--micro-batch-size", "1", "--global-batch-size", "64"),
    *("--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--untie-embeddings-and-output-weights", "--use-distributed-optimizer"),
)
EXPERTS = (
    *("--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "4096"),
    *("--moe-grouped-gemm", "--moe-token-dispatcher-type", "alltoall"),
    *("--expert-tensor-parallel-size", "1"),
)
PRIORS = fit_steps(prior_times(GPU, is_attention_fused=True))


def run(*words: str) -> RunConfig:
    program = ["pretrain_gpt.py"] if "--num-layers" in words else ["pretrain_hybrid.py"]
    description = config_from_command([*LINE[:3], *program, *LINE[4:], *words])
    assert not description.unknown
    assert not description.config.unmodelled
    return replace(description.config, device=GPU)


def hybrid(pattern: str, *words: str) -> RunConfig:
    return run(f"--hybrid-layer-pattern={pattern}", *words)


@settings(max_examples=25, deadline=None)
@given(
    symbol=st.sampled_from("-E"),
    tp=st.sampled_from([1, 2, 4]),
    segments=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    ep=st.sampled_from([1, 4]),
    recompute=st.sampled_from([(), ("--recompute-granularity", "selective")]),
)
def test_pairs_are_the_layers_of_a_gpt(
    symbol: str, tp: int, segments: tuple[int, int], ep: int, recompute: tuple[str, ...]
) -> None:
    """12 layers, or in segments as many of each: parameters, FLOP and transfers are equal, step
    and memory within 1 %."""
    pp, vp = segments
    words = ["--tensor-model-parallel-size", str(tp), *recompute]
    words += ["--pipeline-model-parallel-size", str(pp)]
    words += ["--sequence-parallel"] if tp > 1 else []
    words += (*EXPERTS, "--expert-model-parallel-size", str(ep)) if symbol == "E" else ()
    virtual = ["--num-virtual-stages-per-pipeline-rank", str(vp)] if vp > 1 else []
    gpt = run("--num-layers", "12", *words, *virtual)
    one = hybrid("|".join([f"*{symbol}" * (12 // pp // vp)] * pp * vp), *words)
    assert one.parallelism.vp == vp
    for stage in range(pp):
        assert stage_parameters(one, stage) == stage_parameters(gpt, stage)
        sent = [
            sum(u.call.nbytes * u.count for u in collective_uses(c, stage=stage))
            for c in (one, gpt)
        ]
        assert sent[0] == sent[1]
    assert model_flop_per_token(one.model) == model_flop_per_token(gpt.model)
    assert memory(one).total_nbytes == pytest.approx(memory(gpt).total_nbytes, rel=0.01)
    (peak_nbytes,) = sum(needed_nbytes(LayoutTable.of([one])))
    assert peak_nbytes == pytest.approx(memory(one).total_nbytes, abs=8)
    steps = PRIORS.estimates([one]) + PRIORS.estimates([gpt])
    assert steps[0].time_s == pytest.approx(steps[1].time_s, rel=0.01)


def test_layers_recomputed_one_by_one_retain_the_input_of_each() -> None:
    """Megatron checkpoints each layer of the pattern, so twice as many inputs as a GPT's stay."""
    words = ("--recompute-granularity", "full", "--recompute-method", "uniform")
    words += ("--recompute-num-layers", "1")
    gpt, one = run("--num-layers", "12", *words), hybrid("*-" * 12, *words)
    inputs = 12 * 4096 * 4096 * 2
    saved = [memory(c).activations_nbytes + memory(c).logits_nbytes for c in (one, gpt)]
    assert 0.8 * inputs < saved[0] - saved[1] < 1.01 * inputs


@pytest.mark.parametrize(
    ("pattern", "kinds", "segments", "predicted"),
    [  # the examples of Megatron's parse_hybrid_pattern (core_v0.19.0)
        ("M*M*", "M*M*", (4,), ("", 0)),
        ("M*M*/MM/MM", "M*M*", (4,), ("MM", 2)),
        ("MMMM/*M/*M/*M", "MMMM", (4,), ("*M", 3)),
        ("M-M-|M-M*-/MM/MM", "M-M-M-M*-", (4, 5), ("MM", 2)),
    ],
)
def test_a_pattern_is_read_as_megatron_does(
    pattern: str, kinds: str, segments: tuple[int, ...], predicted: tuple[str, int]
) -> None:
    result = parse_pattern(pattern)
    assert (result.layer_kinds, result.segments) == (kinds, segments)
    assert (result.prediction_kinds, result.num_prediction_layers) == predicted


PP2 = ("--pipeline-model-parallel-size", "2")


@pytest.mark.parametrize(
    ("pattern", "words", "named"),
    [
        ("*-X", (), "'X'"),
        ("*-/*/-", (), "differ"),
        ("*D", (), "latent"),
        ("", (), "--hybrid-layer-pattern"),
        ("*-*-|*-|*-", PP2, "3 segments"),
        ("*-*-", (*PP2, "--num-layers-per-virtual-pipeline-stage", "1"), "virtual"),
        ("*-*-", (*PP2, "--pipeline-model-parallel-layout", "Et|tL"), "layout"),
        ("*-*-", (*PP2, "--account-for-loss-in-pipeline-split"), "account-for-loss"),
        ("*-|*-", (*PP2, "--decoder-first-pipeline-num-layers", "1"), "decoder-first"),
        ("*E", (), "--num-experts"),
    ],
)
def test_what_megatron_refuses_is_refused(pattern: str, words: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        hybrid(pattern, *words)


def test_uneven_stages_without_segments() -> None:
    one = hybrid("*-" * 3, *PP2, "--decoder-first-pipeline-num-layers", "2")
    assert write_pattern(one) == "*-|*-*-"


def test_the_number_of_layers_is_that_of_the_pattern() -> None:
    assert hybrid("*-" * 3, "--num-layers", "24").model.num_layers == 6
    assert run("--hybrid-override-pattern=*-*-", "--num-layers", "4").model.layer_kinds == "*-*-"


def test_a_program_of_hybrid_models_needs_its_pattern() -> None:
    mamba = [*LINE[:3], "pretrain_mamba.py", *LINE[4:], "--num-layers", "4"]
    assert config_from_command(mamba).config.model.layer_kinds == "MMMM"
    with pytest.raises(ConfigError, match="--hybrid-layer-pattern"):
        config_from_command([*LINE, "--num-layers", "4"])


def test_other_models_of_megatron_are_not_taken_for_a_gpt() -> None:
    line = [*LINE[:3], "pretrain_t5.py", *LINE[4:], "--num-layers", "4"]
    assert "pretrain_t5.py" in config_from_command(line).config.unmodelled


def test_other_stages_keep_the_layers() -> None:
    one = hybrid("*-*-|*-*-", *PP2)
    command = [*LINE, "--hybrid-layer-pattern=*-*-|*-*-", *PP2]
    whole = apply_options(one, ["--pp", "1", "--dp", "16"])
    assert "--hybrid-layer-pattern" in options(whole)
    printed = rewrite_command(command, whole, running=one)
    assert "--hybrid-layer-pattern=*-*-*-*-" in printed
    assert config_from_command(printed).config.model == one.model


MAMBA = ("--mamba-state-dim", "64", "--mamba-num-groups", "4")


def test_layers_without_a_law_are_refused_without_a_measurement() -> None:
    with pytest.raises(ConfigError, match="mamba"):
        PRIORS.estimates([hybrid("M-" * 4, *MAMBA)])


def measured(config: RunConfig, forward_s: float) -> Any:
    """Times of an H100 with a table of the model's mixer in this layout."""
    (mixer,) = config.model.opaque_layers
    tokens, numel = 4096, mixer.split_numel // config.parallelism.tp
    rows = [
        dict.fromkeys(OPERATOR_COLUMNS, "")
        | {"device": GPU, "group": "mixer", "kind": "mamba", "phase": phase, "tp": None}
        | {"shape": f"{tokens}x{numel}", "element_nbytes": 2, "time_s": factor * forward_s}
        for phase, factor in (("forward", 1.0), ("backward", 2.5))
    ]
    table = pd.DataFrame(rows)
    return fit_steps(table_times([table], device=GPU, is_attention_fused=True))


def test_a_measured_layer_is_carried_by_how_its_work_splits() -> None:
    """Half of the parameters take half of the time, and less is known about it."""
    words = ("--sequence-parallel", "--tensor-model-parallel-size")
    base = hybrid("M-" * 8, *MAMBA, *words, "1")
    steps, slower = measured(base, 5e-3), measured(base, 15e-3)
    half = hybrid("M-" * 8, *MAMBA, *words, "2")
    grown = []
    for config in (base, half):
        one, other = steps.estimates([config])[0], slower.estimates([config])[0]
        # 8 layers x 4 or 8 micro-batches x 3.5 passes
        passes = 8 * config.num_microbatches * 3.5
        grown.append((other.time_s - one.time_s) / passes)
    assert grown[0] == pytest.approx(10e-3, rel=0.25)
    assert grown[1] == pytest.approx(5e-3, rel=0.35)


def test_stages_with_opaque_layers_have_their_parameters() -> None:
    one = hybrid("MM-|M*-", *MAMBA, *PP2)
    (mixer,) = one.model.opaque_layers
    norm, hidden = 4096, 4096
    mlp = 3 * hidden * 14336
    assert (
        stage_parameters(one, 0)[0] == 2 * (mixer.split_numel + norm) + mlp + norm + 32000 * hidden
    )
    assert len(stage_memories(one)) == 2


def test_flop_are_those_that_megatron_counts() -> None:
    """``hybrid_flops`` of ``megatron/training/training.py``, core_v0.19.0, of one token."""
    hidden, inner, state, groups, heads = 4096, 8192, 64, 4, 128
    mamba = 2 * hidden * (2 * inner + 2 * groups * state + heads)
    mamba += 7 * inner * state + 2 * inner * hidden
    attention = 4 * hidden * (hidden + hidden * 8 / 32) + 2 * 4096 * hidden
    mlp = 4 * (14336 / hidden) * 1.5 * hidden**2
    logits = 2 * hidden * 32000
    expected = 3 * (2 * mamba + attention + mlp + logits)
    assert model_flop_per_token(hybrid("MM*-", *MAMBA).model) == pytest.approx(expected, rel=1e-6)


def test_mixers_have_the_parameters_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    mamba = transformers.Mamba2Config(
        hidden_size=256, head_dim=32, num_heads=16, n_groups=2, state_size=16
    )
    delta = transformers.Qwen3NextConfig(
        hidden_size=256,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_num_value_heads=4,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
    )
    with torch.device("meta"):
        modules = Mamba2Mixer(mamba, layer_idx=0), Qwen3NextGatedDeltaNet(delta, layer_idx=0)
    ours = (
        mamba_layer(hidden=256, inner=512, heads=16, groups=2, state=16),
        delta_net_layer(
            hidden=256, key_heads=2, key_dim=32, value_heads=4, value_dim=32, convolution=4
        ),
    )
    for module, layer in zip(modules, ours, strict=True):
        numel = sum(p.numel() for p in module.parameters())
        assert layer.split_numel + layer.whole_numel == numel


@pytest.mark.parametrize(
    ("pattern", "words", "counts"),
    [
        ("G-*-G-*-", (), (510_944,)),
        ("G-*-", ("--tensor-model-parallel-size", "2", "--sequence-parallel"), (202_952,)),
        ("*-*-|*-*-", ("--pipeline-model-parallel-size", "2"), (374_400, 370_432)),
    ],
)
def test_a_model_has_the_parameters_that_megatron_prints(
    pattern: str, words: tuple[str, ...], counts: tuple[int, ...]
) -> None:
    """Counts that ``pretrain_hybrid.py`` of core_v0.19.0 prints for these arguments on its start
    ("number of parameters on (tensor, gtp_remat, pipeline) model parallel rank")."""
    description = config_from_command(
        [
            *("torchrun", f"--nproc-per-node={2 if words else 1}"),
            *("pretrain_hybrid.py", f"--hybrid-layer-pattern={pattern}", *words),
            *("--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"),
            *("--max-position-embeddings", "64", "--vocab-size", "4200", "--micro-batch-size", "2"),
            *("--global-batch-size", "8", "--tokenizer-type", "NullTokenizer"),
            *("--linear-key-head-dim", "16", "--linear-value-head-dim", "16"),
            *("--linear-num-key-heads", "4", "--linear-num-value-heads", "8"),
        ]
    )
    config = description.config
    assert tuple(sum(stage_parameters(config, stage)) for stage in range(len(counts))) == counts


def test_a_program_without_segments_keeps_its_option_and_even_stages() -> None:
    """Before core_v0.17.0 the pattern has another option, and no ``|``."""
    one = hybrid("*-*-*-*-", *PP2)
    old = replace(one, absent=("--hybrid-layer-pattern",))
    command = [*LINE, "--hybrid-override-pattern=*-*-*-*-", *PP2]
    assert splits(old, 4) == [()]
    assert len(splits(hybrid("*-*-" * 6, *PP2), 4)) > 1
    moved = apply_options(old, ["--pp", "4"])
    printed = rewrite_command(command, replace(moved, absent=old.absent), running=old)
    assert printed.count("--hybrid-override-pattern=*-*-*-*-") == 1
    assert not any("--hybrid-layer-pattern" in word for word in printed)


def test_a_search_finds_the_layouts_of_the_gpt() -> None:
    gpt, one = run("--num-layers", "8", *EXPERTS), hybrid("*E" * 8, *EXPERTS)
    results = [best_layouts(config, PRIORS, 16) for config in (gpt, one)]
    first, second = ([ranked.config.parallelism for ranked in result.best] for result in results)
    assert [(p.tp, p.pp, p.ep, p.dp) for p in first[:3]] == [
        (p.tp, p.pp, p.ep, p.dp) for p in second[:3]
    ]
