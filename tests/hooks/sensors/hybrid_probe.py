"""Real layers of megatron.core as a hybrid pattern has them, one rank: their sites and shapes."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch.testing._internal.distributed.fake_pg import FakeStore

from forerun.hooks.sensors.modules import first_tensor
from forerun.hooks.sensors.sites import find_mixers, find_sites
from forerun.recipes.stand_in_cuda import install as stand_in

TOKENS, BATCH, HIDDEN = 8, 3, 16


class Mixer(torch.nn.Module):
    """Stand-in for Mamba's kernels, which need a GPU: products around a running mean."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.in_proj = torch.nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.out_proj = torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return self.out_proj(torch.cumsum(self.in_proj(hidden_states), dim=0)), None


def main() -> None:
    stand_in.install()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    block = torch.nn.ModuleList(layers()).train()
    sites, shapes = find_sites([block]), []
    results: dict[int, torch.Size] = {}
    for module, _ in sites:
        module.register_forward_hook(
            lambda owner, _, result: results.update({id(owner): first_tensor(result).shape})
        )
    hidden = torch.ones(TOKENS, BATCH, HIDDEN)
    for layer in block:
        result = layer(hidden_states=hidden, attention_mask=None)
        hidden = result[0] if isinstance(result, tuple) else result
    for module, site in sites:
        if site.shape_of is not None:
            shape = site.shape_of(tuple(results[id(module)]))
            shapes.append([site.kind.value, site.layer, list(shape)])
    kinds = Counter(site.kind.value for _, site in sites)
    symbols = [symbol for symbol, _, _ in find_mixers([block])]
    print("RESULT" + json.dumps({"kinds": kinds, "shapes": shapes, "symbols": symbols}))


def layers() -> list[torch.nn.Module]:
    """Attention, an MLP and a mixer, each a layer of its own."""
    config = TransformerConfig(
        num_layers=3,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        ffn_hidden_size=32,
        add_bias_linear=False,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    attention, mlp = get_gpt_layer_local_spec(), get_gpt_layer_local_spec()
    attention.submodules.pre_mlp_layernorm = attention.submodules.mlp = IdentityOp
    attention.submodules.mlp_bda = IdentityFuncOp
    mlp.submodules.input_layernorm = mlp.submodules.self_attention = IdentityOp
    mlp.submodules.self_attn_bda = IdentityFuncOp
    mamba = ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=WrappedTorchNorm, mixer=Mixer, mamba_bda=get_bias_dropout_add
        ),
    )
    specs = (attention, mlp, mamba)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return [
        build_module(one, config=config, layer_number=i + 1, pg_collection=groups)
        for i, one in enumerate(specs)
    ]


if __name__ == "__main__":
    main()
