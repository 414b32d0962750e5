"""Steps of GPT-NeoX from tables, against sums written out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from forerun.calib.samples.step_rows import StepRow, Trait
from forerun.calib.steps.neox import FRAMEWORK, NeoxSteps, neox_steps, sampled
from forerun.calib.steps.table_model import TableSteps
from forerun.calib.workload.config import (
    Attention,
    Batch,
    ModelShape,
    Normalization,
    Parallelism,
    PositionEmbedding,
    Precision,
    Recompute,
    RunConfig,
)
from forerun.calib.workload.operators import OperatorKind
from forerun.calib.workload.parameters import parameters
from forerun.calib.workload.stage_work import stage_operators

DEVICE = "A100-SXM4-80GB"
MICRO, HEADS, SEQ, HIDDEN, VOCAB, LAYERS = 4, 16, 1024, 2048, 51200, 8
ALPHA_S, BYTES_PER_S, ADAM_S = 1e-4, 4e9, 1e-11
"""Transfers take ``alpha + nbytes / rate``; the optimizer this long for each parameter."""
GATHER_S = 2e-4
LAYER = (
    *("norm", "norm", "linear_qkv", "rotary", "flash_attention", "linear_proj"),
    *("residual", "residual", "linear_fc1", "activation", "linear_fc2"),
)
TIME_S = {
    name: (1e-4 * (place + 1), 3e-4 * (place + 1))
    for place, name in enumerate(
        [*dict.fromkeys(LAYER), "rms_norm", "batched_product", "fused_softmax", "mask", "softmax"]
    )
} | {"embedding": (5e-4, 6e-4), "logits": (2e-3, 4e-3), "loss": (1e-3, 1e-3)}


def row(
    *traits: Trait,
    pp: int = 1,
    tp: int = 2,
    dp: int = 1,
    attention: Attention = Attention.FUSED,
    normalization: Normalization = Normalization.LAYER_NORM,
) -> StepRow:
    config = RunConfig(
        model=ModelShape(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            ffn_hidden_size=4 * HIDDEN,
            num_attention_heads=HEADS,
            num_query_groups=HEADS,
            kv_channels=HIDDEN // HEADS,
            seq_length=SEQ,
            vocab_size=VOCAB,
            is_tied=False,
            position_embedding=PositionEmbedding.ROPE,
            normalization=normalization,
        ),
        parallelism=Parallelism(tp=tp, pp=pp, dp=dp, ranks_per_node=4),
        batch=Batch(micro_batch_size=MICRO, global_batch_size=6 * MICRO * dp),
        precision=Precision.FP16,
        attention=attention,
        recompute=Recompute.FULL,
        device=DEVICE,
        framework=FRAMEWORK,
    )
    return StepRow(
        table="t",
        row_id="1",
        config=config,
        measured_s=float("nan"),
        machine="m",
        group="g",
        traits=frozenset(traits),
    )


def operators(asked: StepRow) -> pd.DataFrame:
    """Every operator of a row's stages, with the planted time of its kind."""
    rows = {}
    for stage in range(asked.config.parallelism.pp):
        work = stage_operators(asked.config, stage)
        for operator, _ in (*work.forward, *work.backward):
            for part in sampled(operator, asked):
                if part.kind is not OperatorKind.HOST_MICROBATCH:
                    key = (part.kind.value, part.phase.value, "x".join(map(str, part.shape)))
                    rows[key] = TIME_S[part.kind.value][part.phase.value == "backward"]
    for stage in range(asked.config.parallelism.pp):
        number = parameters(asked.config, stage)
        rows["optimizer", "step", str(number)] = ADAM_S * number
    table = pd.DataFrame(
        [(*key, time_s) for key, time_s in rows.items()],
        columns=["kind", "phase", "shape", "time_s"],
    )
    nbytes = np.where(table["kind"] == "optimizer", 4, 2)
    return table.assign(device=DEVICE, group=table["kind"], element_nbytes=nbytes, flag="")


def collectives(flag: str = "") -> pd.DataFrame:
    sizes = np.unique(np.geomspace(1e6, 4e9, 2000).round())
    tables = [
        pd.DataFrame({"nbytes": sizes}).assign(
            collective=kind,
            num_ranks=ranks,
            num_nodes=nodes,
            time_s=ALPHA_S + sizes / BYTES_PER_S,
        )
        for kind, ranks, nodes in (
            *(("all_reduce", 2, 1), ("all_reduce", 2, 2), ("all_gather", 2, 1)),
            *(("all_gather", 2, 2), ("send", 2, 1), ("send", 2, 2)),
        )
    ]
    return pd.concat(tables).assign(device=DEVICE, fabric="one", flag=flag)


def model(asked: StepRow, flag: str = "") -> NeoxSteps:
    return neox_steps([operators(asked)], [collectives(flag)], asked)


def transfer_s(nbytes: float) -> float:
    return ALPHA_S + nbytes / BYTES_PER_S


def layer_s(operators: tuple[str, ...] = LAYER) -> tuple[float, float]:
    return sum(TIME_S[name][0] for name in operators), sum(TIME_S[name][1] for name in operators)


HIDDEN_NBYTES = 2 * MICRO * SEQ * HIDDEN
NUM_MICROBATCHES = 6


def test_one_stage_is_the_sum_of_its_operators_and_all_reduces() -> None:
    asked = row(dp=2)
    reduce_s = transfer_s(HIDDEN_NBYTES)
    forward, backward = layer_s()
    forward += 2 * reduce_s
    backward += 2 * reduce_s + forward
    ends = sum(sum(TIME_S[name]) for name in ("embedding", "logits", "loss", "norm"))
    ends += 2 * reduce_s  # after the look-up, and of the gradient of the logits' input
    passes = NUM_MICROBATCHES * (LAYERS * (forward + backward) + ends)
    number = parameters(asked.config, 0)
    after = 2 * transfer_s(2 * number) + ADAM_S * number
    assert model(asked).step_s(asked) == pytest.approx(passes + after, rel=2e-3)


def test_a_parallel_residual_saves_an_all_reduce_in_each_forward_pass() -> None:
    plain, parallel = row(), row(Trait.PARALLEL_RESIDUAL)
    steps = model(plain)
    saved = steps.step_s(plain) - steps.step_s(parallel)
    # Once forwards and once when the layer is recomputed.
    assert saved == pytest.approx(
        NUM_MICROBATCHES * LAYERS * 2 * transfer_s(HIDDEN_NBYTES), rel=2e-3
    )


def test_masks_go_forwards_with_the_activations() -> None:
    # Two tp ranks a stage: stages 0 and 1 share a node, so do 2 and 3.
    plain, masked = row(pp=4), row(Trait.MASK_IN_P2P, pp=4)
    steps = model(plain)
    longer = steps.step_s(masked) - steps.step_s(plain)
    mask_s = SEQ**2 / BYTES_PER_S
    assert 0 < longer <= (NUM_MICROBATCHES + 3) * 2 * mask_s


def test_samples_flagged_for_sockets_count_where_the_runs_used_them() -> None:
    asked = row()
    sockets = replace(asked, traits=frozenset({Trait.SOCKET_NETWORK}))
    expected = model(asked).step_s(asked)
    assert model(sockets, flag="sockets").step_s(sockets) == pytest.approx(expected)
    usual = neox_steps([operators(asked)], [collectives("sockets")], asked)
    assert usual.step_s(asked) < expected


@pytest.mark.parametrize(
    ("traits", "chain"),
    [
        ((Trait.TRIANGULAR_SOFTMAX,), ("batched_product", "fused_softmax", "batched_product")),
        ((), ("batched_product", "mask", "softmax", "batched_product")),
    ],
)
def test_unfused_attention_is_a_chain_of_what_was_sampled(
    traits: tuple[Trait, ...], chain: tuple[str, ...]
) -> None:
    asked = row(*traits, attention=Attention.UNFUSED, normalization=Normalization.RMS_NORM)
    flash = row(*traits)
    found = model(asked).step_s(asked) - model(flash).step_s(flash)
    swapped = [name for name in LAYER if name not in ("flash_attention", "norm")]
    forward, backward = layer_s((*swapped, *chain, "rms_norm", "rms_norm"))
    other, other_backward = layer_s()
    layers = LAYERS * (2 * (forward - other) + backward - other_backward)
    norm = sum(TIME_S["rms_norm"]) - sum(TIME_S["norm"])
    assert found == pytest.approx(NUM_MICROBATCHES * (layers + norm), rel=1e-6)


def test_calibration_rows_move_all_steps_by_one_factor() -> None:
    asked = row()
    steps = model(asked)
    twice = replace(asked, measured_s=2 * steps.step_s(asked))
    found = steps.fit([twice] * 99).predict([asked])
    assert found.time_s[0] == pytest.approx(2 * steps.step_s(asked), rel=0.01)
    assert found.low_s[0] < found.time_s[0] < found.high_s[0]
    assert steps.fit([]).predict([asked]).time_s[0] == steps.step_s(asked)


def test_rows_of_neox_go_to_this_model() -> None:
    asked = row()
    steps = TableSteps([operators(asked)], [collectives()])
    expected = model(asked).step_s(asked)
    assert steps.fit([]).predict([asked]).time_s[0] == pytest.approx(expected)


def test_without_collectives_the_scales_answer() -> None:
    asked = row()
    found = TableSteps([operators(asked)]).fit([]).predict([asked])
    assert np.isfinite(found.time_s[0])
    assert found.time_s[0] != pytest.approx(model(asked).step_s(asked), rel=1e-3)
