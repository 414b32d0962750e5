"""Choices of recompute: megatron-core itself accepts each, and none of a plain model is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from forerun.calib.arguments.megatron_values import layout_values
from forerun.calib.memory.peak import memory
from forerun.calib.search.space import recomputes
from forerun.calib.workload.choices import layout_words
from forerun.calib.workload.config import Fp8Recipe, Recompute, RunConfig
from forerun.calib.workload.model_shape import Experts, LatentAttention

Layout = Callable[..., RunConfig]
EXPERTS = Experts(num_experts=4, ffn_hidden_size=32, shared_ffn_hidden_size=32, is_grouped=True)
LATENT = LatentAttention(kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=8, v_head_dim=16)
PROBE = """
import json, sys, warnings
warnings.simplefilter("ignore")
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
for case in json.load(sys.stdin):
    latent = case.pop("latent")
    (MLATransformerConfig if latent else TransformerConfig)(**case)
print("taken")
"""


def recomputed(config: RunConfig) -> list[RunConfig]:
    return [one.applied_to(config) for one in recomputes(config)]


def models(layout: Layout) -> dict[str, RunConfig]:
    return {
        "dense": layout(),
        "experts": layout(model={"experts": EXPERTS}),
        "shared beside": layout(model={"experts": replace(EXPERTS, overlaps_shared=True)}),
        "plain products": layout(model={"experts": replace(EXPERTS, is_grouped=False)}),
        "some experts": layout(
            model={"experts": replace(EXPERTS, layer_pattern=(False, True, True, True))}
        ),
        "latent": layout(model={"experts": EXPERTS, "latent_attention": LATENT}),
    }


def test_a_dense_model_has_every_set_of_its_modules(layout: Layout) -> None:
    configs = recomputed(layout())
    names = ("core_attn", "layernorm", "mlp")
    sets = {frozenset(chosen) for n in (1, 2, 3) for chosen in combinations(names, n)}
    selective = [one for one in configs if one.recompute is Recompute.SELECTIVE]
    assert {frozenset(one.recompute_modules or ("core_attn",)) for one in selective} == sets
    assert [one.recompute_num_layers for one in configs if one.recompute is Recompute.FULL] == [
        *(1, 2, 3),
        0,
    ]
    assert len(set(configs)) == len(configs) == 1 + 7 + 4


def test_more_that_is_computed_again_never_needs_more_memory(layout: Layout) -> None:
    """Compares nested sets of modules, and numbers of layers."""
    for config in models(layout).values():
        whole = [one for one in recomputed(config) if one.recompute is not Recompute.FULL]
        for less in whole:
            for more in whole:
                if set(_modules(less)) < set(_modules(more)):
                    assert memory(more).total_nbytes <= memory(less).total_nbytes


def _modules(config: RunConfig) -> tuple[str, ...]:
    if config.recompute is Recompute.NONE:
        return ()
    return config.recompute_modules or ("core_attn",)


@pytest.mark.parametrize(
    ("name", "there", "missing"),
    [
        ("dense", {"core_attn", "layernorm", "mlp"}, {"moe", "moe_act", "mla_up_proj"}),
        ("experts", {"moe", "moe_act", "shared_experts"}, {"mlp", "mla_up_proj"}),
        ("shared beside", {"moe", "moe_act"}, {"shared_experts"}),
        ("plain products", {"moe", "shared_experts"}, {"moe_act"}),
        ("some experts", {"mlp", "moe"}, set()),
        ("latent", {"mla_up_proj"}, set()),
    ],
)
def test_modules_are_those_of_the_model(
    layout: Layout, name: str, there: set[str], missing: set[str]
) -> None:
    names = {m for one in recomputed(models(layout)[name]) for m in _modules(one)}
    assert there <= names and not missing & names


def test_delayed_scaling_runs_no_norm_twice(layout: Layout) -> None:
    config = replace(layout(model={"experts": EXPERTS}), fp8=Fp8Recipe.DELAYED)
    results = {m for one in recomputed(config) for m in _modules(one)}
    assert not results & {"layernorm", "moe_act"}


def test_words(layout: Layout) -> None:
    texts = [layout_words(one).split(", ")[-1] for one in recomputed(layout())]
    assert "again" not in texts[0] and texts[-1] == "all layers computed again"
    assert {"core_attn+mlp computed again", "3 layers of a chunk computed again"} <= set(texts)


@pytest.mark.slow
def test_megatron_takes_every_choice(layout: Layout) -> None:
    pytest.importorskip("torch")
    cases = [case(one) for config in models(layout).values() for one in recomputed(config)]
    done = subprocess.run(
        [sys.executable, "-c", PROBE], input=json.dumps(cases), capture_output=True, text=True
    )
    assert done.stdout.strip() == "taken", done.stderr[-2000:]


def case(config: RunConfig) -> dict[str, Any]:
    """Fields of ``TransformerConfig``."""
    model, values = config.model, layout_values(config)
    result: dict[str, Any] = {
        "latent": model.latent_attention is not None,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        **{name: value for name, value in values.items() if name.startswith("recompute")},
    }
    if model.experts is not None:
        result |= {
            "num_moe_experts": model.experts.num_experts,
            "moe_grouped_gemm": model.experts.is_grouped,
            "moe_shared_expert_intermediate_size": model.experts.shared_ffn_hidden_size,
            "moe_token_dispatcher_type": "alltoall",
            "moe_shared_expert_overlap": model.experts.overlaps_shared,
            "add_bias_linear": False,
        }
    return result
