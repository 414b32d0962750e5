"""Cuts of the model into chunks, against megatron-core's own."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.calib.errors import ConfigError
from forerun.calib.workload.pipeline_layout import (
    PipelineSplit,
    parse_layout,
    split_layers,
    virtual_stages,
    write_layout,
)

HAS_MEGATRON = find_spec("megatron") is not None


def needs_megatron(test: Any) -> Any:
    """Importing megatron-core takes seconds."""
    reason = "megatron-core is not installed"
    return pytest.mark.slow(pytest.mark.skipif(not HAS_MEGATRON, reason=reason)(test))


LAYOUTS = (
    "Et*3|(tt|)*29,m|L",
    "Ettt|(tt|)*29,m|L",
    "E|t*2|(t|)*5tmmL",
    "Et*2|(tt|)*5t|tmL",
    "E|(|t)*3|L",
    "(E|t|)*1tL",
)


@pytest.fixture(scope="module")
def core() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.transformer import transformer_block
        from megatron.core.transformer.enums import LayerType
        from megatron.core.transformer.pipeline_parallel_layer_layout import (
            PipelineParallelLayerLayout,
        )
    return SimpleNamespace(
        state=parallel_state,
        block=transformer_block,
        LayerType=LayerType,
        Layout=PipelineParallelLayerLayout,
    )


@needs_megatron
@pytest.mark.parametrize("text", LAYOUTS)
def test_a_layout_reads_as_megatron_reads_it(core: Any, text: str) -> None:
    chunks = core.Layout.parse_str_to_list(text)
    layout = parse_layout(text)
    assert layout.chunk_layers == tuple(c.count(core.LayerType.decoder) for c in chunks)
    assert layout.num_prediction_layers == sum(c.count(core.LayerType.mtp) for c in chunks)
    assert parse_layout(chunks) == parse_layout(core.Layout(text, 1).input_data) == layout


@needs_megatron
@settings(max_examples=60, deadline=None)
@given(layers=st.lists(st.integers(0, 12), min_size=1, max_size=12), predicted=st.integers(0, 2))
def test_a_written_layout_means_the_same_to_megatron(
    core: Any, layers: list[int], predicted: int
) -> None:
    text = write_layout(layers, predicted)
    layout = core.Layout(text, len(layers))
    decoders = [chunk.count(core.LayerType.decoder) for (chunk,) in layout.layout]
    assert decoders == layers
    layout.validate_layer_layout(sum(layers), predicted)
    result = parse_layout(text)
    assert result.chunk_layers == tuple(layers) and result.is_plain
    assert result.num_prediction_layers == predicted


@contextlib.contextmanager
def place(core: Any, vp: int) -> Iterator[None]:
    core.state.set_virtual_pipeline_model_parallel_world_size(vp if vp > 1 else None)
    try:
        yield
    finally:
        core.state.set_virtual_pipeline_model_parallel_world_size(None)


def layers_by_megatron(core: Any, split: PipelineSplit) -> tuple[int, ...]:
    config = SimpleNamespace(
        num_layers=split.num_layers,
        pipeline_model_parallel_layout=None,
        pipeline_model_parallel_size=split.pp,
        virtual_pipeline_model_parallel_size=split.vp if split.vp > 1 else None,
        num_layers_in_first_pipeline_stage=split.first,
        num_layers_in_last_pipeline_stage=split.last,
        account_for_embedding_in_pipeline_split=split.counts_embedding,
        account_for_loss_in_pipeline_split=split.counts_loss,
    )
    with place(core, split.vp):
        return tuple(
            core.block.get_num_layers_to_build(
                config, vp_stage=virtual if split.vp > 1 else None, pp_rank=stage
            )
            for virtual in range(split.vp)
            for stage in range(split.pp)
        )


@needs_megatron
@settings(max_examples=200, deadline=None)
@given(
    num_layers=st.integers(1, 40),
    pp=st.sampled_from([2, 3, 4]),
    vp=st.sampled_from([1, 2]),
    ends=st.tuples(*[st.none() | st.integers(1, 8)] * 2),
    counts=st.tuples(st.booleans(), st.booleans()),
)
def test_layers_of_each_chunk_are_megatrons(
    core: Any,
    num_layers: int,
    pp: int,
    vp: int,
    ends: tuple[int | None, int | None],
    counts: tuple[bool, bool],
) -> None:
    split = PipelineSplit(
        num_layers=num_layers,
        pp=pp,
        vp=vp,
        first=ends[0],
        last=ends[1],
        counts_embedding=counts[0],
        counts_loss=counts[1],
    )
    try:
        results = split_layers(split)
    except ConfigError:
        # megatron-core refuses too, or builds another number of layers.
        with contextlib.suppress(AssertionError):
            assert sum(layers_by_megatron(core, split)) != num_layers
        return
    assert results == layers_by_megatron(core, split)
    assert sum(results) == num_layers


def test_virtual_stages_count_embedding_and_loss() -> None:
    split = PipelineSplit(num_layers=14, pp=2, counts_embedding=True, counts_loss=True)
    assert virtual_stages(split, 4) == 2
    with pytest.raises(ConfigError, match="choose a divisor of 8"):
        virtual_stages(split, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ex|L", "not made of E, t, m, L"),
        ("tt|L", "needs one E first"),
        ("Et|t", "one L last"),
        ("EtE|L", "one E first"),
        ("Em|tL", "put all t first"),
        ("E(t*9999)*99999|L", "too long|not made of"),
        ([1, 2], "not a list of lists"),
        ([["embedding"], ["tail"]], "not a list of lists"),
    ],
)
def test_impossible_layouts_are_named(text: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_layout(text)


def test_a_layout_that_is_not_plain_says_so() -> None:
    assert parse_layout("Et|tm|L").is_plain is False
    assert parse_layout("|Et|tL").is_plain is False
    assert parse_layout("E|t|mL").is_plain is True
