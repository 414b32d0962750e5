"""The table of choices: words and options give the layout that they were made of."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st
from tiny_shape import SMALL

from forerun.calib.advice.axes import with_axes_of
from forerun.calib.advice.named_layouts import named_layout
from forerun.calib.arguments.megatron_args import apply_options
from forerun.calib.arguments.megatron_options import MODELLED
from forerun.calib.arguments.short_names import LayoutConstraint, expand
from forerun.calib.search.cells import cells_of
from forerun.calib.search.space import num_nodes, recomputes, states
from forerun.calib.workload.choices import (
    AXES,
    CHOICES,
    LABELLED_CHOICES,
    NAMED_CHOICES,
    axis_value,
    layout_label,
)
from forerun.calib.workload.config import Batch, Experts, Parallelism, Precision, RunConfig
from forerun.calib.workload.model_shape import ModelShape

OVERLAPS = {"overlaps_grad_reduce": True, "overlaps_param_gather": True}
RUNNING = RunConfig(
    model=replace(SMALL, num_layers=14, vocab_size=256, seq_length=128),
    parallelism=Parallelism(dp=16, is_optimizer_distributed=True, ranks_per_node=8, **OVERLAPS),
    batch=Batch(micro_batch_size=1, global_batch_size=64),
    device="NVIDIA H100 80GB HBM3",
    framework="Megatron-LM",
    precision=Precision.BF16,
)
EXPERTS = Experts(num_experts=8, top_k=2, ffn_hidden_size=64)
MIXTURE = replace(RUNNING, model=replace(RUNNING.model, experts=EXPERTS))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[RunConfig, RunConfig]:
    """Draw a running layout, and one that a plan would try in its place, splits uneven or even."""
    running = draw(st.sampled_from([RUNNING, MIXTURE]))
    cells = CELLS[running]
    layout = cells.layout(draw(st.integers(0, len(cells) - 1)))
    layout = draw(st.sampled_from(states(layout, num_nodes(layout)))).of(layout)
    return running, draw(st.sampled_from(recomputes(layout))).applied_to(layout)


CELLS = {running: cells_of(running, 16) for running in (RUNNING, MIXTURE)}


@given(layouts())
def test_a_label_gives_its_layout(pair: tuple[RunConfig, RunConfig]) -> None:
    running, layout = pair
    label, par = layout_label(layout), layout.parallelism
    for word in label.lower().split():
        claims = [
            one.name for one in LABELLED_CHOICES if one.fields_of_word(word, running) is not None
        ]
        assert len(claims) == 1, (word, claims)
    found = named_layout(label, running)
    assert layout_label(found) == label
    # Of one replica it does not tell the sharding.
    assert par.dp * par.cp == 1 or found == layout


@given(layouts())
def test_all_axes_of_a_layout_give_it(pair: tuple[RunConfig, RunConfig]) -> None:
    running, layout = pair
    assert with_axes_of(running, layout, AXES) == layout
    told = [axis for axis in AXES if axis_value(running, axis) != axis_value(layout, axis)]
    assert bool(told) == (running != layout)


@given(layouts())
def test_options_of_each_choice_give_its_value(pair: tuple[RunConfig, RunConfig]) -> None:
    _, layout = pair
    for one in NAMED_CHOICES:
        value = one.read(layout)
        if not value:  # as Megatron chooses, which no option says
            continue
        assert one.parse(str(value)) == value
        if one.name in ("ep", "etp") and layout.model.experts is None:
            continue
        # These split the layers anew.
        if one.name in ("pp", "vpp") and layout.parallelism.chunk_layers:
            continue
        stated = apply_options(layout, expand([f"--{one.name}", str(value)]))
        assert one.read(stated) == value
        # ``full`` is all layers.
        assert replace(stated, recompute_num_layers=layout.recompute_num_layers) == layout
        assert LayoutConstraint(axes={one.name: (value,)}).allows(layout)


def test_each_field_is_of_one_choice() -> None:
    counts = Counter(name for one in CHOICES for name in one.fields)
    assert set(counts.values()) == {1}
    kinds = (RunConfig, Parallelism, Batch, ModelShape)
    assert {*counts} <= {one.name for kind in kinds for one in fields(kind)} | {"num_ranks"}
    assert {one.axis_name for one in CHOICES if one.needs_option} <= {*AXES}


def test_megatron_has_each_argument() -> None:
    named = {name for one in CHOICES for name in one.arguments}
    assert named - MODELLED == {"virtual_pipeline_model_parallel_size"}  # of the namespace
