"""Priors of rates: the file, how it is built, and what devices without measurements get."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

from forerun.calib.fit._rates import Rates
from forerun.calib.fit.batches import ShapeBatch, batch_of
from forerun.calib.fit.laws import columns
from forerun.calib.fit.operator_kinds import KINDS, WorkKind
from forerun.calib.fit.priors import device_prior
from forerun.calib.fit.rate_priors import FILE, data_sheet, rates_prior, sources_of
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "published"
MOST_NBYTES = 100_000
BOUNDS = {WorkKind.LAUNCH: (1e-8, 1e-3), WorkKind.FLOP: (1.0, 50.0), WorkKind.BYTES: (0.049, 50.0)}
"""Seconds of a launch, and times of a FLOP and a byte over those of the data sheet."""
ETT = "ops_ett_fwd_bwd"


@pytest.fixture(scope="module")
def built() -> dict:
    path = resources.files("forerun.calib.fit").joinpath(FILE)
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def builder() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location(
        "build_priors", ROOT / "benchmarks" / "fits" / "build_priors.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_priors"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["build_priors"]


@pytest.fixture
def few_tables(builder: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a few rows of some tables, and a builder that takes so few."""
    monkeypatch.setattr(builder, "FEWEST_ROWS", 4)
    folder = tmp_path / "tables"
    folder.mkdir()
    for name in ("ops_vidur_mlp", "ops_aic_gemm_bf16", "ops_aic_attention_prefill_bf16"):
        shutil.copy(GOLDEN / f"{name}.csv", folder)
    return folder


def linear(phase: Phase = Phase.FORWARD) -> ShapeBatch:
    shapes = [(2048, 4096, 4096), (4096, 8192, 2048), (128, 4096, 12288)]
    kind = OperatorKind.LINEAR_QKV
    return batch_of([Operator(kind=kind, phase=phase, shape=s, element_nbytes=2) for s in shapes])


def planted_table(rates: Rates, *, device: str, noise: float) -> pd.DataFrame:
    """Products of 96 shapes from launch-bound to FLOP-bound."""
    rng = np.random.default_rng(3)
    rows = []
    for size_in in (64, 512, 2048, 8192):
        for size_out in (64, 1024, 4096, 16384):
            for tokens in (1, 16, 256, 1024, 4096, 16384):
                shape = (tokens, size_in, size_out)
                operator = Operator(
                    kind=OperatorKind.LINEAR, phase=Phase.FORWARD, shape=shape, element_nbytes=2
                )
                done = columns(batch_of([operator]), device_prior(device).num_units)
                log_time = float(rates.log_time(done)[0]) + noise * rng.normal()
                rows.append(
                    {
                        "device": device,
                        "group": "gemm",
                        "kind": "linear",
                        "phase": "forward",
                        "shape": "x".join(map(str, shape)),
                        "element_nbytes": 2,
                        "time_s": np.exp(log_time),
                        "tp": pd.NA,
                        "flag": "",
                    }
                )
    return pd.DataFrame(rows)


def test_the_file_is_small_and_names_a_licence_for_every_table(built: dict) -> None:
    size = len(resources.files("forerun.calib.fit").joinpath(FILE).read_bytes())
    assert size <= MOST_NBYTES
    assert {e["table"] for e in built["entries"]} <= set(built["sources"])
    for source in built["sources"].values():
        assert source["licence"] in {"MIT", "Apache-2.0"}
        assert source["repository"] and source["commit"]


def test_every_factor_is_finite_and_physically_possible(built: dict) -> None:
    for source in sources_of(built):
        assert source.num_rows >= 30
        assert 0 < source.shape_sigma_log < 1
        assert 0 <= source.lead_frac < 1
        factors = np.array(source.log_factor)
        assert np.isfinite([*factors, *source.sigma_log, source.log_power]).all()
        for cost, factor, sigma in zip(source.costs, factors, source.sigma_log, strict=True):
            unit = np.exp(factor) * (1e-6 if cost is WorkKind.LAUNCH else 1.0)
            low, high = BOUNDS[cost]
            assert low <= unit <= high, (source.device, source.pool, source.table, cost)
            assert 0 < sigma <= 1


def test_the_columns_of_every_entry_are_those_of_its_law(built: dict) -> None:
    for source in sources_of(built):
        name, _, phase = source.pool.partition("/")
        kind = OperatorKind(name)
        num_sizes = KINDS[kind].num_sizes
        batch = ShapeBatch(
            kind=kind,
            phase=Phase(phase),
            sizes=np.full((1, num_sizes), 64.0),
            element_nbytes=np.array([float(source.element_nbytes)]),
        )
        assert columns(batch, device_prior(source.device).num_units).costs == source.costs


def test_planted_rates_come_back_from_a_table(builder: ModuleType) -> None:
    ceilings = data_sheet(device_prior("A100"), 2)
    factors = np.array([1.2, 0.35, 0.6])
    units = np.log([ceilings.unit_s(c) for c in (WorkKind.LAUNCH, WorkKind.FLOP, WorkKind.BYTES)])
    rates = Rates(log_unit_s=units + factors, log_power=0.1, lead_frac=0.0)
    table = planted_table(rates, device="A100", noise=0.02)
    entry = sources_of(builder.build({"ops_aic_gemm_bf16": table}))[0]
    assert entry.pool == "linear/forward" and entry.num_rows == len(table)
    assert np.abs(np.array(entry.log_factor) - factors).max() < 0.06
    assert entry.shape_sigma_log == pytest.approx(0.02, abs=0.01)


def test_rows_that_cannot_be_true_set_no_rate(builder: ModuleType) -> None:
    ceilings = data_sheet(device_prior("A100"), 2)
    units = np.log([ceilings.unit_s(c) for c in (WorkKind.LAUNCH, WorkKind.FLOP, WorkKind.BYTES)])
    rates = Rates(log_unit_s=units + 0.5, log_power=0.0, lead_frac=0.0)
    table = planted_table(rates, device="A100", noise=0.01)
    wrong = table.assign(time_s=table["time_s"].where(table.index % 8 > 0, 1e-12))
    flagged = table.assign(flag=["copied" if i % 8 == 0 else "" for i in table.index])
    builds = [builder.build({"ops_aic_gemm_bf16": t}) for t in (wrong, flagged)]
    assert builds[0] == builds[1]


def test_factors_below_a_physical_bound_stay_on_it(builder: ModuleType) -> None:
    ceilings = data_sheet(device_prior("A100"), 2)
    units = np.log([ceilings.unit_s(c) for c in (WorkKind.LAUNCH, WorkKind.FLOP, WorkKind.BYTES)])
    rates = Rates(log_unit_s=units + np.array([1.0, -0.02, 0.5]), log_power=0.0, lead_frac=0.0)
    table = planted_table(rates, device="A100", noise=0.0)
    entry = sources_of(builder.build({"ops_aic_gemm_bf16": table}))[0]
    assert entry.log_factor[1] == 0.0


@pytest.mark.slow
def test_building_again_gives_the_same_file(
    builder: ModuleType, few_tables: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "priors.json"
    command = ["build_priors.py", str(few_tables), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    assert builder.main() == 0
    first = out.read_bytes()
    assert json.loads(first)["entries"]
    monkeypatch.setattr(sys, "argv", [*command, "--check"])
    assert builder.main() == 0
    changed = json.loads(first)
    changed["entries"][0]["log_factor"][0] += 1.0
    out.write_text(json.dumps(changed), encoding="utf-8")
    assert builder.main() == 1


def test_the_order_of_rows_does_not_matter(builder: ModuleType, few_tables: Path) -> None:
    tables = builder.read_tables(few_tables)
    turned = {name: t.iloc[::-1].reset_index(drop=True) for name, t in tables.items()}
    assert not builder.differences(builder.build(tables), builder.build(turned))


def test_a_left_out_table_is_no_source() -> None:
    whole = rates_prior("NVIDIA A100-SXM4-80GB", OperatorKind.LINEAR_QKV, Phase.FORWARD, 2)
    rest = rates_prior(
        "NVIDIA A100-SXM4-80GB", OperatorKind.LINEAR_QKV, Phase.FORWARD, 2, without=(ETT,)
    )
    assert whole is not None and rest is not None
    assert set(whole.sources) - set(rest.sources) == {f"a100 {ETT}"}
    assert not np.array_equal(whole.log_time(linear()), rest.log_time(linear()))


def test_nothing_is_said_where_nobody_measured() -> None:
    assert rates_prior("A100", OperatorKind.ROUTER, Phase.FORWARD, 2) is None
    assert rates_prior("cpu", OperatorKind.NORM, Phase.FORWARD, 4) is None
    assert rates_prior("A100", OperatorKind.LOSS, Phase.FORWARD, 2, without=(ETT,)) is None


@pytest.mark.parametrize("device", ["Accelerator 9", "NVIDIA L40S", "AMD Instinct MI300X"])
def test_a_device_without_sources_takes_those_of_another_and_doubts_them(device: str) -> None:
    kind, phase = OperatorKind.LINEAR_FC1, Phase.FORWARD
    moved = rates_prior(device, kind, phase, 2)
    native = rates_prior("H100", kind, phase, 2)
    assert moved is not None and native is not None
    assert native.steps == 0 and moved.steps >= 1
    assert (np.array(moved.sigma_log) > native.sigma_log).all()
    assert (moved.sigma_log_time(linear()) > native.sigma_log_time(linear())).all()


def test_the_farther_the_generation_the_wider_the_doubt() -> None:
    results = [
        rates_prior(d, OperatorKind.LOSS, Phase.FORWARD, 2) for d in ("A100", "H100", "B200")
    ]
    priors = [prior for prior in results if prior is not None]
    assert [prior.steps for prior in priors] == [0.0, 1.0, 2.0]
    assert len({prior.sources for prior in priors}) == 1
    doubts = [prior.sigma_log[2] for prior in priors]
    assert doubts == sorted(doubts) and doubts[0] < doubts[-1]


def test_twice_the_ceilings_halve_the_time_that_is_not_launches() -> None:
    prior = rates_prior("A100", OperatorKind.LINEAR_QKV, Phase.FORWARD, 2)
    assert prior is not None
    assert prior.ceilings.flop_per_s == pytest.approx(312e12)
    faster = replace(
        prior,
        ceilings=replace(
            prior.ceilings,
            flop_per_s=2 * prior.ceilings.flop_per_s,
            bytes_per_s=2 * prior.ceilings.bytes_per_s,
            launch_s=prior.ceilings.launch_s / 2,
        ),
    )
    ratio = prior.log_time(linear()) - faster.log_time(linear())
    assert ratio == pytest.approx(np.log(2.0), rel=1e-9)


def test_large_products_run_at_a_credible_share_of_the_data_sheet() -> None:
    prior = rates_prior("A100", OperatorKind.LINEAR_FC1, Phase.FORWARD, 2)
    assert prior is not None
    batch = batch_of(
        [
            Operator(
                kind=OperatorKind.LINEAR_FC1,
                phase=Phase.FORWARD,
                shape=(8192, 8192, 8192),
                element_nbytes=2,
            )
        ]
    )
    least_s = 2 * 8192**3 / 312e12
    assert 0.55 < least_s / np.exp(prior.log_time(batch)[0]) < 0.9


def test_quantisation_of_the_input_is_taken_off_products_in_8_bits(builder: ModuleType) -> None:
    sizes = [
        (m, k, n) for m in (32, 1024, 8192) for k in (1024, 8192) for n in (32, 1024, 8192, 65536)
    ]
    sizes.append((777, 1024, 8192))  # without a thin product: nobody knows what its input takes
    alone_s = {s: 5e-6 + s[0] * s[1] * s[2] * 2e-15 + (s[0] + s[2]) * s[1] / 2e12 for s in sizes}
    table = pd.DataFrame(
        {
            "device": "h100",
            "group": "gemm fp8",
            "shape": ["x".join(map(str, s)) for s in sizes],
            "time_s": [alone_s[s] + 3e-12 * s[0] * s[1] for s in sizes],
        }
    )
    result = builder.without_casts(table)
    assert list(result.columns) == list(table.columns)
    remaining_shapes = [tuple(int(n) for n in shape.split("x")) for shape in result["shape"]]
    assert (8192, 8192, 65536) in remaining_shapes and not {
        (8192, 8192, 32),
        (777, 1024, 8192),
    } & set(remaining_shapes)
    wanted = np.array([alone_s[s] for s in remaining_shapes])
    # The mirror has an input of 32 tokens of its own, which is all that is left.
    assert result["time_s"].to_numpy() == pytest.approx(wanted, abs=1e-6)


def flash(phase: Phase) -> ShapeBatch:
    shape = (1, 32, 8, 8192, 128, 128)
    kind = OperatorKind.FLASH_ATTENTION
    return batch_of([Operator(kind=kind, phase=phase, shape=shape, element_nbytes=2)])


@pytest.mark.parametrize(("device", "nbytes"), [("H100", 1), ("B200", 2), ("GB300", 1)])
def test_a_backward_product_goes_as_fast_as_a_forward_one_that_is_known_better(
    device: str, nbytes: int
) -> None:
    """Not at the rate of other elements, or of another generation."""
    forward, backward = (
        rates_prior(device, OperatorKind.LINEAR_FC1, phase, nbytes)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    assert forward is not None and backward is not None
    assert backward.sources == forward.sources
    assert backward.log_factor == forward.log_factor


@pytest.mark.parametrize("device", ["A100", "H100", "B200"])
def test_fused_attention_backward_takes_three_times_its_forward_pass(device: str) -> None:
    """Five products for two at 0.8 to 0.9 of the rate: 2.8 to 3.1 (Shah et al. 2024, figure 6)."""
    times = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        prior = rates_prior(device, OperatorKind.FLASH_ATTENTION, phase, 2)
        assert prior is not None
        times.append(float(np.exp(prior.log_time(flash(phase))[0])))
    assert 2.6 < times[1] / times[0] < 3.1
