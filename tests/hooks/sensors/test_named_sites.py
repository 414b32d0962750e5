"""Operators of torchtitan's and transformers' decoders, of layers of experts, and in wrappers."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import titan_decoder as titan
import torch
from titan_decoder import BATCH, EXPERTS, FFN, HIDDEN, SEQ, TOP_K, VOCAB
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from forerun.calib.arguments.hugging_face import Training, from_training
from forerun.calib.marks._attribution import Attribution
from forerun.calib.records.record_kinds import OperatorRecord, PhaseRecord
from forerun.calib.workload.operators import OperatorKind as K
from forerun.calib.workload.operators import Phase
from forerun.hooks.process.guard import Guard
from forerun.hooks.sensors.compiling import StallHooks
from forerun.hooks.sensors.modules import ModuleHooks, local
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.sites import expert_parts, find_unhookable, transformers_config
from forerun.hooks.sensors.step_log import Site, StepLog
from forerun.hooks.sensors.stopwatch import HostStopwatch

TOKENS, PLANTED_S = BATCH * SEQ, 0.3
LAYER = {K.NORM: 2, K.LINEAR: 3, K.CORE_ATTENTION: 1, K.LINEAR_PROJ: 1, K.POSITION: 1}
LAYER |= {K.RESIDUAL: 1}
MLP = {K.LINEAR: 2, K.LINEAR_FC2: 1, K.ACTIVATION: 1}
SPARSE = {K.ROUTER: 1, K.EXPERTS: 1, K.PERMUTE: 1}
BOTH = Counter(LAYER) + Counter(LAYER) + Counter(MLP) + Counter(MLP) + Counter(SPARSE)
ENDS = Counter({K.EMBEDDING: 1, K.NORM: 1, K.LOGITS: 1})


PARALLELIZED = """
def parallelize(module):
    fn = module.forward
    def forward_with_redistribution(*args, **kwargs):
        return fn(*args, **kwargs)
    module.forward = forward_with_redistribution
"""
"""As torchtitan's module has it since July 2026, without the redistribution."""


def records_of(model: nn.Module, tokens: torch.Tensor) -> list[OperatorRecord]:
    guard, recorder = Guard(), Recorder(HostStopwatch())
    hooks = ModuleHooks([model], recorder, guard)
    hooks.install()
    recorder.open(StepLog(step=0, window=0, sites=hooks.sites))
    recorder.begin_phase("forward-compute")
    loss = model(tokens)
    loss = getattr(loss, "logits", loss).sum()
    recorder.end_phase("forward-compute")
    recorder.begin_phase("backward-compute")
    loss.backward()
    recorder.end_phase("backward-compute")
    log = recorder.close()
    hooks.remove()
    assert guard.num_faults == 0 and hooks.unseen == () and log is not None
    return [r for r in Attribution(log).records() if isinstance(r, OperatorRecord)]


def counted(records: list[OperatorRecord], phase: Phase) -> Counter[K]:
    return Counter(record.kind for record in records if record.phase is phase)


@pytest.fixture
def tokens() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(0, VOCAB, (BATCH, SEQ))


def test_each_part_of_torchtitans_layers_is_an_operator(tokens: torch.Tensor) -> None:
    records = records_of(titan.Transformer(), tokens)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert counted(records, phase) == BOTH + ENDS
    assert {(r.kind, r.shape) for r in records} == {
        (K.EMBEDDING, (TOKENS, HIDDEN, VOCAB)),
        (K.NORM, (TOKENS, HIDDEN)),
        (K.LINEAR, (TOKENS, HIDDEN, HIDDEN)),
        (K.LINEAR, (TOKENS, HIDDEN, HIDDEN // 2)),
        (K.LINEAR, (TOKENS, HIDDEN, FFN)),
        (K.CORE_ATTENTION, (BATCH, 4, 2, SEQ, 2)),
        (K.POSITION, (TOKENS, 2 * HIDDEN)),
        (K.LINEAR_PROJ, (TOKENS, HIDDEN, HIDDEN)),
        (K.ACTIVATION, (TOKENS, 2 * FFN, FFN)),
        (K.LINEAR_FC2, (TOKENS, FFN, HIDDEN)),
        (K.ROUTER, (TOKENS, HIDDEN, EXPERTS)),
        (K.PERMUTE, (TOKENS, HIDDEN, TOP_K)),
        (K.EXPERTS, (TOKENS * TOP_K, HIDDEN, FFN, 1, EXPERTS, EXPERTS)),
        (K.RESIDUAL, (TOKENS, HIDDEN)),
        (K.LOGITS, (TOKENS, HIDDEN, VOCAB)),
    }
    assert {r.layer for r in records if r.kind is K.EXPERTS} == {1}


def test_a_forward_that_torchtitan_parallelizes_is_the_modules_own(tokens: torch.Tensor) -> None:
    model = titan.Transformer()
    names: dict[str, Any] = {"__name__": "torchtitan.protocols.module"}
    exec(PARALLELIZED, names)
    for module in model.layers.modules():
        names["parallelize"](module)
    records = records_of(model, tokens)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert counted(records, phase) == BOTH + ENDS


def test_a_layer_in_a_checkpoint_runs_again_as_itself(tokens: torch.Tensor) -> None:
    model = titan.Transformer()
    for name, layer in list(model.layers.items()):
        model.layers[name] = checkpoint_wrapper(layer, early_stop=False)
    records = records_of(model, tokens)
    assert counted(records, Phase.RECOMPUTE) == BOTH
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert counted(records, phase) == BOTH + ENDS


def test_where_a_layer_runs_again_in_part_its_backward_pass_has_its_time(
    tokens: torch.Tensor,
) -> None:
    model = titan.Transformer()
    for name, layer in list(model.layers.items()):
        model.layers[name] = checkpoint_wrapper(layer)  # until the last tensor that is missing
    records = records_of(model, tokens)
    recomputed, back = (
        [r for r in records if r.phase is phase] for phase in (Phase.RECOMPUTE, Phase.BACKWARD)
    )
    assert 0 < len(recomputed) < BOTH.total()
    assert counted(records, Phase.BACKWARD) == BOTH + ENDS
    assert sum(record.duration_ns > 0 for record in back) > 0.9 * len(back)


def sparse_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            num_hidden_layers=2, hidden_size=HIDDEN, intermediate_size=20,
            moe_intermediate_size=FFN, num_attention_heads=4, num_key_value_heads=2, head_dim=2,
            num_experts=EXPERTS, num_experts_per_tok=TOP_K, vocab_size=VOCAB, mlp_only_layers=[0],
        )
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_the_experts_of_transformers_are_no_residual(tokens: torch.Tensor) -> None:
    records = records_of(sparse_llama(), tokens)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        counts = counted(records, phase)
        parts = (K.ROUTER, K.EXPERTS, K.ELEMENTWISE, K.ACTIVATION, K.LINEAR_FC2, K.RESIDUAL)
        assert [counts[kind] for kind in parts] == [1, 1, 1, 1, 1, 2]
    shapes = {(r.kind, r.shape) for r in records if r.layer == 1}
    assert shapes >= {
        (K.ROUTER, (TOKENS, HIDDEN, EXPERTS)),
        (K.EXPERTS, (TOKENS, HIDDEN, FFN, TOP_K, EXPERTS, EXPERTS)),
        (K.ELEMENTWISE, (TOKENS, HIDDEN)),
    }


class Gathering(nn.RMSNorm):
    """Its input is the result of a functional collective, which it waits for."""

    def forward(self, x):
        return super().forward(functional_collectives.wait_tensor(x))


def test_what_a_functional_collective_waits_is_none_of_an_operators_time(
    tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
        time.sleep(PLANTED_S)
        return tensor

    monkeypatch.setattr(functional_collectives, "wait_tensor", wait_tensor)
    if (compiler := sys.modules.get("torch._dynamo.convert_frame")) is not None:
        monkeypatch.setattr(compiler, "FRAME_COUNTER", 0)  # of other tests of this process
    model = titan.Transformer()
    model.norm = Gathering(HIDDEN)
    recorder, guard = Recorder(HostStopwatch()), Guard()
    hooks, stalls = ModuleHooks([model], recorder, guard), StallHooks(recorder, guard)
    for each in (hooks, stalls):
        each.install()
    recorder.open(StepLog(step=0, window=0, sites=hooks.sites))
    recorder.begin_phase("forward-compute")
    model(tokens)
    recorder.end_phase("forward-compute")
    log = recorder.close()
    for each in (hooks, stalls):
        each.remove()
    assert guard.num_faults == 0 and log is not None
    assert functional_collectives.wait_tensor is wait_tensor
    records = list(Attribution(log).records())
    (around,) = (r for r in records if isinstance(r, PhaseRecord))
    norms = [r for r in records if isinstance(r, OperatorRecord) and r.kind is K.NORM]
    assert around.wait_ns >= PLANTED_S * 1e9 and len(norms) == 5
    assert all(norm.duration_ns < PLANTED_S * 1e9 for norm in norms)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, rows):
        return self.w2(self.w1(rows))


class SparseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, hidden):
        weights = self.gate(hidden).softmax(-1).unbind(-1)
        return sum(w.unsqueeze(-1) * e(hidden) for w, e in zip(weights, self.experts, strict=True))


def test_experts_that_are_modules_are_one_operator() -> None:
    block = SparseBlock()
    parts = expert_parts(block, TOP_K)
    kinds = {key: None if part is None else part.kind for key, part in parts.items()}
    inside = dict.fromkeys(map(id, block.experts.modules()))
    assert kinds == {id(block): K.EXPERTS, id(block.gate): K.ROUTER} | inside
    shape_of = getattr(parts[id(block)], "shape_of", None)
    assert shape_of is not None
    assert shape_of((BATCH, SEQ, HIDDEN)) == (TOKENS, HIDDEN, FFN, TOP_K, EXPERTS, EXPERTS)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


def test_of_a_tensor_on_two_ranks_the_part_that_is_here_counts(two_ranks: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    spread = DTensor.from_local(torch.zeros(4, 6), mesh, [Shard(1)], run_check=False)
    assert spread.shape == (4, 12) and local(spread).shape == (4, 6)
    assert local(torch.zeros(3)).shape == (3,)


class SharedExpertMLP(nn.Module):
    """As Megatron's: with overlap its two products are called by methods, and it is not."""

    def __init__(self, is_overlapped: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(moe_shared_expert_overlap=is_overlapped)
        self.linear_fc1, self.linear_fc2 = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_shared_experts_that_run_in_parts_are_named_and_their_products_stay(
    is_overlapped: bool,
) -> None:
    module = SharedExpertMLP(is_overlapped)
    places = [(module, "forward", Site(kind=K.ACTIVATION))]
    places += [(m, "forward", Site(kind=K.LINEAR)) for m in (module.linear_fc1, module.linear_fc2)]
    reach = find_unhookable([module], places)
    assert [reach.why(owner, name) for owner, name, _ in places] == [
        "overlapped" if is_overlapped else None,
        None,
        None,
    ]


FAMILIES = (
    *("LlamaConfig", "MistralConfig", "MixtralConfig", "Qwen2Config", "Qwen3Config"),
    *("Qwen2MoeConfig", "Qwen3MoeConfig", "GPT2Config", "GPTNeoXConfig"),
    *("DeepseekV2Config", "DeepseekV3Config"),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_is_read_without_its_own_code(family: str) -> None:
    """Its class is the user's, which notes all queries; its keys are as in its ``to_dict``."""
    kind: Any = getattr(pytest.importorskip("transformers"), family)
    queries: list[str] = []

    def getattribute(config: Any, name: str) -> Any:
        queries.append(name)
        return kind.__getattribute__(config, name)

    model = nn.Module()
    model.config = type("Own", (kind,), {})()
    expected = model.config.to_dict()
    type(model.config).__getattribute__ = getattribute
    keys = transformers_config(model)
    assert queries == [] and keys is not None
    training = Training(micro_batch_size=2, seq_length=16)
    assert from_training(keys, training) == from_training(expected, training)
    assert all(keys[name] == expected[value] for name, value in kind.attribute_map.items())
