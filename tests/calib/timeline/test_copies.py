"""Copies of activations beside the passes: what hides, what stays, and what the memory gains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from one_layer import layer_activations

from forerun.calib.layers.blocks import BlockKind
from forerun.calib.memory.activations import OFFLOADED_MODULES, layer_tensors
from forerun.calib.memory.peak import memory
from forerun.calib.timeline.compiled import compile_layouts
from forerun.calib.timeline.evaluation import evaluate, step_times
from forerun.calib.timeline.items import Part
from forerun.calib.workload.config import Dispatcher, Experts, Precision, Recompute, RunConfig
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

Layout = Callable[..., RunConfig]
GPU = "NVIDIA H100 80GB HBM3"
EXPERTS = Experts(
    num_experts=8, top_k=2, ffn_hidden_size=32, is_grouped=True, dispatcher=Dispatcher.FLEX
)


def run(config: RunConfig, forward_s: float, backward_s: float) -> tuple[float, float]:
    """The step with so much for each copy, other work 1 ms an operator; and the host's part."""
    compiled = compile_layouts([config])
    times_s = np.full((len(compiled.items), 1), 1e-3)
    for place, item in enumerate(compiled.items):
        if isinstance(item, Operator) and item.kind is OperatorKind.HOST_COPY:
            times_s[place] = forward_s if item.phase is Phase.FORWARD else backward_s
        elif isinstance(item, Operator) and item.kind is OperatorKind.HOST_MICROBATCH:
            times_s[place] = 0.0
    groups = evaluate(compiled, times_s, contention=1.3)
    parts = groups[0].parts_s(0)
    assert sum(parts.values()) == pytest.approx(step_times(compiled, groups).item(), rel=1e-9)
    return step_times(compiled, groups).item(), parts[Part.HOST]


def test_a_copy_that_is_shorter_than_its_pass_costs_nothing(layout: Layout) -> None:
    config = layout(device=GPU, offload_modules=("core_attn",))
    assert run(config, 1e-3, 1e-3) == pytest.approx(run(config, 0.0, 0.0), rel=1e-9)


def test_a_longer_one_costs_what_is_beyond_the_pass(layout: Layout) -> None:
    """A pass of a layer is some ms: of a second the step gains that for each layer and pass."""
    config = layout(device=GPU, offload_modules=("core_attn",))
    free_s, _ = run(config, 0.0, 0.0)
    one_s, _ = run(config, 1.0, 0.0)
    two_s, host_s = run(config, 2.0, 0.0)
    num = config.num_microbatches * config.model.num_layers
    assert two_s - one_s == pytest.approx(num * 1.0, rel=1e-9)
    assert 0.9 * num < one_s - free_s < num
    assert host_s > 2.0 * num * 0.9


def test_offloaded_inputs_leave_the_device(layout: Layout) -> None:
    """Kept bytes fall by those of the modules, and each copy carries just these."""
    bare = layout(device=GPU, precision=Precision.BF16)
    config = replace(bare, offload_modules=("core_attn", "attn_proj"))
    all_nbytes, remaining_nbytes = (
        layer_activations(c, BlockKind.LAYER).saved_nbytes for c in (bare, config)
    )
    names = ("query, key, value", "attention output")
    away = sum(s.nbytes for s in layer_tensors(bare, BlockKind.LAYER) if s.name in names)
    assert 0 < away == pytest.approx(all_nbytes - remaining_nbytes)
    copies = [
        item
        for item in compile_layouts([config]).items
        if isinstance(item, Operator) and item.kind is OperatorKind.HOST_COPY
    ]
    assert {item.phase for item in copies} == {Phase.FORWARD, Phase.BACKWARD}
    assert {item.shape for item in copies} == {(round(away),)}
    deep = layout(device=GPU, precision=Precision.BF16, model={"num_layers": 16})
    less = replace(deep, offload_modules=config.offload_modules)
    assert memory(less).activations_nbytes < memory(deep).activations_nbytes


def test_what_runs_again_is_not_copied(layout: Layout) -> None:
    selective = {"recompute": Recompute.SELECTIVE, "recompute_modules": ("moe_act",)}
    whole = {"recompute": Recompute.FULL}
    names = {"moe_act": selective, "attn_norm": whole}
    for name, recompute in names.items():
        model = {"experts": EXPERTS}
        config = layout(device=GPU, model=model, offload_modules=(name,), **recompute)
        kinds = {i.kind for i in compile_layouts([config]).items if isinstance(i, Operator)}
        is_copied = name == "moe_act"
        # The input of the activation waits; its output alone is made anew.
        assert (OperatorKind.HOST_COPY in kinds) is is_copied


def test_every_module_names_a_tensor(layout: Layout) -> None:
    config = layout(device=GPU, model={"experts": EXPERTS})
    modules = {saved.offload for saved in layer_tensors(config, BlockKind.EXPERT_LAYER)}
    assert modules - {""} == OFFLOADED_MODULES - {"fused_group_mlp"}


def test_pages_hold_less_than_buffers(layout: Layout) -> None:
    """Buffers for 1.5 times the even rows: kept whole, or their rows copied to 1.1 times."""
    roomy = replace(EXPERTS, rank_capacity_factor=1.5)
    paged = replace(roomy, stash_factor=1.1)
    saved_nbytes = []
    for experts in (EXPERTS, roomy, paged):
        config = layout(device=GPU, model={"experts": experts}, precision=Precision.BF16)
        tensors = layer_tensors(config, BlockKind.EXPERT_LAYER)
        saved_nbytes.append(sum(s.nbytes for s in tensors if s.name.startswith("expert")))
    assert saved_nbytes[1] == pytest.approx(1.5 * saved_nbytes[0])
    assert saved_nbytes[2] == pytest.approx(1.1 * saved_nbytes[0])
    paged_config = layout(device=GPU, model={"experts": paged}, precision=Precision.BF16)
    moved = [
        item.shape[1] * item.element_nbytes
        for item in compile_layouts([paged_config]).items
        if isinstance(item, Operator) and item.kind is OperatorKind.PERMUTE and item.shape[0] == 1
    ]
    assert moved == pytest.approx([saved_nbytes[2]] * 2, rel=1e-3)
