"""Runs over the stand-in GPU: the comparison can fail, and the switch works in a launch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from device_truth import Truth

from forerun.benchmarks import device
from forerun.benchmarks.runs.device_truths import transfers_of, work_of
from forerun.calib.records.record_kinds import CollectiveRecord, OperatorRecord, StepRecord
from forerun.calib.samples.store import read_run
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.calib.workload.operators import OperatorKind, Phase

pytestmark = pytest.mark.slow

CLONE = os.environ.get("FORERUN_MEGATRON_CLONES", "")
US = 1e-6


def planted_tables() -> dict[str, Any]:
    """One layer with a product of 100 us, a norm of 50 us inside a frame, and one transfer."""
    truth = Truth()
    truth.step = 3
    truth.modules = [
        {"name": "0.layers.1", "classes": ["TransformerLayer"], "layer": 2},
        {"name": "0.layers.1.mlp.linear_fc1", "classes": ["Linear"], "layer": 0},
        {"name": "fsdp", "classes": [], "layer": 0},
    ]
    for module, parent in ((0, -1), (1, 0), (2, 1)):
        truth.add("calls", module=module, parent=parent, phase="forward", ordinal=0, begin_s=0.0)
    kernels = ((0, 10, 0, 0), (10, 110, 1, 0), (110, 160, 2, 0), (0, 500, 1, 9))
    for begin_us, end_us, call, stream in kernels:
        truth.add(
            "kernels", stream=stream, begin_s=begin_us * US, end_s=end_us * US, op="mm", nbytes=1,
            flop=1, call=call, phase="forward", ordinal=0,
        )  # fmt: skip
    truth.add(
        "transfers", group="TENSOR_MODEL_PARALLEL_GROUP#1", method="_allgather_base", nbytes=8,
        sequence=0, peer=-1, issue_s=0.0, begin_s=10 * US, end_s=60 * US, stream=0, is_async=False,
    )  # fmt: skip
    parts = [(160 * US, 180 * US, 0), (180 * US, 190 * US, -1)]
    truth.add("stalls", stream=0, begin_s=160 * US, end_s=190 * US, parts=parts)
    truth.add(
        "steps", stream=0, begin_s=0.0, end_s=1.0, records=0, timed_records=9, queries=0, reads=0
    )
    return {**truth.tables, "modules": truth.modules, "notes": {}}


def records(**changed: Any) -> list[Any]:
    """Return the records that hooks would have written of the planted truth."""
    of = {"step": 3, "window": 0}
    operator = {
        "microbatch": 0, "phase": Phase.FORWARD, "shape": (1,), "element_nbytes": 4, "layer": 1,
        "start_ns": 0,
    }  # fmt: skip
    given = {"residual": 10_000, "linear": 100_000, "transfer": 60_000, "exposed": 20_000} | changed
    return [
        StepRecord(**of, start_ns=0, duration_ns=1, gap_ns=0, is_hooked=True),
        OperatorRecord(
            **of, **operator, kind=OperatorKind.RESIDUAL, duration_ns=given["residual"]
        ),
        OperatorRecord(
            **of, **operator, kind=OperatorKind.LINEAR_FC1, duration_ns=given["linear"]
        ),
        CollectiveRecord(
            **of, collective=Collective.ALL_GATHER, role=GroupRole.TP,
            group="TENSOR_MODEL_PARALLEL_GROUP#1", ranks=(0, 1), nbytes=8, sequence=0, peer=-1,
            is_async=False, is_bound=False, issue_ns=0, duration_ns=given["transfer"],
            exposed_ns=given["exposed"],
        ),
    ]  # fmt: skip


def test_work_is_the_modules_on_the_steps_stream() -> None:
    results = work_of(planted_tables())[3]
    assert {(w.key[0], w.key[1], round(w.self_ns)) for w in results} == {
        ("residual", 1, 10_000),
        ("linear_fc1", 1, 100_000),
    }
    ((transfer,),) = transfers_of(planted_tables()).values()
    assert transfer.key == ("all_gather", "TENSOR_MODEL_PARALLEL_GROUP#1", -1, 0)
    assert transfer.duration_ns == pytest.approx(60_000)


@pytest.mark.parametrize(
    ("changed", "check"),
    [
        ({}, ""),
        ({"linear": 104_000}, ""),
        ({"linear": 106_000}, "operators"),
        ({"linear": 0}, "zeros"),
        ({"transfer": 70_000}, "transfers"),
        ({"exposed": 60_000}, "exposed"),
    ],
)
def test_comparison_can_fail(changed: dict[str, int], check: str) -> None:
    seen = device.Comparison()
    seen.add(0, records(**changed), planted_tables())
    assert seen.counts["operators"] == 2
    missed = {name.removesuffix(" missed") for name in seen.counts if name.endswith("missed")}
    assert check in missed if check else not missed


def test_moved_border_is_no_miss_of_the_layer() -> None:
    seen = device.Comparison()
    seen.add(0, records(residual=20_000, linear=90_000), planted_tables())
    assert (seen.counts["operators missed"], seen.counts["layers missed"]) == (2, 0)


def test_record_without_a_call_is_a_miss() -> None:
    seen = device.Comparison()
    truth = planted_tables()
    truth["transfers"]["method"] = ["allreduce"]
    seen.add(0, records(), truth)
    assert seen.counts["transfers missed"] == 1


def test_switch_in_a_launch(tmp_path: Path) -> None:
    """Two ranks over the timeline: on a device for Forerun, and the losses are the same."""
    bare = device.train(tmp_path, "ring-cp2", tmp_path / "bare", has_forerun=False)
    run = device.train(tmp_path, "ring-cp2", tmp_path / "calibrated", has_forerun=True)
    records = read_run(run.folder / "records")
    truths = run.truths
    for rank, truth in truths.items():
        assert truth["notes"] == bare.truths[rank]["notes"]
        hooked = {
            r.step for r in records.records[rank] if isinstance(r, StepRecord) and r.is_hooked
        }
        steps = truth["steps"]
        taken = dict(zip(steps["step"], steps["timed_records"], strict=True))
        assert hooked
        # The reference of a step is recorded where the one before ends.
        assert {step for step, count in taken.items() if count > 100} == hooked
        assert {count for step, count in taken.items() if step not in hooked} <= {0, 1}


@pytest.mark.skipif(not CLONE, reason="FORERUN_MEGATRON_CLONES names no folder of clones")
def test_megatron_over_the_timeline(tmp_path: Path) -> None:
    """Experts on two ranks, one stream: nearly everything is as it was charged."""
    clone = sorted(path.parent for path in Path(CLONE).glob("*/pretrain_gpt.py"))[-1]
    cell = device.run_case(clone, "ep2", tmp_path)
    for check in ("runs", "losses", "no zeros", "transfers", "exposed"):
        assert cell.results[check] == "ok", cell
