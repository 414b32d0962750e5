"""Profiles of whole layers: a step is made of them, and of nothing else in a layer."""

from __future__ import annotations

import pandas as pd
import pytest

from forerun.benchmarks.protocols.table_steps import LayerTimes, TableSteps, times_key
from forerun.calib.layers.blocks import BlockKind
from forerun.calib.records.step_rows import StepRow
from forerun.calib.steps.step_tables import row_times
from forerun.calib.timeline.compiled import compile_layouts
from forerun.calib.workload.collectives import CollectiveCall, GroupRole
from forerun.calib.workload.config import (
    Attention,
    Batch,
    ModelShape,
    Parallelism,
    Recompute,
    RunConfig,
)

HIDDEN, HEADS, SEQ, VOCAB = 1024, 16, 512, 51200
FORWARD_S, BACKWARD_S = {1: 3e-3, 2: 2e-3}, {1: 6e-3, 2: 4e-3}


def profiles() -> pd.DataFrame:
    rows = []
    for micro in (1, 2, 4):
        for tp in (1, 2):
            layer = f"{micro}x{HEADS}x{SEQ}x{HIDDEN}x{tp}"
            for phase, layer_s in (("forward", FORWARD_S), ("backward", BACKWARD_S)):
                # The first layer of a model was slower; the rest follow in the table.
                for factor in (1.5, 1.0):
                    rows.append(("layer", "layer", phase, layer, factor * micro * layer_s[tp], ""))
    names = ["group", "kind", "phase", "shape", "time_s", "flag"]
    return pd.DataFrame(rows, columns=names).assign(device="GH-96", element_nbytes=4)


def row(
    *,
    tp: int = 1,
    dp: int = 2,
    micro: int = 1,
    hidden: int = HIDDEN,
    machine: str = "GH-96",
    recompute: Recompute = Recompute.NONE,
) -> StepRow:
    config = RunConfig(
        model=ModelShape(
            num_layers=4,
            hidden_size=hidden,
            ffn_hidden_size=4 * hidden,
            num_attention_heads=HEADS,
            num_query_groups=HEADS,
            kv_channels=hidden // HEADS,
            seq_length=SEQ,
            vocab_size=VOCAB,
        ),
        parallelism=Parallelism(tp=tp, dp=dp, ranks_per_node=4),
        batch=Batch(micro_batch_size=micro, global_batch_size=dp * micro),
        attention=Attention.UNFUSED,
        recompute=recompute,
        device="GH-96",
    )
    return StepRow(
        table="t", row_id="1", config=config, measured_s=float("nan"), machine=machine, group="g"
    )


def passes_s(profiled: StepRow, times: LayerTimes, kind: BlockKind) -> tuple[float, float, float]:
    """Forward, backward and recomputation of a block with its transfers."""
    compiled = compile_layouts([profiled.config])
    block_times = compiled.sums.times(
        times.estimates(compiled.items).time_s[:, None], contention=1.3, is_host_only=False
    )
    place = next(i for i, block in enumerate(compiled.blocks) if block.kind is kind)
    recompute_s = block_times.recompute_s[place, 0]
    backward = block_times.backward_pass_s[place, 0] - recompute_s
    return block_times.forward_pass_s[place, 0], backward, recompute_s


def times_of(profiled: StepRow) -> LayerTimes:
    times = TableSteps([profiles()]).base(profiled)
    assert isinstance(times, LayerTimes)
    return times


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("micro", [1, 4])
def test_a_layer_takes_what_was_profiled_with_its_transfers(tp: int, micro: int) -> None:
    profiled = row(tp=tp, micro=micro, recompute=Recompute.FULL)
    forward, backward, recompute_s = passes_s(profiled, times_of(profiled), BlockKind.LAYER)
    assert forward == pytest.approx(micro * FORWARD_S[tp], rel=1e-4)
    assert backward == pytest.approx(micro * BACKWARD_S[tp], rel=1e-4)
    assert recompute_s == pytest.approx(micro * FORWARD_S[tp], rel=1e-4)


def test_a_layer_that_was_not_profiled_follows_its_work() -> None:
    unprofiled = row(micro=3)
    times = times_of(unprofiled)
    forward, backward, _ = passes_s(unprofiled, times, BlockKind.LAYER)
    assert forward == pytest.approx(3 * FORWARD_S[1], rel=0.1)
    assert backward == pytest.approx(3 * BACKWARD_S[1], rel=0.1)
    wide = row(micro=2, hidden=2 * HIDDEN)
    # Products grow with the square of the width, attention with the width.
    assert 2 < passes_s(wide, times, BlockKind.LAYER)[0] / (2 * FORWARD_S[1]) < 4.5


def test_machines_do_not_share_times_and_their_names_tell_the_network() -> None:
    near, far = row(dp=8, machine="GH-96 NDR"), row(dp=8, machine="GH-96 (4x, Slingshot-11)")
    assert times_key(near) != times_key(far)
    results = []
    for step_row in (near, far):
        compiled = compile_layouts([step_row.config])
        times_s = row_times(step_row).estimates(compiled.items).time_s
        (reduce,) = [
            i
            for i, item in enumerate(compiled.items)
            if isinstance(item, CollectiveCall) and item.role is GroupRole.DP
        ]
        results.append(times_s[reduce])
    # Gradients cross the network at 400 and at 200 Gb/s.
    assert results[1] == pytest.approx(2 * results[0], rel=0.1)
