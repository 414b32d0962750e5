"""Where the operators of a transformers model are: modules by name, shapes by its configuration.

Queries, keys and values, and the two halves of a gated MLP, are products of their own there.
Attention outside its products is one operator with the rotation of its heads.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from ...calib.workload.operators import OperatorKind
from .step_log import Site

Shape = tuple[int, ...]

_BY_NAME = (
    (r"(embed_tokens|wte|embed_in)", OperatorKind.EMBEDDING),
    (r"(input_layernorm|post_attention_layernorm|norm|ln_1|ln_2|ln_f)", OperatorKind.NORM),
    (r"(q_norm|k_norm|final_layer_norm)", OperatorKind.NORM),
    (r"(q_proj|k_proj|v_proj|gate_proj|up_proj)", OperatorKind.LINEAR),
    (r"(c_attn|query_key_value)", OperatorKind.LINEAR_QKV),
    (r"(o_proj|attn\.c_proj|attention\.dense)", OperatorKind.LINEAR_PROJ),
    (r"(c_fc|dense_h_to_4h)", OperatorKind.LINEAR_FC1),
    (r"(down_proj|mlp\.c_proj|dense_4h_to_h)", OperatorKind.LINEAR_FC2),
    (r"(lm_head|embed_out)", OperatorKind.LOGITS),
    (r"(self_attn|attn|attention)", OperatorKind.CORE_ATTENTION),
    (r"mlp", OperatorKind.ACTIVATION),
    (r"(layers|h)\.\d+", OperatorKind.RESIDUAL),
)
_PATTERNS = tuple((re.compile(rf"(^|.*\.){name}$"), kind) for name, kind in _BY_NAME)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_LAYER = re.compile(r"\.(?:layers|h)\.(\d+)(?:\.|$)")


def transformers_sites(model: torch.nn.Module) -> list[tuple[torch.nn.Module, Site]]:
    """The operators of a decoder that carries a transformers configuration, but for experts.

    Empty where there is no such configuration.
    """
    config = next((c for c in map(_config, model.modules()) if c is not None), None)
    if config is None:
        return []
    shapes = _Shapes(config)
    found = []
    for name, module in model.named_modules():
        kind = next((kind for pattern, kind in _PATTERNS if pattern.match(name)), None)
        if kind is not None and not (shapes.is_sparse and ".mlp" in name):
            layer = _LAYER.search(name)
            number = int(layer[1]) if layer else 0
            found.append((module, Site(kind=kind, layer=number, shape_of=shapes.of(kind))))
    return found


def _config(module: torch.nn.Module) -> Any | None:
    config = getattr(module, "config", None)
    return config if hasattr(config, "model_type") and hasattr(config, "to_dict") else None


class _Shapes:
    """Canonical shapes of operators that their tensors alone do not tell; batch comes first."""

    def __init__(self, config: Any) -> None:
        self._heads = int(config.num_attention_heads)
        self._groups = int(getattr(config, "num_key_value_heads", None) or self._heads)
        width = int(config.hidden_size) // self._heads
        self._channels = int(getattr(config, "head_dim", None) or width)
        inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
        self._ffn = int(inner or 4 * config.hidden_size)
        self._gates = 1 + hasattr(config, "intermediate_size")
        self._vocab = int(config.vocab_size)
        self.is_sparse = any(hasattr(config, name) for name in _EXPERTS)

    def of(self, kind: OperatorKind) -> Any:
        """What computes the shape of this kind from a module's result, or None: its tensors do."""
        known = {
            OperatorKind.CORE_ATTENTION: self._attention,
            OperatorKind.ACTIVATION: self._activation,
            OperatorKind.EMBEDDING: self._embedding,
        }
        return known.get(kind)

    def _attention(self, result: Shape) -> Shape:
        return (result[0], self._heads, self._groups, result[1], self._channels)

    def _activation(self, result: Shape) -> Shape:
        return (result[0] * result[1], self._gates * self._ffn, self._ffn)

    def _embedding(self, result: Shape) -> Shape:
        return (result[0] * result[1], result[2], self._vocab)
