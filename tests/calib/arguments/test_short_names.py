"""Short names mean what Megatron's own options mean, and are read back from any layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_shape import SMALL

from forerun.calib.arguments.megatron_args import apply_options
from forerun.calib.arguments.short_names import LayoutConstraint, expand
from forerun.calib.errors import ConfigError
from forerun.calib.workload.choices import NAMED_CHOICES, choice
from forerun.calib.workload.config import (
    Batch,
    Experts,
    Parallelism,
    Recompute,
    RunConfig,
    Sharding,
)

DENSE = RunConfig(
    model=replace(SMALL, num_layers=8),
    parallelism=Parallelism(dp=16, is_optimizer_distributed=True),
    batch=Batch(micro_batch_size=1, global_batch_size=64),
    device="NVIDIA H100 80GB HBM3",
    framework="Megatron-LM",
)
MIXED = replace(DENSE, model=replace(DENSE.model, experts=Experts(
    num_experts=8, top_k=2, ffn_hidden_size=64)))  # fmt: skip

SAME = [
    ("--tp 2", "--tensor-model-parallel-size 2"),
    (
        "--pp 4 --vpp 2",
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1",
    ),
    ("--cp 2", "--context-parallel-size 2"),
    ("--mbs 2 --gbs 128", "--micro-batch-size 2 --global-batch-size 128"),
    ("--seq=64", "--seq-length 64"),
    ("--dp 8", "--data-parallel-size 8"),
    ("--tp 2 --sp on", "--tensor-model-parallel-size 2 --sequence-parallel"),
    (
        "--recompute full",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    ("--recompute selective", "--recompute-granularity selective"),
    (
        "--recompute mlp+core_attn",
        "--recompute-granularity selective --recompute-modules core_attn mlp",
    ),
    ("--zero 0", "--no-use-distributed-optimizer"),
    (
        "--sharding fsdp",
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
    ),
    ("--instances 2", "--num-distributed-optimizer-instances 2"),
]


@pytest.mark.parametrize(("short", "long"), SAME)
def test_a_short_name_means_megatrons_own_options(short: str, long: str) -> None:
    assert apply_options(DENSE, short.split()) == apply_options(DENSE, long.split())


def test_experts_split_by_short_names() -> None:
    layout = apply_options(
        MIXED, ["--ep", "4", "--tp", "2", "--etp", "1", "--sp", "on"]
    ).parallelism
    assert (layout.ep, layout.tp, layout.etp, layout.expert_tp) == (4, 2, 1, 1)


@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    mbs=st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "selective", "full", "core_attn+mlp", "mlp"]),
    sharding=st.sampled_from([one.value for one in Sharding]),
)
def test_what_is_asked_for_is_read_back(
    tp: int, pp: int, mbs: int, recompute: str, sharding: str
) -> None:
    chosen = {"tp": tp, "pp": pp, "mbs": mbs, "recompute": recompute, "sharding": sharding}
    words = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
    config = apply_options(DENSE, words)
    assert {name: choice(name).read(config) for name in chosen} == chosen
    rewritten = [word for one in NAMED_CHOICES for word in _options(one.name, config)]
    assert apply_options(config, rewritten) == config
    assert LayoutConstraint.parse(
        ",".join(f"{name}={value}" for name, value in chosen.items())
    ).allows(config)


def _options(name: str, config: RunConfig) -> tuple[str, ...]:
    one = choice(name)
    if name in ("ep", "etp"):  # This model has no experts.
        return ()
    return one.options(one.read(config))


def test_recompute_goes_back_to_none() -> None:
    full = apply_options(DENSE, ["--recompute", "full"])
    assert full.recompute is Recompute.FULL
    assert apply_options(full, ["--recompute", "none"]) == DENSE


def test_other_options_stay_as_they_are() -> None:
    words = ["train.py", "--lr", "1e-4", "--swiglu", "--rampup-batch-size", "8", "8", "100"]
    assert expand(words) == words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--tpp", "2"], "nearest: --tp"),
        (["--mb", "2"], "nearest: --mbs"),
        (["--tp"], "write --tp N"),
        (["--tp", "2", "4"], "2 values"),
        (["--tp", "two"], "not a whole number"),
        (["--tp", "0"], "below 1"),
        (["--recompute", "attn"], "core_attn"),
        (["--zero", "4"], "0 to 3"),
        (["--sp", "yes"], "on or off"),
    ],
)
def test_an_error_says_value_and_remedy(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        apply_options(DENSE, words)


def test_names_and_spellings_are_distinct() -> None:
    spellings = [one for choice in NAMED_CHOICES for one in choice.spellings]
    assert len(set(spellings)) == len(spellings)


def test_keep_says_of_each_layout_whether_it_is_meant() -> None:
    keep = LayoutConstraint.parse("tp=2,pp=1|2, recompute=none")
    assert str(keep) == "tp=2,pp=1|2,recompute=none"
    expected = {
        "--tp 2": True,
        "--tp 2 --pp 2": True,
        "--tp 2 --pp 4": False,
        "--tp 4": False,
        "--tp 2 --recompute full": False,
    }
    assert {w: keep.allows(apply_options(DENSE, w.split())) for w in expected} == expected
    assert keep.axes["pp"] == (1, 2) and "cp" not in keep.axes
    assert LayoutConstraint().allows(DENSE)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tp", "is not NAME=VALUE"),
        ("tp=", "is not NAME=VALUE"),
        ("", "is not NAME=VALUE"),
        ("tpp=2", "did you mean tp"),
        ("tp=2,tp=4", r"tp=A\|B"),
        ("tp=x", "whole number"),
    ],
)
def test_what_keep_cannot_mean_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        LayoutConstraint.parse(text)
