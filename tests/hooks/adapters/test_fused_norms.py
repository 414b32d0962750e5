"""H6: the model says whether norms run inside its products, and which attention it has."""

from __future__ import annotations

import pytest
import torch
from tiny_shape import run_of

from forerun.calib.workload.config import Attention
from forerun.hooks.adapters._megatron_model import with_layers


class LayerNormLinear(torch.nn.Linear):
    """Holds the weight of the norm inside, as Transformer Engine's does."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(8))


class TransformerLayer(torch.nn.Module):
    def __init__(self, product: torch.nn.Module) -> None:
        super().__init__()
        self.linear_qkv = product


@pytest.mark.parametrize("is_stated", [False, True])
def test_h6_what_was_built_goes_before_what_was_said(is_stated: bool) -> None:
    """``TransformerConfig.transformer_impl`` stays at its default where a spec is given by hand."""
    stated = run_of(fuses_norms=is_stated)
    fused, apart = TransformerLayer(LayerNormLinear()), TransformerLayer(torch.nn.Linear(8, 8))
    assert with_layers(stated, (torch.nn.Sequential(apart, fused),)).fuses_norms
    assert not with_layers(stated, (apart,)).fuses_norms


def test_cores_own_attention_is_unfused_whatever_was_said() -> None:
    """It is what a spec of core's own has on a GPU, where ``auto`` means a fused kernel."""
    places = ("megatron.core.transformer.dot_product_attention", "transformer_engine.pytorch")
    core, other = (
        type("DotProductAttention", (torch.nn.Module,), {"__module__": place})() for place in places
    )
    stated = run_of(attention=Attention.AUTO)
    assert with_layers(stated, (torch.nn.Sequential(core),)).attention is Attention.UNFUSED
    assert with_layers(stated, (torch.nn.Sequential(other),)).attention is Attention.AUTO


@pytest.mark.parametrize("is_stated", [False, True])
def test_h6_a_stage_without_layers_says_nothing(is_stated: bool) -> None:
    stated = run_of(fuses_norms=is_stated)
    assert with_layers(stated, (torch.nn.Embedding(8, 8),)) == stated
    assert with_layers(stated, ()) == stated
