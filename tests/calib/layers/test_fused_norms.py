"""H6: norms that Transformer Engine runs inside products are no operators of their own.

What has a norm of its own is what Megatron's own specs say, with a stand-in for the classes of
Transformer Engine (``extensions/transformer_engine_spec_provider.py`` of core 0.16.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.calib.arguments.megatron_args import apply_options
from forerun.calib.arguments.megatron_namespace import from_namespace
from forerun.calib.layers.blocks import BlockKind, block
from forerun.calib.layers.stage_work import stage_operators
from forerun.calib.memory.peak import memory
from forerun.calib.workload.config import Recompute, RunConfig
from forerun.calib.workload.operators import OperatorCount, OperatorKind

GPU = "NVIDIA H100 80GB HBM3"
LLAMA_70B = {
    **{"num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672, "seq_length": 4096},
    **{"num_attention_heads": 64, "group_query_attention": True, "num_query_groups": 8},
    **{"swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False, "bf16": True},
    **{"tensor_model_parallel_size": 8, "sequence_parallel": True, "world_size": 8},
    **{"micro_batch_size": 1, "global_batch_size": 64, "padded_vocab_size": 128256},
    "untie_embeddings_and_output_weights": True,
}
EXPERTS = {"num_experts": 8, "moe_router_topk": 2}
LATENT = {"multi_latent_attention": True, "group_query_attention": False, "q_lora_rank": 1536}


class Norm:
    """A norm of its own."""


class NormLinear:
    """A column-parallel product with a norm inside."""


class Linear:
    """Any other product."""


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's layer specs, with what Transformer Engine's provider answers."""
    backends = pytest.importorskip("megatron.core.models.backends")
    from megatron.core.models.gpt import gpt_layer_specs

    class Provider(backends.LocalSpecProvider):
        def linear(self) -> type:
            return Linear

        def fuse_layernorm_and_linear(self) -> bool:
            return True

        def column_parallel_layer_norm_linear(self) -> type:
            return NormLinear

        def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
            return Norm

    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", Provider, raising=False)
    return gpt_layer_specs


def classes(spec: Any) -> Iterator[Any]:
    """Every class that a spec builds modules of."""
    if isinstance(spec, type):
        yield spec
    elif hasattr(spec, "submodules"):
        yield from classes(spec.module)
        yield from classes(spec.submodules)
    elif is_dataclass(spec):
        for field in fields(spec):
            yield from classes(getattr(spec, field.name))


def llama(**settings: Any) -> RunConfig:
    given = SimpleNamespace(**{**LLAMA_70B, **settings})
    return replace(from_namespace(given), device=GPU)


def counts(operators: Iterable[OperatorCount]) -> Counter[OperatorKind]:
    counts: Counter[OperatorKind] = Counter()
    for operator, count in operators:
        counts[operator.kind] += count
    return counts


@pytest.mark.filterwarnings("ignore")  # of Megatron's own, about what is not installed
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("experts", [{}, EXPERTS])
@pytest.mark.parametrize("latent", [{}, LATENT])
def test_h6_a_layer_has_the_norms_of_megatrons_spec(
    specs: Any, qk_norm: bool, experts: dict[str, Any], latent: dict[str, Any]
) -> None:
    spec = specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts.get("num_experts"),
        qk_layernorm=qk_norm,
        multi_latent_attention=bool(latent),
    )
    built = Counter(classes(spec))
    config = llama(qk_layernorm=qk_norm, **experts, **latent)
    kind = BlockKind.EXPERT_LAYER if experts else BlockKind.LAYER
    result = counts(block(config, kind).forward)
    assert result[OperatorKind.NORM] == built[Norm]
    assert result[OperatorKind.FUSED_NORM] == built[NormLinear]


def test_h6_a_pass_of_a_dense_model_has_one_norm_of_its_own() -> None:
    """Hooks see ``final_layernorm`` alone; Megatron's own layers have two in each layer beside."""
    fused = counts(stage_operators(llama(), 0).forward)
    apart = counts(stage_operators(llama(transformer_impl="local"), 0).forward)
    assert (fused[OperatorKind.NORM], fused[OperatorKind.FUSED_NORM]) == (1, 160)
    assert (apart[OperatorKind.NORM], apart[OperatorKind.FUSED_NORM]) == (161, 0)
    same = set(fused) - {OperatorKind.NORM, OperatorKind.FUSED_NORM}
    assert {kind: fused[kind] for kind in same} == {kind: apart[kind] for kind in same}


@pytest.mark.parametrize(
    ("impl", "is_fused"),
    [("local", False), ("transformer_engine", True), ("inference_optimized", True), (None, True)],
)
def test_h6_arguments_say_whose_layers_they_are(impl: str | None, is_fused: bool) -> None:
    """Transformer Engine's are Megatron's default (``--transformer-impl``)."""
    assert llama(transformer_impl=impl).fuses_norms is is_fused


def test_h6_no_processor_runs_norms_inside_products() -> None:
    config = replace(llama(), device="cpu")
    assert counts(stage_operators(config, 0).forward)[OperatorKind.NORM] == 161


def test_h6_another_layout_keeps_whose_layers_they_are() -> None:
    fused, apart = llama(), llama(transformer_impl="local")
    assert apply_options(fused, ["--tp", "4"]).fuses_norms
    assert not apply_options(apart, ["--tp", "4"]).fuses_norms
    assert not apply_options(fused, ["--transformer-impl", "local"]).fuses_norms
    assert apply_options(apart, ["--transformer-impl", "transformer_engine"]).fuses_norms


def test_h6_older_files_are_read_as_they_were() -> None:
    value = llama().to_json()
    assert RunConfig.from_json(value).fuses_norms
    assert not RunConfig.from_json(
        {k: v for k, v in value.items() if k != "fuses_norms"}
    ).fuses_norms


@pytest.mark.parametrize(("module", "inside"), [("mlp", 1), ("layernorm", 0), ("core_attn", 0)])
def test_h6_a_norm_runs_again_with_its_product(module: str, inside: int) -> None:
    """Megatron checkpoints no norm that is none (``recompute_pre_mlp_layernorm``), and the whole
    MLP with what its first product holds."""
    modules = {"recompute_granularity": "selective", "recompute_modules": [module]}
    result = block(llama(**modules), BlockKind.LAYER)
    assert counts(result.recompute)[OperatorKind.FUSED_NORM] == inside
    assert counts(result.recompute)[OperatorKind.NORM] == 0
    assert result.num_checkpoints == (module != "layernorm")


def test_h6_whole_layers_run_norms_again() -> None:
    config = replace(llama(), recompute=Recompute.FULL)
    recomputed = counts(block(config, BlockKind.LAYER, is_recomputed=True).recompute)
    assert recomputed[OperatorKind.FUSED_NORM] == 2


def test_h6_parameters_and_memory_are_those_of_norms_apart() -> None:
    """Transformer Engine keeps a norm's result for the weight's gradient of the product."""
    fused, apart = llama(), replace(llama(), fuses_norms=False)
    sizes = [block(config, BlockKind.LAYER).numel for config in (fused, apart)]
    assert sizes[0] == sizes[1]
    assert memory(fused) == memory(apart)
