"""Layouts that Megatron refuses to train are refused with the value, the rule and a remedy."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.arguments.megatron_args import apply_options, options
from forerun.calib.errors import ConfigError
from forerun.calib.workload.config import (
    Batch,
    ContextComm,
    Experts,
    ModelShape,
    Parallelism,
    Recompute,
    RunConfig,
)

MODEL = ModelShape(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=16,
    seq_length=64,
    vocab_size=256,
)
SPARSE = replace(MODEL, experts=Experts(num_experts=4, ffn_hidden_size=96))


def layout(model: ModelShape = MODEL, **parallelism: Any) -> RunConfig:
    par = Parallelism(**parallelism)
    batch = Batch(micro_batch_size=1, global_batch_size=8 * par.dp)
    return RunConfig(model=model, parallelism=par, batch=batch)


def test_experts_over_tp_train_only_with_sequence_parallelism() -> None:
    with pytest.raises(ConfigError, match="experts with tp 2 need sequence parallelism"):
        layout(SPARSE, tp=2)
    assert layout(SPARSE, tp=2, is_sequence_parallel=True).parallelism.tp == 2
    assert layout(SPARSE, ep=2, dp=2).parallelism.ep == 2


def test_experts_split_over_their_own_tp() -> None:
    wide = replace(SPARSE, experts=Experts(num_experts=4, ffn_hidden_size=33))
    with pytest.raises(ConfigError, match="expert ffn_hidden_size 33 is not a multiple of its tp"):
        layout(wide, tp=2, is_sequence_parallel=True)
    assert layout(wide, tp=2, etp=1, is_sequence_parallel=True).parallelism.expert_tp == 1
    shared = replace(
        SPARSE, experts=Experts(num_experts=4, ffn_hidden_size=32, shared_ffn_hidden_size=33)
    )
    with pytest.raises(ConfigError, match="shared_ffn_hidden_size 33"):
        layout(shared, tp=2, is_sequence_parallel=True)


@pytest.mark.parametrize(
    ("degrees", "text"),
    [
        ({"dp": 4}, "does not divide dp x cp 4"),
        ({"dp": 3, "cp": 2, "ep": 2, "etp": 1}, ""),
        ({"dp": 6, "ep": 2}, ""),
    ],
)
def test_instances_of_the_optimizer_divide_the_replicas(degrees: dict[str, int], text: str) -> None:
    if not text:
        assert layout(SPARSE, num_optimizer_instances=3, **degrees).parallelism.dp
        return
    with pytest.raises(ConfigError, match=text):
        layout(SPARSE, num_optimizer_instances=3, **degrees)


def test_instances_of_the_optimizer_divide_the_replicas_of_experts() -> None:
    with pytest.raises(ConfigError, match="does not divide expert dp 1"):
        layout(SPARSE, num_optimizer_instances=2, dp=4, ep=4)


def test_interleaving_over_two_stages_needs_messages_that_overlap() -> None:
    with pytest.raises(ConfigError, match="vp 2 on 2 stages needs messages that overlap"):
        layout(pp=2, vp=2, overlaps_p2p=False)
    assert layout(pp=2, vp=2).parallelism.vp == 2


def test_sequence_parallelism_splits_what_context_parallelism_leaves() -> None:
    # 24 positions over cp 4 are 6 to a rank: 24 is a multiple of tp 4, 6 is not.
    with pytest.raises(ConfigError, match="seq_length 24 over cp 4 is not a multiple of tp 4"):
        layout(replace(MODEL, seq_length=24), tp=4, cp=4, is_sequence_parallel=True)


def test_recomputed_layers_are_not_negative() -> None:
    with pytest.raises(ConfigError, match="recompute_num_layers -2 is below 0"):
        replace(layout(), recompute=Recompute.FULL, recompute_num_layers=-2)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--fp8-format foo", "--fp8-format 'foo' is not known"),
        (
            "--recompute-granularity selective --recompute-modules mlp foo",
            "--recompute-modules foo is not known",
        ),
        ("--cp-comm-type ring", "ContextComm 'ring' is not known"),
        ("--pipeline-model-parallel-layout EtttL", "has 3 t, not num_layers 4"),
        ("--num-attention-heads 0", "num_attention_heads 0 is below 1"),
        ("--fp8-format hybrid --fp8-recipe zzz", "Fp8Recipe 'zzz' is not known"),
        ("--mtp-num-layers -1", "num_prediction_layers -1 is below 0"),
        ("--num-experts 4 --expert-tensor-parallel-size -1", "etp -1 is below 0"),
        (
            "--num-experts 4 --moe-shared-expert-intermediate-size -4",
            "shared_ffn_hidden_size -4 is below 0",
        ),
        ("--multi-latent-attention --q-lora-rank -5", "q_lora_rank -5 is below 0"),
        ("--multi-latent-attention --kv-lora-rank 0", "kv_lora_rank 0 is below 1"),
        ("--hidden-dropout nan", "--hidden-dropout 'nan' is not a number"),
    ],
)
def test_values_that_megatron_does_not_know(words: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        apply_options(layout(), words.split())


def test_gathering_context_is_spelled_as_transformer_engine_has_it() -> None:
    for spelling in ("all_gather", "allgather"):
        config = apply_options(layout(cp=2), ["--cp-comm-type", spelling])
        assert config.parallelism.context_comm is ContextComm.ALL_GATHER
        written = options(config)
        assert written[written.index("--cp-comm-type") + 1] == "all_gather"


@given(
    st.fixed_dictionaries(dict.fromkeys(("tp", "pp", "cp", "dp"), st.integers(1, 4))),
    st.integers(0, 8),
    st.integers(1, 16),
)
def test_each_divisor_that_a_refusal_of_experts_names_runs(
    degrees: dict[str, int], etp: int, ep: int
) -> None:
    """Eight ranks in tp 4 take ep 1 and 2 alone, though 4 and 8 divide them as well."""
    try:
        Parallelism(**degrees, etp=etp, ep=ep)
    except ConfigError as err:
        found = re.search(r"choose (ep|etp) from the divisors of (\d+)", str(err))
        assert found is not None
        number = int(found[2])
        for one in filter(lambda one: number % one == 0, range(1, number + 1)):
            chosen = {"etp": etp, "ep": one} if found[1] == "ep" else {"etp": one, "ep": 1}
            Parallelism(**degrees, **chosen)
