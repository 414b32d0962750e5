"""The step model calibrated by step times alone, on rows that were planted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from step_fixtures import timed
from tiny_shape import of_width

from forerun.benchmarks.protocols.table_steps import design, expected_sigma_log
from forerun.calib.errors import ConfigError
from forerun.calib.fit.estimates import Estimates, Source
from forerun.calib.records.step_rows import StepRow
from forerun.calib.steps._layouts import layouts_of
from forerun.calib.steps._priced_items import FAMILY, SCALE
from forerun.calib.steps._scales import EFFECT_SIGMA_LOG, Effect, effects_of
from forerun.calib.steps.base_times import Conditions, prior_times
from forerun.calib.steps.known_steps import (
    MEASURED_SIGMA_LOG,
    KnownStep,
    correlations,
    similarity,
)
from forerun.calib.steps.model import FittedSteps, fit_steps
from forerun.calib.timeline.compiled import compile_layouts
from forerun.calib.timeline.evaluation import evaluate, step_times
from forerun.calib.timeline.items import Item
from forerun.calib.workload.collectives import CollectiveCall
from forerun.calib.workload.config import (
    Batch,
    Parallelism,
    PositionEmbedding,
    RunConfig,
)
from forerun.calib.workload.layout_table import LayoutTable
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

BASE = prior_times("A100", is_attention_fused=True)
HOST = {OperatorKind.HOST_MICROBATCH: 5e-5, OperatorKind.HOST_STEP: 3e-3}


def row(
    *,
    layers: int = 16,
    hidden: int = 4096,
    tp: int = 1,
    pp: int = 1,
    micro: int = 4,
    m: int = 8,
    seq: int = 2048,
) -> StepRow:
    rope = PositionEmbedding.ROPE
    config = RunConfig(
        model=of_width(hidden, num_layers=layers, vocab_size=51200, position_embedding=rope),
        parallelism=Parallelism(tp=tp, pp=pp, ranks_per_node=8),
        batch=Batch(micro_batch_size=micro, global_batch_size=micro * m),
        device="A100",
    )
    name = f"{layers} {hidden} {tp} {pp} {micro} {m}"
    return StepRow(
        table="planted", row_id=name, config=config, measured_s=1.0, machine="a", group="a"
    )


ROWS = tuple(
    row(layers=layers, tp=tp, pp=pp, micro=micro, m=m)
    for tp in (1, 2, 4)
    for pp in (1, 2)
    for micro in (2, 4, 8)
    for layers, m in ((16, 8), (24, 4))
)


def planted(rows: Sequence[StepRow], compute: float, tp: float) -> list[StepRow]:
    """Times by the engine alone: base times of operators and of transfers times a factor."""
    compiled = compile_layouts([r.config for r in rows])
    times_s = BASE.times_s(compiled.items)
    for place, item in enumerate(compiled.items):
        if isinstance(item, CollectiveCall):
            times_s[place] *= tp
        elif isinstance(item, Operator) and item.kind in HOST:
            times_s[place] = HOST[item.kind]
        elif item.kind is OperatorKind.OPTIMIZER:
            times_s[place] = item.shape[0] * 40 / BASE.conditions.bytes_per_s
        else:
            times_s[place] *= compute
    values = step_times(compiled, evaluate(compiled, times_s[:, None], contention=1.3))[:, 0]
    return [replace(r, measured_s=float(t)) for r, t in zip(rows, values, strict=True)]


def fitted(train: Sequence[StepRow]) -> FittedSteps:
    return fit_steps(BASE, [KnownStep.of(r) for r in train])


def configs(rows: Sequence[StepRow]) -> list[RunConfig]:
    return [r.config for r in rows]


def moved(rows: Sequence[StepRow], cells: Mapping[Effect, float]) -> list[StepRow]:
    """Each cell off by a factor of its own."""
    logs = [cells[effects_of(r.config)[-1]] for r in rows]
    return [
        replace(r, measured_s=r.measured_s * math.exp(log))
        for r, log in zip(rows, logs, strict=True)
    ]


def errors(train: Sequence[StepRow], test: Sequence[StepRow]) -> np.ndarray:
    predictions = fitted(train).predict(configs(test))
    return np.log(predictions.time_s / [r.measured_s for r in test])


def covered_after_six(rows: Sequence[StepRow], generator: np.random.Generator) -> list[bool]:
    """Return True for each row that its interval contains, once six random others are known."""
    chosen = generator.permutation(len(rows))
    train, test = [rows[i] for i in chosen[:6]], [rows[i] for i in chosen[6:]]
    predictions = fitted(train).predict(configs(test))
    measured = np.array([r.measured_s for r in test])
    return ((predictions.low_s <= measured) & (measured <= predictions.high_s)).tolist()


@pytest.mark.parametrize(("compute", "tp"), [(0.8, 1.6), (1.3, 0.8)])
def test_planted_factors_are_found_from_a_few_steps(compute: float, tp: float) -> None:
    rows = planted(ROWS, compute, tp)
    train = [rows[i] for i in design(rows, 8)]
    rest = [r for r in rows if r not in train]
    before, after = np.abs(errors([], rest)).mean(), np.abs(errors(train, rest)).mean()
    assert after < 0.025
    assert after < 0.3 * before


def test_without_rows_the_prior_speaks_and_its_interval_is_wide() -> None:
    predictions = fitted([]).predict(configs(ROWS))
    layouts = layouts_of(configs(ROWS), BASE)
    center = np.zeros((len(layouts.constants), 1))
    assert np.log(predictions.time_s) == pytest.approx(layouts.log_time(center)[:, 0])
    assert (predictions.high_s > 1.2 * predictions.time_s).all()
    known = fitted(planted(ROWS, 1.0, 1.0)).predict(configs(ROWS))
    assert (known.high_s / known.low_s < predictions.high_s / predictions.low_s).all()


class Instant:
    """A device whose kernels take no time: what is left is the host."""

    conditions = Conditions(is_attention_fused=True, bytes_per_s=BASE.conditions.bytes_per_s)

    def has(self, kind: OperatorKind, phase: Phase) -> bool:
        return False

    def estimates(self, items: Sequence[Item]) -> Estimates:
        nothing = np.zeros(len(items))
        sources = (Source.PRIOR,) * len(items)
        return Estimates(time_s=nothing + 1e-9, sigma_log=nothing, sources=sources)


def test_on_an_instant_device_a_layer_takes_what_its_launches_take() -> None:
    """Closed form: each more layer is a floor forwards and 1.6 floors backwards."""
    few, many = (row(layers=n, hidden=128, micro=1, m=4) for n in (2, 6))
    values = fit_steps(Instant()).predict(configs([few, many])).time_s
    optimizer_s = 4 * 12 * 128**2 * 40 / BASE.conditions.bytes_per_s
    each = (values[1] - values[0] - optimizer_s) / (4 * 4)
    assert each == pytest.approx(0.4e-3 * 2.6, rel=1e-3)


def test_steps_grow_with_the_nodes_by_what_a_series_shows() -> None:
    """One layout on 1 to 64 nodes, each doubling of which costs 3 % more than transfers say."""
    rows = [row(layers=8, m=8)]
    for dp in (8, 16, 32, 64, 128, 256, 512):
        par = replace(rows[0].config.parallelism, dp=dp)
        batch = replace(rows[0].config.batch, global_batch_size=32 * dp)
        rows.append(replace(rows[0], config=replace(rows[0].config, parallelism=par, batch=batch)))
    series = rows[1:]
    flat = fitted([]).predict(configs(series)).time_s
    doublings = np.arange(len(series))
    measured = [
        replace(r, measured_s=float(t * 1.03**n))
        for r, t, n in zip(series, flat, doublings, strict=True)
    ]
    predictions = fitted(measured[:4]).predict(configs(series))
    before = fitted(measured[:1]).predict(configs(series))
    assert abs(predictions.time_s[-1] / measured[-1].measured_s - 1) < 0.06
    assert before.time_s[-1] < 0.92 * measured[-1].measured_s
    alone = layouts_of(configs([rows[0]]), BASE)
    assert alone.doublings.tolist() == [[0.0]]


def test_effects_stay_with_their_width() -> None:
    rows = planted(ROWS, 1.0, 1.0)
    fit = fitted(rows[:6])
    assert fit.posterior is not None
    theta = fit.posterior.theta.copy()
    is_effect = [name[0] not in (SCALE, FAMILY) for name in fit.posterior.constants]
    theta[is_effect] += 0.5
    moved = replace(fit, posterior=replace(fit.posterior, theta=theta))
    other, same_width = configs([row(hidden=8192, layers=8)]), configs(rows[:6])
    assert moved.predict(other).time_s == pytest.approx(fit.predict(other).time_s)
    assert (moved.predict(same_width).time_s > 1.5 * fit.predict(same_width).time_s).all()


def test_order_of_rows_does_not_matter() -> None:
    rows = planted(ROWS, 0.9, 1.2)
    one = fitted(rows[:8]).predict(configs(rows))
    other = fitted(rows[7::-1]).predict(configs(rows))
    assert other.time_s.tolist() == one.time_s.tolist()
    assert other.high_s.tolist() == one.high_s.tolist()


def test_steps_that_no_constants_explain_widen_the_noise_not_the_constants() -> None:
    rows = planted(ROWS, 1.0, 1.0)
    odd = [replace(rows[0], measured_s=rows[0].measured_s * f) for f in (0.5, 2.0, 0.5, 2.0)]
    fit = fitted(odd)
    assert fit.posterior is not None and fit.posterior.sigma_log > 0.2
    assert float(np.abs(errors(odd, rows)).mean()) < 0.2


@pytest.mark.slow
def test_intervals_cover_cells_that_differ_as_assumed() -> None:
    generator = np.random.default_rng(0)
    inside = []
    for _ in range(12):
        rows = planted(ROWS, float(np.exp(generator.normal(0, 0.2))), 1.2)
        cells = {effects_of(r.config)[-1]: generator.normal(0, 0.06) for r in rows}
        rows = [
            replace(r, measured_s=r.measured_s * math.exp(cells[effects_of(r.config)[-1]]))
            for r in rows
        ]
        inside += covered_after_six(rows, generator)
    assert 0.82 <= np.mean(inside) <= 0.99


@pytest.mark.slow
def test_a_design_tells_more_than_random_rows() -> None:
    generator = np.random.default_rng(1)
    chosen = design(ROWS, 6)
    random = [generator.permutation(len(ROWS))[:6].tolist() for _ in range(10)]
    others = [expected_sigma_log(ROWS, one) for one in random]
    assert len(set(chosen)) == 6
    assert expected_sigma_log(ROWS, chosen) < min(others)
    # Noise-free rows in which each cell differs: the design's errors are smaller as well.
    rows = planted(ROWS, 0.8, 1.5)
    cells = {effects_of(r.config)[-1]: generator.normal(0, 0.06) for r in rows}
    rows = [
        replace(r, measured_s=r.measured_s * math.exp(cells[effects_of(r.config)[-1]]))
        for r in rows
    ]

    def mape(positions: Sequence[int]) -> float:
        return float(np.abs(errors([rows[i] for i in positions], rows)).mean())

    assert mape(chosen) < np.mean([mape(one) for one in random])


def test_a_design_reads_no_measured_time_and_needs_enough_rows() -> None:
    blind = [replace(r, measured_s=math.nan) for r in ROWS]
    assert design(blind, 5) == design(ROWS, 5)
    assert design(ROWS, 0) == []
    call: Callable[[], object] = lambda: design(ROWS[:3], 4)  # noqa: E731
    with pytest.raises(ConfigError, match="--rows 4"):
        call()


def test_what_one_layout_leaves_tells_of_another_as_far_as_they_are_alike() -> None:
    """The conditional mean and deviation of two normal variables, in closed form."""
    known = planted(ROWS[:1], 1.0, 1.0)
    fit = fitted(known).posterior
    assert fit is not None
    near, far = row(micro=4), row(tp=4, pp=4, micro=8, layers=24)
    logs, sigmas, _ = fit.discrepancy_of(LayoutTable.of(configs([near, far])))
    shared = similarity(configs([near, far]), configs(known))[:, 0]
    assert shared == pytest.approx([0.8 * math.exp(-1 / 4), shared[1]])
    assert shared[1] < 0.6 * shared[0]
    s2, noise2 = fit.sigma_log**2, MEASURED_SIGMA_LOG**2
    assert sigmas**2 == pytest.approx(s2 - (s2 * shared) ** 2 / (s2 + noise2))
    assert logs == pytest.approx(s2 * shared / (s2 + noise2) * fit.residuals[0])


@pytest.mark.slow
def test_intervals_cover_layouts_that_miss_alike() -> None:
    generator = np.random.default_rng(2)
    alike = np.linalg.cholesky(correlations(configs(ROWS)))
    inside = []
    for _ in range(12):
        misses = 0.06 * alike @ generator.standard_normal(len(ROWS))
        rows = planted(ROWS, float(np.exp(generator.normal(0, 0.2))), 1.2)
        rows = [
            replace(r, measured_s=r.measured_s * math.exp(miss))
            for r, miss in zip(rows, misses, strict=True)
        ]
        inside += covered_after_six(rows, generator)
    assert 0.82 <= np.mean(inside) <= 0.99


def test_devices_that_wait_run_faster_as_pipelines_show() -> None:
    """Passes a fifth of the idle share faster: a deeper pipeline follows from shallower ones."""
    rows = planted([row(pp=pp, layers=32, m=8) for pp in (1, 2, 4, 8, 16)], 1.0, 1.0)
    idle = [(pp - 1) / (8 + pp - 1) for pp in (1, 2, 4, 8, 16)]
    rows = [
        replace(r, measured_s=r.measured_s * math.exp(-0.2 * share))
        for r, share in zip(rows, idle, strict=True)
    ]
    assert abs(errors(rows[:4], rows[4:])[0]) < 0.03
    assert abs(errors(rows[:1], rows[4:])[0]) > abs(errors(rows[:4], rows[4:])[0])


def test_one_wild_step_of_many_hardly_moves_the_others() -> None:
    """A slip of a factor of two: with normal scatter alone it moved all others by 8 % and more."""
    rows = planted(ROWS, 1.1, 1.2)
    train, test = rows[:24:4], rows[1:24:4]
    slip = [replace(train[0], measured_s=2 * train[0].measured_s), *train[1:]]
    usual, pulled = errors(train, test), errors(slip, test)
    assert np.abs(pulled - usual).mean() < 0.04


def test_where_most_are_off_it_is_the_model_that_is() -> None:
    """Layouts that scatter by 30 % widen the rest; none of them is a slip."""
    generator = np.random.default_rng(3)
    rows = planted(ROWS, 1.0, 1.0)
    logs = generator.normal(0.0, 0.3, len(rows))
    off = [
        replace(r, measured_s=r.measured_s * math.exp(log))
        for r, log in zip(rows, logs, strict=True)
    ]
    usual, wide = fitted(rows[::3]).posterior, fitted(off[::3]).posterior
    assert usual is not None and wide is not None
    assert wide.sigma_log > 3 * usual.sigma_log and 0.15 < wide.sigma_log < 1.0


def test_of_two_steps_that_disagree_both_count() -> None:
    """Nobody can say which is off: another order of the two is the same model."""
    one, other, rest = (planted([r], 1.0, 1.0)[0] for r in (ROWS[0], ROWS[8], ROWS[16]))
    higher = errors([replace(one, measured_s=1.5 * one.measured_s), other], [rest])[0]
    lower = errors([one, replace(other, measured_s=1.5 * other.measured_s)], [rest])[0]
    assert higher == pytest.approx(lower, abs=0.07)
    assert 0.1 < higher < 0.4


def test_a_cost_that_another_hides_at_the_centre_is_found() -> None:
    """A host at four times the usual floor: at the usual one no launch of these layers shows."""
    rows = [short(row(hidden=1024, micro=micro, m=m), 256) for micro in (1, 2, 4) for m in (8, 16)]
    layouts = layouts_of(configs(rows), BASE)
    theta = np.zeros((len(layouts.constants), 1))
    floor = layouts.constants.index((SCALE, "floor"))
    assert layouts.slopes(theta[:, 0], 1e-4)[1][:, floor].max() < 0.01
    theta[floor] = math.log(4.0)
    measured = timed(rows, np.exp(layouts.log_time(theta))[:, 0])
    posterior = fitted(measured).posterior
    assert posterior is not None
    assert posterior.theta[floor] == pytest.approx(math.log(4.0), abs=0.2)
    between, others = measured[2:4], [*measured[:2], *measured[4:]]
    assert np.abs(errors(others, between)).max() < 0.02


def short(one: StepRow, seq_length: int) -> StepRow:
    """The row at another sequence length."""
    model = replace(one.config.model, seq_length=seq_length)
    return replace(one, config=replace(one.config, model=model))


def test_a_close_fit_of_one_width_does_not_narrow_the_prior_of_another() -> None:
    """Layers of other widths are off by draws from the prior of an effect; 36 steps fit exactly."""
    known = fitted(planted(ROWS, 1.1, 1.2))
    assert known.posterior is not None and known.posterior.spread_factor < 0.5
    widths = (2048, 3072, 6144, 8192)
    others = [row(hidden=hidden, tp=tp, micro=4) for hidden in widths for tp in (1, 2)]
    truth = np.array([one.measured_s for one in planted(others, 1.1, 1.2)])
    found, generator = known.predict(configs(others)), np.random.default_rng(58)
    off = np.exp(generator.normal(0.0, EFFECT_SIGMA_LOG["width"], (200, len(widths))))
    measured = truth * np.repeat(off, 2, axis=1)
    assert ((found.low_s <= measured) & (measured <= found.high_s)).mean() > 0.88
