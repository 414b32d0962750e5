"""Layouts that a checkpoint cannot be loaded into: each says so, and none is offered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from every_sharding import other_shardings
from planted_steps import steps_of

from forerun.calib.advice.planning import converter, plan
from forerun.calib.arguments.megatron_namespace import from_namespace
from forerun.calib.arguments.short_names import LayoutConstraint
from forerun.calib.memory.peak import Verdict
from forerun.calib.search.results import MemoryBudget
from forerun.calib.workload.config import (
    Cadence,
    CheckpointForm,
    Experts,
    Precision,
    RunConfig,
    Sharding,
)

Layout = Callable[..., RunConfig]
H100 = "NVIDIA H100 80GB HBM3"
MEGATRON_PARALLELISM = {
    "overlaps_grad_reduce": True,
    "overlaps_param_gather": True,
    "ranks_per_node": 8,
}


@pytest.fixture
def megatron(layout: Layout) -> RunConfig:
    """On two nodes of eight, slow for its small micro-batches over tp."""
    par = {**MEGATRON_PARALLELISM, "is_optimizer_distributed": True, "is_sequence_parallel": True}
    settings = {"precision": Precision.BF16, "device": H100}
    return layout(tp=4, dp=4, micro=1, samples=64, par=par, **settings)


def test_each_form_of_megatron_wants_a_converter_to_another(megatron: RunConfig) -> None:
    forms = {Sharding.NONE: 0, Sharding.OPTIMIZER: 1, Sharding.GRADS: 2, Sharding.WEIGHTS: 2}
    every = [megatron, *other_shardings(megatron)]
    assert {one.parallelism.sharded for one in every} == set(forms)
    for one in every:
        for other in every:
            is_same = forms[one.parallelism.sharded] == forms[other.parallelism.sharded]
            assert (converter(one, other) == "") is is_same
            hosted = replace(other, framework="torchtitan 0.2")
            assert converter(one, hosted) == ""
            unsaved = replace(other, cadence=Cadence(checkpoint_form=CheckpointForm.NONE))
            assert converter(one, unsaved) == ""


def test_another_form_of_checkpoint_is_said_and_never_offered(
    megatron: RunConfig, planted: Callable[..., Any]
) -> None:
    result = plan(megatron, steps_of(planted()))
    assert result.best is not None and not converter(result.best.config, megatron)
    is_other = [
        one.config.parallelism.sharded is not Sharding.OPTIMIZER for one in result.candidates
    ]
    assert any(is_other) and not all(is_other)
    for one, other in zip(result.candidates, is_other, strict=True):
        assert bool(one.conversion) is other
        if other and one.time_frac < 0:
            assert "converter" in result.obstacle(one)


@pytest.mark.slow
def test_what_can_be_loaded_is_looked_for_behind_what_cannot(
    megatron: RunConfig, planted: Callable[..., Any]
) -> None:
    """All of the twenty best are whole; the best that is offered stands behind them."""
    slow = planted(bytes_per_s=1e6, latency_s=0.0)
    result = plan(megatron, steps_of(slow))
    alone = plan(megatron, steps_of(slow), keep=LayoutConstraint.parse("sharding=optimizer"))
    assert result.best is not None and alone.best is not None
    assert result.best.config == alone.best.config
    only = plan(megatron, steps_of(slow), keep=LayoutConstraint.parse("sharding=none"))
    assert only.candidates and only.best is None and "converter" in only.nearest_miss


SPLITS = ("tp", "pp", "vp", "ep", "expert_tp", "chunk_layers")
OF_ONE_SPLIT = {CheckpointForm.BY_RANK, CheckpointForm.BY_BUFFER, CheckpointForm.BY_SHARD}


@pytest.mark.parametrize("form", CheckpointForm)
@pytest.mark.parametrize("experts", [None, Experts(num_experts=4, ffn_hidden_size=96)])
def test_a_form_of_one_split_is_continued_in_that_split_alone(
    layout: Layout, planted: Callable[..., Any], form: CheckpointForm, experts: Experts | None
) -> None:
    """Whatever is offered, and each row that says that it loads."""
    par = {**MEGATRON_PARALLELISM, "is_sequence_parallel": True}
    saved = {"cadence": Cadence(checkpoint_form=form), "model": {"experts": experts}}
    running = layout(tp=2, dp=4, micro=1, samples=32, par=par, device=H100, **saved)
    result = plan(
        running, steps_of(planted(bytes_per_s=1e7)), budget=MemoryBudget(capacity_nbytes=10**12)
    )
    rows = [one for one in result.candidates if one.verdict is not Verdict.DOES_NOT_FIT]
    wanted = [getattr(running.parallelism, name) for name in SPLITS]
    for row in rows:
        is_split = [getattr(row.config.parallelism, name) for name in SPLITS] == wanted
        par = row.config.parallelism
        loads = par.sharded is Sharding.NONE and (is_split or form not in OF_ONE_SPLIT)
        if form is CheckpointForm.BY_BUFFER:
            loads &= par.overlaps_grad_reduce
        if form is CheckpointForm.BY_WEIGHT:
            loads &= par.ep == 1
        loads &= form is not CheckpointForm.WEIGHTS
        loads |= form is CheckpointForm.NONE
        assert (row.conversion == "") is loads
        assert row.to_json()["conversion"] == (row.conversion or None)
    assert (result.best is None) is (form is CheckpointForm.WEIGHTS)
    assert result.best is None or not result.best.conversion
    assert any(row.conversion for row in rows) is (form is not CheckpointForm.NONE)


def test_states_that_megatron_cannot_load_here_are_no_offer(megatron: RunConfig) -> None:
    """``DistributedOptimizer`` of core 0.16.1 loads Adam of Transformer Engine or Apex alone."""
    for form in (CheckpointForm.BY_RANK, CheckpointForm.BY_BUFFER, CheckpointForm.BY_WEIGHT):
        running = replace(megatron, cadence=Cadence(checkpoint_form=form))
        assert converter(running, running) == ""
        without = replace(running, absent=("transformer_engine",))
        assert "Transformer Engine" in converter(running, without)


@pytest.mark.parametrize(
    ("arguments", "form"),
    [
        ({}, "unknown"),
        ({"ckpt_format": "torch_dist"}, "none"),
        ({"ckpt_format": "torch", "load": "d"}, "torch"),
        ({"ckpt_format": "torch", "save": "d", "use_distributed_optimizer": True}, "torch"),
        ({"ckpt_format": "torch", "save": "d", "no_save_optim": True}, "weights"),
        ({"ckpt_format": "torch_dist", "save": "d"}, "torch_dist, fully reshardable"),
        ({"ckpt_format": "zarr", "save": "d"}, "torch_dist, fully reshardable"),
        ({"ckpt_format": "fsdp_dtensor", "save": "d"}, "fsdp_dtensor"),
        ({"ckpt_format": "torch_dcp", "save": "d"}, "fsdp_dtensor"),
    ],
)
def test_the_form_is_that_of_megatrons_arguments(arguments: dict[str, Any], form: str) -> None:
    assert from_namespace(_namespace(**arguments)).cadence.checkpoint_form.value == form


@pytest.mark.parametrize(
    ("arguments", "is_by_weight"),
    [
        # As _build_sharded_state_dict_metadata of core 0.16.1 and of 0.12 chooses.
        ({"dist_ckpt_optim_fully_reshardable": False, "ckpt_fully_parallel_save": True}, False),
        ({"dist_ckpt_optim_fully_reshardable": True, "ckpt_fully_parallel_save": True}, True),
        ({"ckpt_fully_parallel_save": True}, True),
        ({"ckpt_fully_parallel_save": False}, False),
        (
            {"dist_ckpt_optim_fully_reshardable": False, "ckpt_fully_parallel_save": True}
            | {"dist_ckpt_save_pre_mcore_014": True},
            True,
        ),
    ],
)
def test_a_distributed_optimizer_is_saved_by_buffer_or_by_weight(
    arguments: dict[str, Any], is_by_weight: bool
) -> None:
    given = {"ckpt_format": "torch_dist", "save": "d", "use_distributed_optimizer": True}
    form = from_namespace(_namespace(**given, **arguments)).cadence.checkpoint_form
    assert form is (CheckpointForm.BY_WEIGHT if is_by_weight else CheckpointForm.BY_BUFFER)


def _namespace(**arguments: Any) -> SimpleNamespace:
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}
    return SimpleNamespace(**sizes, seq_length=16, micro_batch_size=1, **arguments)
