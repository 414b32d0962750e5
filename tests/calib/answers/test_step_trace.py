"""Every trace is one that Perfetto takes whole, and adds up to the step that is said."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planted_steps import GPU, LAYOUTS, OVERLAP, estimate_step, steps_of
from trace_reader import Slice, read

from forerun.calib.answers.step_traces import step_trace
from forerun.calib.layers.stage_work import collective_uses, stage_operators
from forerun.calib.records.files import write_json
from forerun.calib.steps.estimate import StepEstimate
from forerun.calib.timeline.items import MeasuredSpan, Part
from forerun.calib.timeline.programs import TaskKind
from forerun.calib.workload.config import Recompute, RunConfig
from forerun.calib.workload.model_shape import Experts
from forerun.calib.workload.operators import Phase
from forerun.calib.workload.parallelism import Sharding

SHELL = shutil.which("trace_processor_shell")
CASES: dict[str, dict[str, Any]] = {
    "one stage": {},
    "one stage, on a device": {"device": GPU},
    "two stages": {"pp": 2},
    "two stages, replicas": {"pp": 2, "dp": 2, "device": GPU},
    "four stages": {"pp": 4, "device": GPU},
    "interleaved": {"pp": 4, "model": {"num_layers": 16}, "par": {"vp": 2}},
    "interleaved, messages wait": {
        "pp": 4,
        "model": {"num_layers": 16},
        "par": {"vp": 2, "overlaps_p2p": False},
    },
    "some recomputed": {"pp": 2, "recompute": Recompute.SELECTIVE, "device": GPU},
    "recomputed": {"pp": 2, "tp": 2, "recompute": Recompute.FULL, "device": GPU},
    "overlap": {"dp": 4, "tp": 2, "par": OVERLAP, "device": GPU},
    "overlap in a pipeline": {"dp": 2, "pp": 2, "par": OVERLAP, "device": GPU},
    "shared embedding": {"pp": 4, "dp": 2, "model": {"is_tied": True}, "device": GPU},
    "sharded": {
        "dp": 4,
        "par": {"is_optimizer_distributed": True, "sharding": Sharding.WEIGHTS},
        "device": GPU,
    },
    "experts": {
        "dp": 2,
        "par": {"ep": 2, "is_optimizer_distributed": True},
        "model": {"experts": Experts(num_experts=4, top_k=2, ffn_hidden_size=64)},
        "device": GPU,
    },
}


def sums(slices: list[Slice], stage: int) -> Counter[str]:
    """Seconds of what spans of a stage are made of, by part."""
    counts: Counter[str] = Counter()
    for one in slices:
        if one.depth == 1 and one.track.startswith(f"stage {stage} "):
            counts[one.event["cat"]] += one.time_s
    return counts


def trace_slices(estimate: StepEstimate, measured: tuple[MeasuredSpan, ...] = ()) -> list[Slice]:
    """Slices of a trace as it is read back."""
    trace = step_trace({"predicted": estimate}, measured, version="1")
    return read(json.loads(json.dumps(trace)))


@pytest.mark.parametrize("case", CASES)
def test_a_trace_adds_up_to_the_step_and_to_its_parts(
    case: str, layout: Callable[..., RunConfig], planted: Callable[..., Any]
) -> None:
    estimate = estimate_step(layout(**CASES[case]), planted())
    slices = trace_slices(estimate)
    (step,) = [one for one in slices if one.track == "step"]
    assert step.time_s == pytest.approx(estimate.time_s, abs=2e-7)
    assert max(one.end_ns for one in slices) == step.end_ns
    counts = sums(slices, estimate.critical_stage)
    pipeline_parts = (Part.PP, Part.BUBBLE)
    for part, time_s in estimate.parts_s.items():
        if part not in pipeline_parts:
            assert counts[part.value] == pytest.approx(time_s, rel=0.01, abs=2e-6), part
    assert sum(estimate.parts_s[part] for part in pipeline_parts) == pytest.approx(
        step.time_s - sum(time_s for part, time_s in counts.items() if part != "bubble"),
        rel=0.01,
        abs=0.001 * step.time_s,
    )


@pytest.mark.parametrize("case", CASES)
def test_operators_of_every_stage_take_what_they_were_planted_with(
    case: str, layout: Callable[..., RunConfig], planted: Callable[..., Any]
) -> None:
    """Slices also report a transfer's hidden part, not drawn; one factor scales the step."""
    config, estimator = layout(**CASES[case]), planted()
    estimate = estimate_step(config, estimator)
    whole = max(span.end_s for span in estimate.spans)
    assert whole == pytest.approx(estimate.time_s, rel=1e-12)
    slices, m = trace_slices(estimate), config.num_microbatches
    for stage in range(config.parallelism.pp):
        seen: Counter[tuple[str, str]] = Counter()
        for one in slices:
            if one.depth == 1 and one.track.startswith(f"stage {stage} "):
                args = one.event["args"]
                key = one.event["name"], args.get("phase", "")
                seen[key] += one.time_s + args.get("hidden_us", 0.0) / 1e6
        work = stage_operators(config, stage)
        wanted: Counter[tuple[str, str]] = Counter()
        for operator, count in (*work.forward, *work.backward, *work.recompute, *work.step):
            is_host = operator.kind.value.startswith("host")
            name = "host" if is_host else operator.kind.value
            times = count * (1 if operator.phase is Phase.STEP else m)
            wanted[name, operator.phase.value] += times * estimator.operator_s(operator)
        for use in collective_uses(config, stage=stage):
            if use.call.role.value != "pp":
                times = use.count * (m if use.placement.is_per_microbatch else 1)
                name = f"{use.call.collective.value}:{use.call.role.value}"
                wanted[name, ""] += times * estimator.collective_s(use.call)
        if config.device == "cpu":
            factor = 1.0
        else:
            factor = seen["linear_fc1", "forward"] / wanted["linear_fc1", "forward"]
        assert 0.8 < factor < 1.2
        assert wanted.keys() == {key for key in seen if key[0] != "waiting"}
        for key, time_s in wanted.items():
            assert seen[key] == pytest.approx(factor * time_s, rel=0.01, abs=2e-6), key


@pytest.mark.slow
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(drawn=LAYOUTS, longer=st.floats(0.3, 3.0))
def test_a_step_that_was_measured_is_the_step_that_is_drawn(
    layout: Callable[..., RunConfig],
    planted: Callable[..., Any],
    drawn: dict[str, Any],
    longer: float,
) -> None:
    config = layout(**drawn)
    plain_s = estimate_step(config, planted()).time_s
    estimate = steps_of(planted(), config, longer * plain_s).estimate(config)
    assert estimate.time_s == pytest.approx(longer * plain_s, rel=1e-3)
    assert max(span.end_s for span in estimate.spans) == pytest.approx(estimate.time_s, rel=1e-12)
    for span in estimate.spans:
        if span.kind not in (TaskKind.EXCHANGE, TaskKind.TRANSFER):
            slices_of_span = estimate.slices[span.kind, span.stage, span.chunk]
            assert sum(one.time_s for one in slices_of_span) == pytest.approx(
                span.end_s - span.start_s, rel=1e-6
            )
    counts = sums(trace_slices(estimate), estimate.critical_stage)
    assert counts["forward"] == pytest.approx(estimate.parts_s[Part.FORWARD], rel=0.01)
    assert counts["backward"] == pytest.approx(estimate.parts_s[Part.BACKWARD], rel=0.01)


@pytest.mark.parametrize("case", CASES)
def test_an_arrow_joins_each_two_passes_that_a_message_does(
    case: str, layout: Callable[..., RunConfig], planted: Callable[..., Any]
) -> None:
    config = layout(**CASES[case])
    trace = step_trace({"predicted": estimate_step(config, planted())})
    read(trace)
    phases = Counter(event["ph"] for event in trace["traceEvents"])
    boundaries = config.parallelism.num_chunks - 1
    assert phases["s"] == phases["f"] == 2 * boundaries * config.num_microbatches


def test_what_was_measured_has_the_same_names_beside_what_was_predicted(
    layout: Callable[..., RunConfig], planted: Callable[..., Any]
) -> None:
    estimate = estimate_step(layout(dp=2), planted())
    kinds = (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.REDUCE, TaskKind.OPTIMIZER)
    measured = tuple(
        MeasuredSpan(
            rank=rank,
            stage=0,
            kind=kind,
            microbatch=0,
            start_s=at + rank / 1000,
            end_s=at + 1 + rank / 1000,
        )
        for rank in (1, 0)
        for at, kind in enumerate(kinds)
    )
    slices = trace_slices(estimate, measured)
    seen = {one.event["name"]: one for one in slices if one.process == "measured"}
    predicted = {one.event["name"] for one in slices if one.process == "predicted"}
    assert set(seen) == {"forward 0", "backward 0", "gradient reduction", "optimizer"} <= predicted
    tracks = {one.track for one in slices if one.process == "measured"}
    assert tracks == {
        f"stage 0 {stream}, rank {rank}"
        for stream in ("passes", "gradients and parameters")
        for rank in (0, 1)
    }
    assert min(one.begin_ns for one in slices if one.process == "measured") == 0
    assert {one.begin_ns for one in slices if one.track == "step"} == {0}


def test_spans_that_overlap_get_a_track_each(
    layout: Callable[..., RunConfig], planted: Callable[..., Any]
) -> None:
    measured = tuple(
        MeasuredSpan(
            rank=0, stage=0, kind=TaskKind.FORWARD, microbatch=place, start_s=at, end_s=at + 2
        )
        for place, at in enumerate((0.0, 1.0, 2.0))
    )
    slices = trace_slices(estimate_step(layout(), planted()), measured)
    track_by_name = {one.event["name"]: one.track for one in slices if one.process == "measured"}
    first, second = "stage 0 passes, rank 0", "stage 0 passes, rank 0 2"
    assert track_by_name == {"forward 0": first, "forward 1": second, "forward 2": first}


def test_several_steps_are_on_one_scale_with_what_each_is(
    layout: Callable[..., RunConfig], planted: Callable[..., Any]
) -> None:
    one, other = (estimate_step(layout(**kw), planted()) for kw in ({"tp": 2}, {"pp": 2}))
    trace = step_trace({"A": one, "B": other}, version="9")
    slices = read(trace)
    for name, estimate in (("A", one), ("B", other)):
        (step,) = [s for s in slices if s.process == name and s.track == "step"]
        assert step.event["args"]["time_s"] == estimate.time_s
        assert trace["otherData"]["steps"][name]["time_s"] == estimate.time_s
    assert trace["otherData"]["steps"]["B"]["layout"]["pp"] == 2
    assert trace["otherData"]["version"] == "9"
    assert trace["otherData"]["units"]["ts"] == "us"


def test_a_large_pipeline_is_a_small_file(
    layout: Callable[..., RunConfig], planted: Callable[..., Any], tmp_path: Path
) -> None:
    config = layout(pp=16, tp=2, samples=128, model={"num_layers": 96}, device=GPU)
    assert config.num_microbatches == 64
    trace = step_trace({"predicted": estimate_step(config, planted())})
    read(trace)
    file = tmp_path / "timeline.json.gz"
    write_json(file, trace)
    assert file.stat().st_size < 2e6


@pytest.mark.skipif(SHELL is None, reason="no trace_processor_shell on the path")
def test_perfetto_takes_every_event(
    layout: Callable[..., RunConfig], planted: Callable[..., Any], tmp_path: Path
) -> None:
    """Runs only with a local importer; the package would fetch it from the network."""
    api = pytest.importorskip("perfetto.trace_processor")
    config = api.TraceProcessorConfig(bin_path=SHELL)
    steps = {case: estimate_step(layout(**kw), planted()) for case, kw in CASES.items()}
    trace, file = step_trace(steps), tmp_path / "timeline.json"
    write_json(file, trace)
    phases = Counter(event["ph"] for event in trace["traceEvents"])
    with api.TraceProcessor(trace=str(file), config=config) as importer:
        bad = "select name from stats where severity = 'error' and value > 0"
        assert [row.name for row in importer.query(bad)] == []
        for table, phase in (("slice", "X"), ("flow", "s")):
            (row,) = importer.query(f"select count(*) as n from {table}")
            assert row.n == phases[phase]


def _damaged(trace: dict[str, Any], how: str) -> None:
    events = trace["traceEvents"]
    passes = [e for e in events if e["ph"] == "X" and e["name"].startswith("forward ")]
    arrow = next(event for event in events if event["ph"] == "f")
    if how == "a slice that leaves what it is in":
        passes[0]["dur"] = passes[0]["dur"] / 2
    elif how == "an arrow without an end":
        events.remove(arrow)
    elif how == "an arrow to a slice that is not open":
        arrow["ts"] += 0.125
    elif how == "the idle task":
        passes[0]["tid"] = 0
    elif how == "a time that is text":
        passes[0]["ts"] = "0"
    else:
        del passes[0]["dur"]


@pytest.mark.parametrize(
    "how",
    [
        "a slice that leaves what it is in",
        "an arrow without an end",
        "an arrow to a slice that is not open",
        "the idle task",
        "a time that is text",
        "no length",
    ],
)
def test_the_reader_refuses_what_perfetto_drops(
    how: str, layout: Callable[..., RunConfig], planted: Callable[..., Any]
) -> None:
    text = json.dumps(step_trace({"predicted": estimate_step(layout(pp=2), planted())}))
    read(json.loads(text))
    trace = json.loads(text)
    _damaged(trace, how)
    with pytest.raises(AssertionError):
        read(trace)
