"""Ground truth of a stand-in GPU in the terms of records: which operator, which collective.

The names below are this benchmark's own mapping of Megatron's and transformers' modules.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_BY_NAME = {
    "input_layernorm": "norm",
    "pre_mlp_layernorm": "norm",
    "q_layernorm": "norm",
    "k_layernorm": "norm",
    "final_layernorm": "norm",
    "linear_qkv": "linear_qkv",
    "core_attention": "core_attention",
    "linear_proj": "linear_proj",
    "linear_fc1": "linear_fc1",
    "linear_fc2": "linear_fc2",
    "output_layer": "logits",
    # transformers
    "embed_tokens": "embedding",
    "post_attention_layernorm": "norm",
    "norm": "norm",
    "q_proj": "linear",
    "k_proj": "linear",
    "v_proj": "linear",
    "gate_proj": "linear",
    "up_proj": "linear",
    "o_proj": "linear_proj",
    "down_proj": "linear_fc2",
    "lm_head": "logits",
}
_BY_CLASS = {
    "LanguageModelEmbedding": "embedding",
    "SelfAttention": "position",
    "MLP": "activation",
    "SequentialMLP": "permute",
    "TopKRouter": "router",
    "TransformerLayer": "residual",
    "LanguageModule": "loss",
    "MoEAlltoAllTokenDispatcher": "permute",
    "MoEAllGatherTokenDispatcher": "permute",
    "LlamaAttention": "core_attention",
    "LlamaMLP": "activation",
    "LlamaDecoderLayer": "residual",
}
_BOTH_NAMED = frozenset({"loss"})
"""Identified by method name, since many modules share the class."""
_COLLECTIVES = (
    ("allreduce", "all_reduce"),
    ("reduce_scatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"),
    ("send", "send"),
    ("recv", "recv"),
)
NOBODY = -1


@dataclass(slots=True, kw_only=True)
class Work:
    """One call of an operator, in any phase, with its kernels on the step's stream."""

    key: tuple[str, int, str, int]
    """Kind, layer, phase and micro-batch."""
    begin_s: float
    self_ns: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transferred:
    """One collective, from its call to its end."""

    key: tuple[str, str, int, int]
    """Collective, group, peer, and index among such collectives in the step."""
    duration_ns: float


def _rows(truth: dict[str, Any], table: str) -> Iterator[dict[str, Any]]:
    columns = truth[table]
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, row, strict=True))


class _Calls:
    """Maps calls to their operators."""

    def __init__(self, truth: dict[str, Any]) -> None:
        self._modules = truth["modules"]
        self._module = truth["calls"]["module"]
        self._parent = truth["calls"]["parent"]
        self._is_permuted = _has_several_experts(self._modules)
        self._owners: dict[int, int] = {}
        self._layers: dict[int, int] = {}

    def kind(self, call: int) -> str:
        """Return the operator's kind; empty if the call is no operator of its own."""
        module = self._modules[self._module[call]]
        classes = set(module["classes"])
        if classes & {"IdentityOp", "IdentityFuncOp"}:
            return ""
        name = module["name"].rpartition(".")[2]
        if name in _BY_NAME:
            return _BY_NAME[name]
        if name == "compute_language_model_loss":
            return "loss"
        operator_kind = next((kind for cls, kind in _BY_CLASS.items() if cls in classes), "")
        if operator_kind == "permute" and not self._is_permuted and "Sequential" in str(classes):
            return ""
        return "" if operator_kind in _BOTH_NAMED else operator_kind

    def owner(self, call: int) -> int:
        """Return the operator that a kernel of this call belongs to."""
        if call == NOBODY or not self._modules[self._module[call]]["classes"]:
            return NOBODY
        if call not in self._owners:
            has_kind = bool(self.kind(call))
            self._owners[call] = call if has_kind else self.owner(self._parent[call])
        return self._owners[call]

    def layer(self, call: int) -> int:
        """Return the transformer layer around a call, from 0; 0 outside of layers."""
        if call == NOBODY:
            return 0
        if call not in self._layers:
            module = self._modules[self._module[call]]
            parts = module["name"].split(".")
            if "TransformerLayer" in module["classes"]:
                layer_number = max(0, module["layer"] - 1)
            elif "LlamaDecoderLayer" in module["classes"]:
                layer_number = int(parts[-1])
            else:
                layer_number = self.layer(self._parent[call])
            self._layers[call] = layer_number
        return self._layers[call]


def _has_several_experts(modules: list[dict[str, Any]]) -> bool:
    numbers = {
        parts[parts.index("local_experts") + 1]
        for parts in (module["name"].split(".") for module in modules)
        if "local_experts" in parts[:-1]
    }
    return len(numbers) > 1


def work_of(truth: dict[str, Any]) -> dict[int, list[Work]]:
    """Return all operators charged on the step's stream, by step."""
    calls = _Calls(truth)
    streams = {row["step"]: row["stream"] for row in _rows(truth, "steps")}
    work_by_place: dict[Any, Work] = {}
    steps: dict[int, list[Work]] = defaultdict(list)
    for kernel in _rows(truth, "kernels"):
        step, call = kernel["step"], calls.owner(kernel["call"])
        if call == NOBODY or streams.get(step) != kernel["stream"]:
            continue
        place = (step, call, kernel["phase"])
        if place not in work_by_place:
            key = (calls.kind(call), calls.layer(call), kernel["phase"], kernel["ordinal"])
            work_by_place[place] = Work(key=key, begin_s=kernel["begin_s"])
            steps[step].append(work_by_place[place])
        work_by_place[place].self_ns += 1e9 * (kernel["end_s"] - kernel["begin_s"])
    return steps


def transfers_of(truth: dict[str, Any]) -> dict[int, list[Transferred]]:
    """Return all collectives, by step."""
    counts: Counter[Any] = Counter()
    steps: dict[int, list[Transferred]] = defaultdict(list)
    for row in _rows(truth, "transfers"):
        collective = next((kind for word, kind in _COLLECTIVES if word in row["method"]), "other")
        place = (row["step"], collective, row["group"], row["peer"])
        key = (collective, row["group"], row["peer"], counts[place])
        counts[place] += 1
        duration_ns = 1e9 * (row["end_s"] - row["issue_s"])
        steps[row["step"]].append(Transferred(key=key, duration_ns=duration_ns))
    return steps
