"""Layers recorded by turns: each class of operator is covered, and sums over layers come back."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
import torch._dynamo  # otherwise its import is watched for
from device_clock import Clock
from device_streams import Device, install_device, stopwatch_on, uninstall_device
from device_truth import Truth
from hypothesis import given
from hypothesis import strategies as st
from small_decoder import BATCH, SEQ, Model, TransformerLayer
from torch import nn

from forerun.calib.marks._attribution import Attribution
from forerun.calib.marks._waits import MOST_QUEUED, host_times, lags_of
from forerun.calib.marks.step_marks import NO_TIME
from forerun.calib.records.record_kinds import BACKWARD, FORWARD, OperatorRecord, from_dict, to_dict
from forerun.calib.samples._operator_rows import host_microbatch_rows, operator_rows
from forerun.calib.workload.operators import OperatorKind
from forerun.hooks.process.guard import Guard
from forerun.hooks.process.host import Host, WeakHost
from forerun.hooks.recording.window import layer_weights
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.sites import find_places, natures
from forerun.hooks.sensors.step_log import Site, StepLog
from forerun.hooks.sensors.stopwatch import DeviceStopwatch
from forerun.hooks.session import instruments
from forerun.hooks.session._mark_budget import COST_FRAC, MarkBudget
from forerun.hooks.session.instruments import Instruments

NUM_HOOKED = 10


@given(st.lists(st.sampled_from("dm"), min_size=1, max_size=100), st.integers(0, 500))
def test_records_stand_for_all_layers_of_each_nature_in_each_step(kinds, number) -> None:
    layers = dict(enumerate(kinds))
    weights = layer_weights(layers, number)
    assert {0, len(kinds) - 1} <= weights.keys() <= layers.keys()
    for kind in "dm":
        stood_for = sum(weight for layer, weight in weights.items() if layers[layer] == kind)
        assert stood_for == pytest.approx(kinds.count(kind))
    assert len(weights) <= 2 + 2 * len(set(kinds))


@pytest.mark.parametrize("num_layers", [3, 4, 12, 21])
@pytest.mark.parametrize("every", [1, 2, 4])
def test_all_layers_have_their_turn(num_layers: int, every: int) -> None:
    """Also if operators are recorded in every second or fourth hooked step alone."""
    layers = dict.fromkeys(range(num_layers), "d")
    turns = [layer_weights(layers, number) for number in range(0, 6 * num_layers * every, every)]
    counts = [sum(layer in turn for turn in turns) for layer in range(1, num_layers - 1)]
    assert min(counts) >= 0.5 * max(counts)


class SomeLayers(Model):
    """The small decoder with seven layers, of which the second has a wider window."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(number + 1) for number in range(7))
        for number, layer in enumerate(self.layers):
            layer.self_attention.core_attention.window = 1024 if number == 1 else 128


def test_layers_with_other_settings_or_shapes_are_of_another_nature() -> None:
    model = SomeLayers()
    known = natures(find_places([model]))
    assert len(set(known.values())) == 3  # the first one is with what is outside of the layers
    assert known[1] not in {known[n] for n in (2, 3, 4, 5, 6)}
    model.layers[4].mlp.linear_fc1 = nn.Linear(8, 40)
    assert len(set(natures(find_places([model])).values())) == 4


class Short(MarkBudget):
    """Has no space for all layers from the second hooked step on."""

    def level(self, num_steps: int, num_chosen: int, step_s: float, sites_frac: float = 1) -> int:
        return int(self._span_marks > 0 and sites_frac == 1)


def test_every_class_is_covered_and_some_layers_stand_for_all(monkeypatch) -> None:
    monkeypatch.setattr(
        instruments, "stopwatch_for", lambda *_: DeviceStopwatch(FreeEvent, stream_key=lambda: 1)
    )
    torch.manual_seed(0)
    model, guard = SomeLayers(), Guard()
    ids = torch.randint(0, 16, (BATCH, SEQ))
    found = Instruments(
        WeakHost(Host(models=(model,), passes=(model,))),
        guard,
        num_steps=4,
        budget=Short(num_sites=9),
    )
    losses, sums = [], []
    for step in range(4):
        found.put_on(step=step, window=0)
        loss = model(ids)
        loss.backward()
        losses.append(loss.item())
        log = found.take_off()
        assert log.resolve()
        records = [r for r in Attribution(log).records() if isinstance(r, OperatorRecord)]
        totals: dict[tuple, float] = {}
        for record in records:
            key = record.kind, record.phase
            totals[key] = totals.get(key, 0.0) + record.stands_for
            assert from_dict(to_dict(record)) == record
        sums.append(totals)
        assert bool(log.site_weights) == (step > 0)
        assert len({r.layer for r in records}) == (7 if step == 0 else 5)
    assert len(set(losses)) == 1 and guard.num_faults == 0
    for totals in sums[1:]:
        assert totals == pytest.approx(sums[0])
    covered = {r.name: r.installed for r in found.coverage(0)}
    assert covered["linear_fc1"] == covered["linear_fc1:backward"] == 7


class FreeEvent:
    """An event at the next tick, which has happened."""

    ticks = 0

    def record(self, stream: object = None) -> None:
        FreeEvent.ticks += 1
        self.at = FreeEvent.ticks

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: FreeEvent) -> float:
        return end.at - self.at


def _events(times_s: np.ndarray, is_sampled: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Operators of hooked steps, one micro-batch each, with their phases; in all layers or some."""
    rows, phases = [], []
    noise = np.random.default_rng(3)
    layers = dict.fromkeys(range(len(times_s)), "d")
    for step in range(NUM_HOOKED):
        scattered_s = times_s * np.exp(noise.normal(0.0, 0.02, len(times_s)))
        weights = layer_weights(layers, step) if is_sampled else dict.fromkeys(layers, 1.0)
        begin_ns = step * 10**9
        for layer, weight in sorted(weights.items()):
            start_ns = begin_ns + 1 + layer * 1000
            rows.append((step, layer, start_ns, scattered_s[layer], weight))
        phases.append((step, begin_ns, 0.9, 0.0, 0.0))
    events = pd.DataFrame(rows, columns=["step", "layer", "start_ns", "time_s", "stands_for"])
    both = {"window": 0, "rank": 0, "stage": 0}
    events = events.assign(
        **both, kind="norm", phase="forward", shape="8,8", element_nbytes=2, host_bound_s=0.0,
        host_s=0.0, microbatch=0,
    )  # fmt: skip
    compute = pd.DataFrame(phases, columns=["step", "start_ns", "duration_s", "wait_s", "hook_s"])
    compute = compute.assign(
        **both, name="forward-compute", is_hooked=True, duration_ns=900_000_000, microbatch=0
    )
    return events, compute


@pytest.mark.parametrize("first", [1.0, 2.0])
@pytest.mark.parametrize("slope", [0.0, 0.02])
def test_sums_over_layers_come_back_without_bias(first: float, slope: float) -> None:
    """Layers may be equal, or the first one slower, or each one slower than the one before."""
    times_s = 1e-3 * (1.0 + slope * np.arange(24))
    times_s[0] *= first
    rests, totals = [], []
    for is_sampled in (True, False):
        events, phases = _events(times_s, is_sampled)
        (row,) = operator_rows(events).to_dict("records")
        assert row["count"] == 24 * NUM_HOOKED
        totals.append(row["time_s"] * 24)
        rests.append(host_microbatch_rows(events, phases)["time_s"].item())
    assert totals == pytest.approx([times_s.sum()] * 2, rel=0.01)
    assert rests == pytest.approx([0.9 - times_s.sum()] * 2, rel=0.01)


def _log(cost_s: float, *, sampled: int, num_spans: int = 100, num_passes: int = 4) -> StepLog:
    """A hooked step that has been read: one of its passes each way took longer."""
    chosen = tuple(n if n == sampled else -1 for n in range(num_passes))
    log = StepLog(step=0, window=0, sites=(), samples=chosen)
    log.span_sites.extend(range(num_spans * (sampled >= 0)))
    now_ns = 0
    for number in range(num_passes):
        for is_forward, time_s in ((True, 0.01), (False, 0.02)):
            log.marks.append(now_ns)
            now_ns += round((time_s + cost_s * num_spans / 2 * (number == sampled)) * 1e9)
            log.marks.append(now_ns)
            place = len(log.marks)
            log.passes.append((is_forward, number == sampled, place - 2, place - 1))
    log.num_pass_marks = 4 * num_spans
    return log


@pytest.mark.parametrize("cost_s", [0.0, 30e-6, 126e-6])
def test_the_cost_of_an_operator_is_learned_from_the_passes_of_one_step(cost_s: float) -> None:
    budget = MarkBudget(num_sites=100)
    log = _log(cost_s, sampled=1)
    budget.learn(log, is_thin=False)
    budget.learn_cost(log)
    assert budget.cost_s == pytest.approx(cost_s, abs=1e-9)
    for step_s in (0.3, 1.0, 3.0):
        for sites_frac in (1.0, 0.3):
            chosen = [
                any(m >= 0 for m in budget.chosen((0, -1, -1, -1), n, 100, step_s, sites_frac))
                for n in range(100)
            ]
            assert np.mean(chosen) * 100 * sites_frac * cost_s <= max(
                COST_FRAC * step_s, 0.02 * 100 * sites_frac * cost_s
            )
            if cost_s == 0.0 and step_s == 3.0:
                assert all(chosen)


def test_without_other_passes_the_cost_is_that_inside_the_hooks_until_a_step_has_none() -> None:
    budget = MarkBudget(num_sites=100)
    log = _log(50e-6, sampled=0, num_passes=1)
    log.hook_times_ns.extend([20_000] * 100)
    budget.learn(log, is_thin=False)
    budget.learn_cost(log)
    assert budget.cost_s == pytest.approx(30e-6)
    budget.learn_cost(_log(0.0, sampled=-1, num_passes=1))
    budget.learn_cost(log)
    assert budget.cost_s == pytest.approx(50e-6)


@pytest.mark.parametrize("is_sampled", [False, True])
def test_launches_of_layers_without_events_are_in_the_queue_as_well(is_sampled: bool) -> None:
    """The device is far behind: from about the same layer on the host may wait for the queue."""
    clock = Clock(Truth())
    device = Device(clock)
    install_device(device)
    recorder = Recorder(stopwatch_on(device))
    num_layers, per_layer = 100, 4
    sites = tuple(
        Site(kind=OperatorKind.LINEAR_FC1, layer=layer)
        for layer in range(num_layers)
        for _ in range(per_layer)
    )
    watched = {0, 1, 30, 60, 61, 99} if is_sampled else set(range(num_layers))
    weights = [float(site.layer in watched) for site in sites] if is_sampled else ()
    log = recorder.open(StepLog(step=0, window=0, sites=sites, site_weights=weights))
    recorder.begin_phase(FORWARD)
    for number, site in enumerate(sites):
        span = recorder.begin_span(number) if site.layer in watched else -1
        clock.launch(device.line, 1e-3)
        if span >= 0:
            recorder.end_span(span, recorder.stopwatch.mark(), ((8, 1, 4), (8, 1, 6)), 2)
    recorder.end_phase(FORWARD)
    recorder.close()
    clock.synchronize()
    assert log.resolve()
    uninstall_device()
    times = list(host_times(log, lags_of(log)))
    unknown = [
        log.sites[log.span_sites[what >> 4]].layer
        for what, host_ns in zip(log.what, times, strict=True)
        if host_ns == NO_TIME and what & 15 <= 1
    ]
    # Eight launches for each of the four operators of a layer.
    assert min(layer for layer in unknown if layer > 1) in range(MOST_QUEUED // 64, 62)
    known = {
        log.sites[log.span_sites[what >> 4]].layer
        for what, host_ns in zip(log.what, times, strict=True)
        if host_ns != NO_TIME and what & 15 <= 1
    }
    assert max(known) < 60


def test_phases_of_both_ways_are_kept_for_the_comparison() -> None:
    recorder = Recorder(DeviceStopwatch(FreeEvent, stream_key=lambda: 1))
    log = recorder.open(StepLog(step=0, window=0, sites=(), samples=(0, -1)))
    for name in (FORWARD, BACKWARD, FORWARD, BACKWARD):
        recorder.begin_phase(name)
        recorder.end_phase(name)
    recorder.close()
    assert [(way, is_sampled) for way, is_sampled, *_ in log.passes] == [
        (True, True), (False, True), (True, False), (False, False),
    ]  # fmt: skip
    assert [log.what[last] >> 4 for *_, last in log.passes] == [0, 1, 2, 3]
