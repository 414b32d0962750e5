"""Splits of the ranks: all that ``RunConfig`` accepts, each once, and what rules leave out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.calib.arguments.short_names import LayoutConstraint
from forerun.calib.errors import ConfigError
from forerun.calib.search.cells import Cells, cells_of, choices_of, num_variants
from forerun.calib.search.space import (
    MOST_CONTEXT,
    MOST_VIRTUAL,
    num_nodes,
    recomputes,
    states,
)
from forerun.calib.workload.config import (
    ContextComm,
    Engine,
    Experts,
    Recompute,
    RunConfig,
    Sharding,
)

Layout = Callable[..., RunConfig]
GPU = "NVIDIA H100 80GB HBM3"
EXPERTS = Experts(num_experts=4, ffn_hidden_size=96)


def evenly_split_layouts(cells: Cells) -> set[RunConfig]:
    """Layouts of cells whose stages hold equally many layers."""
    return {one for one in [*cells.plain.configs()] if not one.parallelism.chunk_layers}


def accepted(make: Callable[..., RunConfig], **axes: Any) -> Iterator[RunConfig]:
    """Yield the accepted configs of all combinations of values, tried one by one."""
    for values in itertools.product(*axes.values()):
        try:
            yield make(**dict(zip(axes, values, strict=True)))
        except ConfigError:
            continue


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(num_ranks=st.sampled_from([1, 2, 4, 6, 8, 16]), samples=st.sampled_from([8, 12, 16]))
def test_every_cell_runs_the_same_batch_on_the_ranks(
    layout: Layout, num_ranks: int, samples: int
) -> None:
    cells = cells_of(layout(samples=samples, micro=1, device=GPU), num_ranks)
    configs = [cells.layout(place) for place in range(len(cells))]
    assert len(set(configs)) == len(configs)
    for config, number in zip(configs, cells.table.num_microbatches.tolist(), strict=True):
        par = config.parallelism
        assert par.num_ranks == num_ranks and config.recompute is Recompute.NONE
        assert number * config.batch.micro_batch_size * par.dp == samples


def test_no_split_of_a_dense_model_is_missing(layout: Layout) -> None:
    """All degrees, micro-batches and splits of the sequence, asked whether they are accepted."""

    def make(tp: int, cp: int, pp: int, dp: int, vp: int, micro: int, is_split: bool) -> RunConfig:
        if tp * cp * pp * dp != 4 or (is_split and tp == 1):
            raise ConfigError("no split of four ranks")
        par = {"vp": vp, "cp": cp, "is_sequence_parallel": is_split}
        return layout(tp=tp, pp=pp, dp=dp, micro=micro, par=par, device=GPU)

    degrees = dict.fromkeys(("tp", "cp", "pp", "dp", "vp"), (1, 2, 4))
    expected = set(accepted(make, **degrees, micro=range(1, 17), is_split=(False, True)))
    assert evenly_split_layouts(cells_of(layout(dp=4, device=GPU), 4)) == expected
    assert {one.parallelism.vp for one in expected} == {1, 2}


def test_no_split_of_experts_is_missing(layout: Layout) -> None:
    def make(tp: int, pp: int, dp: int, ep: int, etp: int, micro: int) -> RunConfig:
        if tp * pp * dp != 8 or etp > tp:
            raise ConfigError("no split of eight ranks")
        # Experts over tp train only with the sequence split too.
        par = {"ep": ep, "etp": 0 if etp == tp else etp, "is_sequence_parallel": tp > 1}
        return layout(tp=tp, pp=pp, dp=dp, micro=micro, par=par, model={"experts": EXPERTS})

    degrees = dict.fromkeys(("tp", "pp", "dp", "ep", "etp"), (1, 2, 4, 8))
    expected = set(accepted(make, **degrees, micro=range(1, 17)))
    config = layout(dp=8, model={"experts": EXPERTS})
    configs = {one for one in evenly_split_layouts(cells_of(config, 8)) if one.parallelism.vp == 1}
    assert configs == expected
    pairs = {(one.parallelism.ep, one.parallelism.expert_tp) for one in configs}
    assert pairs == {*itertools.product((1, 2, 4), (1, 2, 4))} - {(4, 4)}


def test_nothing_runs_over_more_context_on_a_cpu(layout: Layout) -> None:
    assert {one.parallelism.cp for one in [*cells_of(layout(dp=4), 4).plain.configs()]} == {1}
    here = layout(dp=2, par={"cp": 2})
    assert {one.parallelism.cp for one in [*cells_of(here, 4).plain.configs()]} == {1, 2}


def test_layers_that_do_not_split_evenly_still_have_pipelines(layout: Layout) -> None:
    config = layout(dp=4, model={"num_layers": 7})
    results = {one.parallelism.chunk_layers for one in [*cells_of(config, 4).plain.configs()]}
    assert {(), (4, 3), (2, 2, 2, 1)} <= results
    assert all(sum(one) == 7 for one in results if one)
    alone = layout(dp=4, model={"num_layers": 7}, framework="torchtitan 0.2")
    results = {one.parallelism.chunk_layers for one in [*cells_of(alone, 4).plain.configs()]}
    assert results == {(), (4, 3), (2, 2, 2, 1)}


def test_two_stages_are_interleaved_only_where_messages_overlap(layout: Layout) -> None:
    free = layout(pp=4, dp=2, model={"num_layers": 8})
    alone = layout(pp=4, dp=2, model={"num_layers": 8}, par={"overlaps_p2p": False})
    for config, expected in ((free, {1, 2, 4}), (alone, {1})):
        pars = [one.parallelism for one in [*cells_of(config, 8).plain.configs()]]
        assert {par.vp for par in pars if par.pp == 2} == expected
        assert {par.vp for par in pars if par.pp == 4} == {1, 2}


def test_settings_are_kept_where_they_apply(layout: Layout) -> None:
    """Transfers beside tp go with a split sequence."""
    par = {"is_sequence_parallel": True, "overlaps_tp": True}
    config = layout(tp=2, pp=2, samples=32, par=par, model={"num_layers": 8})
    layouts = [one.parallelism for one in [*cells_of(config, 4).plain.configs()]]
    assert {one.is_sequence_parallel for one in layouts if one.tp > 1} == {False, True}
    for one in layouts:
        assert one.overlaps_tp == one.is_sequence_parallel
    assert {one.vp for one in layouts} == {1, 2, 4}


@pytest.mark.parametrize(
    ("changes", "num_ranks", "rule"),
    [
        ({}, 8, "tp does not divide 4 heads"),
        ({"model": {"num_query_groups": 1, "num_attention_heads": 3}}, 2, "3 heads"),
        ({"model": {"ffn_hidden_size": 129}}, 2, "widths of the MLP"),
        ({"model": {"vocab_size": 255}}, 2, "a vocabulary of 255"),
        ({}, 4, "cp on a CPU"),
        ({"device": GPU, "samples": 32}, 32, f"cp above {MOST_CONTEXT}"),
        ({"device": GPU, "model": {"seq_length": 34}}, 4, "2 x cp does not divide the sequence"),
        ({"model": {"num_layers": 2}}, 4, "pp above 2 layers"),
        ({"samples": 6}, 4, "dp does not divide the global batch of 6"),
        ({"model": {"seq_length": 33}}, 2, "tp does not divide the local sequence"),
        ({"model": {"experts": EXPERTS}}, 2, "ep x etp does not divide the ranks of a stage"),
        ({"samples": 1, "micro": 1}, 2, "interleaving needs a number of micro-batches that"),
    ],
)
def test_a_rule_that_left_something_out_is_counted(
    layout: Layout, changes: dict[str, Any], num_ranks: int, rule: str
) -> None:
    cut = cells_of(layout(**changes), num_ranks).cut
    assert sum(number for text, number in cut.items() if rule in text) > 0, cut
    assert rule not in " ".join(cells_of(layout(), 1).cut)


def test_no_virtual_stages_beyond_those_that_are_run(layout: Layout) -> None:
    config = layout(pp=2, model={"num_layers": 64})
    vps = {one.parallelism.vp for one in [*cells_of(config, 2).plain.configs()]}
    assert max(vps) == MOST_VIRTUAL


def test_only_what_is_kept_is_split(layout: Layout) -> None:
    config = layout(dp=8, device=GPU)
    whole = [*cells_of(config, 8).plain.configs()]
    for text in ("tp=2|4", "cp=2", "pp=2,dp=4", "mbs=2", "vpp=2", "sp=on", "tp=4,sp=off"):
        keep = LayoutConstraint.parse(text)
        configs = [*cells_of(config, 8, keep).plain.configs()]
        assert configs == [one for one in whole if keep.allows(one)] != []


def test_rows_are_found_again_by_their_columns(layout: Layout) -> None:
    cells = cells_of(layout(dp=4), 4)
    some = cells.subset(np.arange(len(cells))[::3])
    assert [*some.plain.configs()] == [*cells.plain.configs()][::3]


def _degrees(cells: Cells) -> list[Any]:
    return [one.parallelism for one in [*cells.plain.configs()]]


@pytest.mark.parametrize("per_node", [0, 2, 8])
def test_nodes_are_those_that_replicas_lie_on(layout: Layout, per_node: int) -> None:
    cells = cells_of(layout(dp=8, par={"ranks_per_node": per_node}), 8)
    for par, nodes in zip(_degrees(cells), cells.num_nodes.tolist(), strict=True):
        # Replicas stand tp x cp ranks apart, and each stage in ranks of its own.
        ranks = range(0, 8 // par.pp, par.tp)
        assert nodes == len({rank // (per_node or 8) for rank in ranks})


def test_thousands_of_ranks_are_split(layout: Layout) -> None:
    """Though the running degrees over every cp would be more ranks than a layout may have."""
    cells = cells_of(layout(dp=2048, samples=2048, micro=1, device=GPU), 2048)
    assert len(cells) and set(cells.table.numbers("dp").tolist()) >= {512, 1024, 2048}


def test_no_ranks_are_refused(layout: Layout) -> None:
    with pytest.raises(ConfigError, match="gpus 0 is below 1"):
        cells_of(layout(), 0)


FRAMEWORKS = ("Megatron-LM 0.16", "PyTorch 2.13", "transformers 5.24", "torchtitan 0.2")


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    num_ranks=st.integers(1, 64),
    per_node=st.sampled_from([0, 1, 2, 3, 4, 8]),
    framework=st.sampled_from(FRAMEWORKS),
    engine=st.sampled_from(Engine),
    device=st.sampled_from(["cpu", GPU]),
    experts=st.sampled_from([None, EXPERTS, replace(EXPERTS, num_experts=6)]),
    par=st.sampled_from(
        [
            {},
            {"is_optimizer_distributed": True, "sharding": Sharding.WEIGHTS},
            {"cp": 2, "context_comm": ContextComm.ALL_TO_ALL},
        ]
    ),
)
def test_every_variant_of_every_search_can_be_built(
    layout: Layout, num_ranks: int, per_node: int, par: dict[str, Any], **drawn: Any
) -> None:
    """Dense or experts, any loop and engine, on any number of ranks, of any number a node."""
    degrees = {**par, "engine": drawn.pop("engine"), "ranks_per_node": per_node}
    model = {"experts": drawn.pop("experts")}
    config = layout(micro=1, samples=num_ranks * 2, par=degrees, model=model, **drawn)
    cells = cells_of(config, num_ranks)
    assert len(cells) and num_variants(choices_of(cells)) >= len(cells)
    others = [
        name for name in cells.table.columns if name not in ("micro_batch_size", "chunk_layers")
    ]
    firsts, _ = cells.table.distinct(others)
    for place in firsts.tolist():
        plain = cells.layout(place)
        assert plain.parallelism.num_ranks == num_ranks
        for choice in states(plain, num_nodes(plain)):
            assert choice.of(plain).batch == plain.batch
        for recompute in recomputes(plain):
            assert recompute.applied_to(plain).parallelism == plain.parallelism
